"""Saving a checkpoint: what each rank writes is described on the training thread, and written there or behind it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from syncline.arguments import Count, Whole, checked
from syncline.errors import CheckpointError
from syncline.observe import tell_if_long
from syncline.pytorch.checkpoint import folder as place
from syncline.pytorch.checkpoint.background import CheckpointWork, writer_of
from syncline.pytorch.checkpoint.group import CheckpointGroup, Together, again_if_members_change, checkpoint_group_of
from syncline.pytorch.checkpoint.state import SavedState, Stateful, encode_parts
from syncline.pytorch.optimizer import DistributedOptimizer
from syncline.updates.state import StateEntry, describe_state, joined_catalogues

_SAVE = "save_checkpoint()"


@checked
@again_if_members_change
def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
    iteration: Whole | None = None,
    keep: Count | None = None,
    wait: bool = True,
    **parts: Stateful,
) -> CheckpointWork | None:
    """Write a checkpoint to the folder ``path``; every rank calls it. What was there becomes ``path.previous``.

    ``extra`` is what JSON can say (epoch, seed ...), taken from rank 0. ``parts`` are objects with ``state_dict()``,
    by any names: ``scheduler=scheduler``, ``sampler=sampler``. ``iteration``: steps that were made (default: the
    optimizer's count). With ``keep=n``, ``path`` is a folder of checkpoints named by their iterations, of which the
    last n stay; the oldest goes when the new one is whole. With ``wait=False`` it returns as soon as all is copied in
    memory, which is kept for the next save: then threads write it while training goes on. What goes wrong there is
    raised by the work that it returns, by the next save, which waits for this one, or when the fleet closes.

    Raises :class:`CheckpointError` on every rank if one of them fails; the checkpoint that was there is whole then.
    Where ranks may be lost, or only serve (``Clustered`` with a temporary server; ``Overlapped`` with M < N or
    dedicated servers), the lowest worker that lives writes alone, and only it waits; call ``optimizer.end_period()``
    before, so that it has what all have. It is a checkpoint of ``torch.distributed.checkpoint`` too: ``model`` and
    ``optimizer`` are in it as ``get_state_dict()`` has them.

    >>> model, optimizer = syncline.distribute(model, optimizer)
    >>> syncline.save_checkpoint("run1", model, optimizer, extra={"epoch": 3})
    >>> syncline.load_checkpoint("run1", model, optimizer)
    {'epoch': 3}
    """
    group = checkpoint_group_of(model, optimizer)
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.last_save = {"path": path, "extra": extra, "keep": keep, **parts}
    return _save(Path(path).absolute(), model, group, _Ask(extra, iteration, keep, parts), wait=wait)


@checked
def prepare_save(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Make the memory ready that ``save_checkpoint(..., wait=False)`` copies into; call it after the first step.

    Without it, the first save also waits for the kernel to find and clear that memory: for 100 MB some 10 ms, and on a
    virtual machine whose host gives memory when it is first touched, hundreds. A thread touches it while training goes
    on, and the call returns at once. It takes as many bytes as this rank writes, which the first save would take then.
    Each rank calls it for itself, or leaves it; before the first step there is no optimizer state to make room for. A
    save that comes before all is touched does not wait for the rest.

    Raises :class:`CheckpointError` if what is to be saved cannot be.

    >>> model, optimizer = syncline.distribute(model, optimizer)
    >>> model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
    >>> syncline.prepare_save(model, optimizer)
    >>> syncline.save_checkpoint("run1", model, optimizer, wait=False).wait()
    """
    group = checkpoint_group_of(model, optimizer)
    if group.saves:
        group.synchronize()
        writer_of(group.owner).prepare(_owned_state(model, group, group.entries()).chunks)


def save_alone(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, iteration: int) -> Path:
    """Write what this rank has by itself, when the others cannot be asked any more; ``optimizer`` is the plain one.

    Returns where: ``path``, or in it, where it has checkpoints of earlier iterations. One of this is left as it is.
    """
    from syncline.pytorch.checkpoint.storage import is_whole  # takes a while to load

    if place.num_kept(path):
        path = place.place_of(path, iteration)
        if is_whole(path):
            return path
    ask = _Ask({"iteration": iteration}, iteration, None, {})
    _save(path, model, CheckpointGroup(model, optimizer), ask, wait=True)
    return path


@dataclass(frozen=True, slots=True)
class _Ask:
    """What the user gave beside model and optimizer."""

    extra: Any
    iteration: int | None
    keep: int | None
    parts: Mapping[str, Stateful]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Snapshot:
    """What this rank writes, what it tells of it, and on rank 0 what is said of the whole checkpoint."""

    target: Path
    keep: int | None
    state: SavedState
    told: dict[str, Any]
    head: dict[str, Any]


def _save(target: Path, model: nn.Module, group: CheckpointGroup, ask: _Ask, *, wait: bool) -> CheckpointWork | None:
    if not group.saves:
        return None
    told = {"path": str(target), "extra": ask.extra, "iteration": ask.iteration, "keep": ask.keep, "wait": wait}
    group.announce_save(told)
    group.synchronize()
    group.end_period()
    try:
        return _save_once(target, model, group, ask, wait=wait)
    except CheckpointError:
        group.check_members()
        raise


def _save_once(
    target: Path, model: nn.Module, group: CheckpointGroup, ask: _Ask, *, wait: bool
) -> CheckpointWork | None:
    """Save, or begin to; None if there is nothing to be waited for."""
    writer, exchange = writer_of(group.owner), group.exchange
    taken: list[_Snapshot] = []

    def begin() -> list[bool]:
        writer.finish()
        found = _describe(target, model, group, ask)
        taken.append(found if wait else replace(found, state=writer.snapshot(found.state)))
        return [bool(ask.parts), group.fleet is not None and writer.is_connected(group.fleet)]

    answers = Together(exchange, target, _SAVE).gather("cannot begin", begin)
    group.check_members()
    snapshot = taken[0]
    if group.rank != next((rank for rank, (has_parts, _) in enumerate(answers) if has_parts), 0):
        snapshot.told["parts"] = {}
    if wait:
        with tell_if_long(f"saving {snapshot.target}", is_told=group.rank == 0):
            storing = nullcontext if group.fleet is None else group.fleet.communicator.progress.storing
            _write(snapshot, group.rank, exchange, storing)
        group.check_members()
        return None
    writer.register(group.fleet)
    if group.world_size > 1 and group.fleet is not None:
        if not all(is_connected for _, is_connected in answers):
            writer.connect(group.fleet)
        exchange = writer.exchange
    return writer.start(snapshot.target, partial(_write, snapshot, group.rank, exchange))


def _describe(target: Path, model: nn.Module, group: CheckpointGroup, ask: _Ask) -> _Snapshot:
    """Say what this rank has to write; tensors are the ones that are trained."""
    iteration = group.iteration if ask.iteration is None else ask.iteration
    if ask.keep is not None:
        if iteration is None:
            raise CheckpointError(
                "Checkpoints that are kept are named by their iterations, which a plain optimizer does not count; give "
                "save_checkpoint() the number of steps as iteration="
            )
        place.check_keepable(target)
        target = place.place_of(target, iteration)
    entries = group.entries()
    told = {"catalogue": describe_state(entries), "parts": encode_parts(ask.parts)}
    head: dict[str, Any] = {}
    if group.rank == 0:
        groups = json.loads(json.dumps(group.groups()))
        head["world_size"], head["iteration"], head["extra"] = group.world_size, iteration or 0, _plain(ask.extra)
        head["optimizer"] = None if group.optimizer is None else {"groups": groups}
    return _Snapshot(target=target, keep=ask.keep, state=_owned_state(model, group, entries), told=told, head=head)


def _plain(extra: Any) -> Any:
    """Return ``extra`` as it will be loaded; raises :class:`CheckpointError` for what JSON cannot say."""
    try:
        return json.loads(json.dumps(extra))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"extra must be what JSON can say, but {error}; give objects by a name of their own"
        ) from error


def _owned_state(model: nn.Module, group: CheckpointGroup, entries: Sequence[StateEntry]) -> SavedState:
    """Return what this rank writes: its part of the model, the state that it owns, and on rank 0 hyper-parameters."""
    state = SavedState()
    state.add_model(model, group.alike(), rank=group.rank, world_size=group.world_size)
    state.add_entries(entries, group.slots())
    if group.rank == 0 and group.optimizer is not None:
        state.add_groups(group.optimizer.param_groups, group.names())
    return state


def _write(
    snapshot: _Snapshot,
    rank: int,
    exchange: Callable[[Any, str], list[Any]],
    storing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Write the checkpoint, together with the others; on the training thread, or in the background."""
    from syncline.pytorch.checkpoint import storage  # which would hold up training, in its first save

    target = snapshot.target
    together = Together(exchange, target, _SAVE, storing)

    def write_part() -> dict[str, Any]:
        return {**snapshot.told, **storage.write_chunks(place.writing_folder(target), snapshot.state, rank=rank)}

    together.run("cannot make a folder", lambda: None if rank else place.begin(target, storage.is_ours))
    try:
        parts = together.gather("cannot write its part", write_part)
        together.run("cannot complete the checkpoint", lambda: None if rank else _complete(snapshot, parts))
    except Exception:
        if rank == 0:
            place.discard(target)
        raise


def _complete(snapshot: _Snapshot, parts: list[dict[str, Any]]) -> None:
    from syncline.pytorch.checkpoint.manifest import CheckpointManifest, write_manifest
    from syncline.pytorch.checkpoint.storage import write_index

    target, folder = snapshot.target, place.writing_folder(snapshot.target)
    content = snapshot.head | {
        "parts": {name: text for part in parts for name, text in part["parts"].items()},
        "records": [record for part in parts for record in part["records"]],
        "files": {name: sums for part in parts for name, sums in part["files"].items()},
    }
    if content["optimizer"] is not None:
        catalogue = joined_catalogues(part["catalogue"] for part in parts)
        content["optimizer"]["state"] = {name: {"state": keys} for name, keys in catalogue.items()}
    manifest = CheckpointManifest.model_validate(content)
    write_index(folder, manifest.records)
    write_manifest(folder, manifest)
    place.commit(target)
    if snapshot.keep is not None:
        try:
            place.prune(target, keep=snapshot.keep)
        except OSError as error:
            raise CheckpointError(
                f"{target} is whole, but an older one beside it cannot be removed: {error}"
            ) from error
