"""Loading a checkpoint, whoever wrote it: this library, or a program with ``torch.distributed.checkpoint``.

Its files are checked by all ranks together, then each takes what it owns. Where our manifest lies beside, that is
asked. Else it is DCP's own index, which has names alone: so the model is looked for by its parameters' names, behind
whatever the program put before them (``model.``, ``app.model.``, ``model.module.``), and the optimizer's state
likewise.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from syncline.arguments import checked
from syncline.errors import CheckpointError
from syncline.observe import tell_if_long
from syncline.pytorch.checkpoint import folder as place
from syncline.pytorch.checkpoint.group import (
    CheckpointGroup,
    MembersChangedError,
    Together,
    again_if_members_change,
    checkpoint_group_of,
)
from syncline.pytorch.checkpoint.state import (
    MODEL_PREFIX,
    STATE_PREFIX,
    Catalogue,
    CheckpointState,
    Chunk,
    Stateful,
    encode_parts,
    load_part,
)
from syncline.pytorch.optimizer import DistributedOptimizer, Gate
from syncline.updates.bucket import Slot
from syncline.updates.state import SINGLE_VALUES, StateEntry, encode_single

if TYPE_CHECKING:
    from syncline.pytorch.checkpoint.manifest import CheckpointManifest
    from syncline.pytorch.checkpoint.storage import ChunkTable

_log = logging.getLogger(__name__)
_CALL = "resume()"


@checked
@again_if_members_change
def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    **parts: Stateful,
) -> Any:
    """Load a checkpoint into ``model`` and ``optimizer``, in place, and return its ``extra``; every rank calls it.

    Of a folder of several (``keep=``) the newest is taken. A folder that a program has written with
    ``torch.distributed.checkpoint`` (of FSDP or DistributedDataParallel, on any number of ranks, with the names of
    ``get_state_dict()``) is one too; it has no ``extra``, and no checksums. ``parts`` take the states that they were
    saved with, by the same names. With ``strict`` the model's and the checkpoint's names must be the same, and all
    parts must be there; else what both have is loaded. Raises :class:`CheckpointError` on every rank if it is missing,
    damaged, or made from another model or kind of optimizer.

    >>> syncline.save_checkpoint("run1", model, optimizer, extra={"epoch": 3})
    >>> model, optimizer = syncline.distribute(model, optimizer)
    >>> syncline.load_checkpoint("run1", model, optimizer)["epoch"]  # of any number of ranks, here of a plain process
    3
    """
    target = Path(path).absolute()
    group = checkpoint_group_of(model, optimizer)
    group.synchronize()
    together = Together(group.exchange, target, "load_checkpoint()")
    with tell_if_long(f"loading {target}", is_told=group.rank == 0):
        found = together.run("cannot read the checkpoint", lambda: _check(place.find(target), group))
        action = partial(_load, *found, model, group, parts, strict=strict)
        return together.run("cannot load the checkpoint", action).extra


@checked
def latest_checkpoint(folder: str | Path) -> Path | None:
    """Return the newest whole checkpoint at ``folder``, an absolute path; None if there is none.

    ``folder`` is one checkpoint, or has several (``save_checkpoint(..., keep=n)``), of which the latest iteration is
    taken whose files are all there; :func:`load_checkpoint` compares their contents too. Any process may ask.

    >>> for number in range(3):
    ...     syncline.save_checkpoint("run1", model, iteration=number, keep=2)
    >>> syncline.latest_checkpoint("run1").name
    'iteration-0000000002'
    """
    from syncline.pytorch.checkpoint.storage import is_whole  # takes a while to load

    return next(filter(is_whole, place.candidates(Path(folder).absolute())), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Where training goes on, as :func:`syncline.resume` found it.

    >>> syncline.resume("run1", model, optimizer)
    Resumption(iteration=0, extra={}, path=None)
    """

    iteration: int = 0
    """Steps that were made."""
    extra: Any = field(default_factory=dict)
    """What was saved as ``extra``; an empty dictionary if nothing was."""
    path: Path | None = None
    """The checkpoint that was loaded; None at the first start, and where this rank came into a running job."""


@checked
def resume(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    **parts: Stateful,
) -> Resumption:
    """Load the newest whole checkpoint at ``path``, if there is one, and say where training goes on.

    Every rank calls it, once, after :func:`syncline.distribute`, also those that only serve; on any number of ranks,
    whatever number has saved. ``path`` is what ``save_checkpoint`` was given, with or without ``keep=``. ``parts`` are
    the schedulers, samplers and the like that were saved by the same names. All ranks take the same checkpoint: where
    the newest is damaged, the one before, and one rank logs a warning. Nothing is changed at the first start.

    A rank that has come into a running job (``init(join=)``) is where the members are already: for it alone, nothing is
    loaded but ``parts``, which it is given as they were within the ``step()`` at whose end it came in.

    Raises :class:`CheckpointError` on every rank if there are checkpoints and all are damaged, or if the one that is
    loaded is of another model or kind of optimizer.

    >>> model, optimizer = syncline.distribute(model, optimizer)
    >>> begin = syncline.resume("run1", model, optimizer)
    >>> for iteration in range(begin.iteration, 3):
    ...     model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
    ...     syncline.save_checkpoint("run1", model, optimizer, extra={"seed": 1}, keep=2)
    >>> syncline.resume("run1", model, optimizer).iteration
    3
    """
    if isinstance(optimizer, DistributedOptimizer):
        num_kept = place.num_kept(Path(path))  # a notice before the first save removes none of them
        optimizer.last_save = optimizer.last_save or {"path": path, "keep": num_kept + 1 if num_kept else None, **parts}
    growing = optimizer.growing if isinstance(optimizer, DistributedOptimizer) else None
    if growing is not None:
        growing.offer_parts = partial(encode_parts, parts)
        growing.offer_parts()  # what cannot be given is told now
        if growing.has_just_come:
            return take_parts(growing, parts)
    return resume_together(path, model, optimizer, strict=strict, **parts)


@again_if_members_change
def resume_together(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    **parts: Stateful,
) -> Resumption:
    """Load the newest whole checkpoint, as :func:`resume`, on every rank, whenever it came."""
    target = Path(path).absolute()
    group = checkpoint_group_of(model, optimizer)
    group.synchronize()
    together = Together(group.agree, target, _CALL)
    names = together.gather("cannot look for checkpoints", partial(_relative_candidates, target))[0]
    if not names:
        return Resumption()
    problems: list[str] = []
    for name in names:
        folder = target.parent / name
        try:
            found = together.run("cannot read the checkpoint", partial(_check, folder, group))
        except MembersChangedError:
            raise
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if problems and (group.fleet is None or group.fleet.rank == 0):
            _log.warning("training goes on from %s, since newer ones are damaged: %s", folder, "; ".join(problems))
        action = partial(_load, *found, model, group, parts, strict=strict)
        with tell_if_long(f"loading {folder}", is_told=group.rank == 0):
            loaded = together.run("cannot load the checkpoint", action)
        extra = {} if loaded.extra is None else loaded.extra
        return Resumption(iteration=loaded.iteration, extra=extra, path=folder)
    raise CheckpointError(f"No checkpoint at {target} is whole: {'; '.join(problems)}")


def take_parts(growing: Gate, parts: Mapping[str, Stateful]) -> Resumption:
    """Go on where the members are: of what ``resume()`` was given on them, take the state.

    Raises :class:`CheckpointError` for what they did not give.
    """
    for name, part in parts.items():
        if name not in growing.parts:
            raise CheckpointError(
                f"{name}= was not given to resume() by the members of the job that this rank has come into, which gave "
                f"{', '.join(sorted(growing.parts)) or 'nothing'}; run the same script"
            )
        load_part(name, part, growing.parts[name])
    return Resumption(iteration=growing.iteration)


def _relative_candidates(target: Path) -> list[str]:
    """Return what may be loaded as seen from beside ``target``, which ranks may have mounted in different places."""
    return [os.path.relpath(folder, target.parent) for folder in place.candidates(target)]


def _check(folder: Path, group: CheckpointGroup) -> tuple[Path, CheckpointManifest | ChunkTable]:
    """Raise :class:`CheckpointError` if it is damaged, as far as this rank's share of the files tells.

    Returns what our own manifest says of it, or where another program wrote it, DCP's index.
    """
    from syncline.pytorch.checkpoint.manifest import check_files, read_manifest  # takes a while to load

    if not (folder / place.MANIFEST).is_file() and place.is_checkpoint(folder):
        from syncline.pytorch.checkpoint.storage import read_index  # torch's part of it takes a second

        return folder, read_index(folder)
    manifest = read_manifest(folder)
    check_files(folder, manifest.files, part=group.rank, num_parts=group.world_size)
    return folder, manifest


def _load(
    folder: Path,
    told: CheckpointManifest | ChunkTable,
    model: nn.Module,
    group: CheckpointGroup,
    parts: Mapping[str, Stateful],
    *,
    strict: bool,
) -> CheckpointManifest:
    """Take from a folder what this rank needs, and return what is said of it."""
    targets = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    contents = _read_contents(folder, told, targets.keys(), group)
    manifest = contents.manifest
    wanted = _model_chunks(contents, targets, strict=strict)
    missing = [name for name in parts if name not in manifest.parts]
    if strict and missing:
        raise CheckpointError(
            f"The checkpoint {folder} has no state of {missing[0]}=; save_checkpoint(..., {missing[0]}=...) writes it, "
            "and strict=False goes on without"
        )
    if group.optimizer is not None:
        if manifest.optimizer is None:
            raise CheckpointError(f"The checkpoint {folder} was saved without an optimizer; load it without one")
        catalogue = manifest.optimizer.model_dump()["state"]
        source = CheckpointState(catalogue, prefix=contents.state_prefix)
        group.load_groups(manifest.optimizer.groups, {key for entry in catalogue.values() for key in entry["state"]})
        group.load_state(source)
        wanted += source.wanted
    with torch.no_grad():
        contents.table.read(wanted)
    for name, part in parts.items():
        if name in manifest.parts:
            load_part(name, part, manifest.parts[name])
    group.go_on_from(manifest.iteration)
    return manifest


def _model_chunks(contents: CheckpointContents, targets: Mapping[str, torch.Tensor], *, strict: bool) -> list[Chunk]:
    prefix, names = contents.model_prefix, set(targets)
    stored = {name.removeprefix(prefix) for name in contents.table.tensors if name.startswith(prefix)}
    if strict and names != stored:
        missing, unknown = sorted(names - stored)[:5], sorted(stored - names)[:5]
        raise CheckpointError(
            f"The checkpoint {contents.table.folder} is of another model: it lacks {missing}, and has {unknown} that "
            "the model lacks"
        )
    chunks = [Chunk.whole(name, value) for name, value in targets.items() if name in stored]
    return [replace(chunk, name=f"{prefix}{chunk.name}") for chunk in chunks]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContents:
    """What is to be loaded, by names; elements are still on the disk."""

    table: ChunkTable
    manifest: CheckpointManifest
    model_prefix: str = MODEL_PREFIX
    state_prefix: str = STATE_PREFIX


def _read_contents(
    folder: Path, told: CheckpointManifest | ChunkTable, model_names: Collection[str], group: CheckpointGroup
) -> CheckpointContents:
    """Say what there is for a model of these names, and for its optimizer, as our manifest has told or DCP's index."""
    from syncline.pytorch.checkpoint.manifest import CheckpointManifest
    from syncline.pytorch.checkpoint.storage import ChunkTable  # torch's part of it takes a second

    if isinstance(told, CheckpointManifest):
        return CheckpointContents(table=ChunkTable.of_records(folder, told.records), manifest=told)
    table = told
    model_prefix = _prefix_of_model(table, model_names)
    optimizer, prefix = None, None if group.optimizer is None else _prefix_of_optimizer(table, model_prefix)
    if prefix is not None:
        groups = _groups(table, f"{prefix}param_groups.", group.names_by_group())
        optimizer = {"state": _catalogue(table, f"{prefix}state.", group.slots()), "groups": groups}
    said = {"world_size": 1, "iteration": 0, "optimizer": optimizer, "extra": None}
    manifest = CheckpointManifest.model_validate({**said, "parts": {}, "records": [], "files": {}})
    return CheckpointContents(table=table, manifest=manifest, model_prefix=model_prefix, state_prefix=f"{prefix}state.")


def _prefix_of_model(table: ChunkTable, model_names: Collection[str]) -> str:
    """Return what stands before most of the model's names."""
    counts: Counter[str] = Counter()
    for stored in table.tensors:
        counts.update(stored[: -len(name)] for name in _endings(stored) if name in model_names)
    if not counts:
        shown = ", ".join(repr(name) for name in sorted(table.tensors)[:3])
        raise CheckpointError(
            f"The checkpoint {table.folder} has nothing of this model; it has {shown} ...; load it into the model that "
            "it was made from"
        )
    most = max(counts.values())
    best = sorted(prefix for prefix, count in counts.items() if count == most)
    if len(best) > 1 and MODEL_PREFIX not in best:
        raise CheckpointError(
            f"The checkpoint {table.folder} has this model several times, behind {', '.join(map(repr, best))}; keep "
            "one of them in it, as 'model'"
        )
    return best[0] if len(best) == 1 else MODEL_PREFIX


def _prefix_of_optimizer(table: ChunkTable, model_prefix: str) -> str | None:
    """Return what stands before the names of the optimizer's state and groups; None if there is none."""
    mark = "param_groups."
    prefixes = {
        name[: name.index(mark)]
        for name in (*table.tensors, *table.values)
        if mark in name and not name.startswith(model_prefix + mark)
    }
    if len(prefixes) > 1:
        raise CheckpointError(
            f"The checkpoint {table.folder} has several optimizers ({', '.join(sorted(prefixes))}); load the "
            "model alone"
        )
    return prefixes.pop() if prefixes else None


def _endings(name: str) -> list[str]:
    """Return a dotted name, and what is left of it when words are taken from its beginning."""
    words = name.split(".")
    return [".".join(words[start:]) for start in range(len(words))]


def _catalogue(table: ChunkTable, prefix: str, slots: Mapping[str, Slot]) -> Catalogue:
    """Say what the state of each parameter is, as :func:`syncline.pytorch.optimizer_state.describe_state` does."""
    catalogue: Catalogue = {}
    singles: list[tuple[str, str, str]] = []
    for name in (*table.tensors, *table.values):
        parameter, _, key = name.removeprefix(prefix).rpartition(".")
        if not name.startswith(prefix) or parameter not in slots:
            continue
        stored = table.tensors.get(name)
        if stored is not None and tuple(stored.size) == slots[parameter].shape and key not in SINGLE_VALUES:
            catalogue.setdefault(parameter, {"state": {}})["state"][key] = str(stored.properties.dtype)
        else:
            singles.append((name, parameter, key))
    found = table.read_whole([name for name, _, _ in singles])
    for name, parameter, key in singles:
        entry = StateEntry(parameter=parameter, key=key, value=found[name])
        catalogue.setdefault(parameter, {"state": {}})["state"][key] = [encode_single(entry)]
    return catalogue


def _groups(table: ChunkTable, prefix: str, names: Sequence[Collection[str]]) -> list[dict[str, Any]]:
    """Return hyper-parameters by group: stored by its number, or (``flatten_optimizer_state_dict``) by parameter."""
    found = table.read_whole([name for name in (*table.tensors, *table.values) if name.startswith(prefix)])
    by_owner: dict[str, dict[str, Any]] = {}
    for name, value in found.items():
        owner, _, key = name.removeprefix(prefix).rpartition(".")
        if key not in {"params", "param_names"}:
            by_owner.setdefault(owner, {})[key] = value
    if all(owner.isdecimal() for owner in by_owner):
        return [by_owner[owner] for owner in sorted(by_owner, key=int)]
    return [next((by_owner[name] for name in group if name in by_owner), {}) for group in names]
