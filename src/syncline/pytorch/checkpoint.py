"""Checkpoints that load on any number of ranks and any topology, exactly: state belongs to parameters, not to ranks.

The model is written by rank 0. Each rank writes the optimizer state that it owns, as ranges of each parameter's
elements; together they are whole, so another division of the same elements reads them as well, also a single process
without a fleet. Ranks must see the same file system.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from syncline.errors import CheckpointError, SynclineError, name_ranks
from syncline.pytorch import checkpoint_folder as place
from syncline.pytorch.checkpoint_chunks import Chunk, Record, check_complete, read_chunks, write_chunks, write_index
from syncline.pytorch.checkpoint_group import CheckpointGroup, again_if_members_change, checkpoint_group_of
from syncline.pytorch.checkpoint_state import CheckpointState, join_catalogues, state_chunks
from syncline.pytorch.optimizer_state import describe_state
from syncline.updates.state import StateEntry


@again_if_members_change
def save_checkpoint(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, extra: Any = None
) -> None:
    """Write a checkpoint to the folder ``path``; every rank calls it. What was there becomes ``path.previous``.

    ``extra`` is what JSON can say (step number, seed ...), taken from rank 0. Raises :class:`CheckpointError` on every
    rank if one of them fails; the checkpoint that was there is whole then. Where ranks may be lost, or only serve
    (``Clustered``; ``Overlapped`` with M < N or dedicated servers), the lowest worker that lives writes alone, and only
    it waits; call ``optimizer.end_period()`` before, so that it has what all have.

    >>> model, optimizer = syncline.distribute(model, optimizer)
    >>> syncline.save_checkpoint("run1", model, optimizer, extra={"epoch": 3})
    >>> syncline.load_checkpoint("run1", model, optimizer)
    {'epoch': 3}
    """
    _save(Path(path).absolute(), model, optimizer, checkpoint_group_of(model, optimizer), extra)


def save_alone(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, extra: Any = None) -> None:
    """Write what this rank has by itself, when the others cannot be asked any more; ``optimizer`` is the plain one."""
    _save(Path(path).absolute(), model, optimizer, CheckpointGroup(model, optimizer), extra)


def _save(
    target: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, group: CheckpointGroup, extra: Any
) -> None:
    if not group.saves:
        return
    group.announce_save(str(target), extra)
    group.synchronize()
    together = _Together(group, target, "save_checkpoint()")
    together.run("cannot make a folder", lambda: _begin(target, group, extra))
    try:
        _fill(target, model, optimizer, group, extra)
    except CheckpointError:
        if group.rank == 0:
            place.discard(target)
        raise


def _fill(
    target: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, group: CheckpointGroup, extra: Any
) -> None:
    together = _Together(group, target, "save_checkpoint()")
    entries = group.entries()
    catalogues = together.run("cannot describe its state", lambda: describe_state(entries))
    parts = together.run("cannot write its part", lambda: _write(target, model, group, entries))

    def complete() -> None:
        if group.rank == 0:
            catalogue = join_catalogues(catalogues, group.slots())
            state = {"state": catalogue, "groups": group.groups()} if optimizer is not None else None
            _complete(target, {"world_size": group.world_size, "optimizer": state, "extra": extra, **_joined(parts)})

    together.run("cannot complete the checkpoint", complete)


@again_if_members_change
def load_checkpoint(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, strict: bool = True
) -> Any:
    """Load a checkpoint into ``model`` and ``optimizer``, in place, and return its ``extra``; every rank calls it.

    With ``strict`` the model's and the checkpoint's names must be the same; else those that both have are loaded.
    Raises :class:`CheckpointError` on every rank if it is missing, damaged, or made from another model.

    >>> syncline.save_checkpoint("run1", model, optimizer, extra={"epoch": 3})
    >>> model, optimizer = syncline.distribute(model, optimizer)
    >>> syncline.load_checkpoint("run1", model, optimizer)["epoch"]  # of any number of ranks, here of a plain process
    3
    """
    target = Path(path).absolute()
    group = checkpoint_group_of(model, optimizer)
    group.synchronize()
    together = _Together(group, target, "load_checkpoint()")
    together.run("cannot read the checkpoint", lambda: _check(target, group))
    folder = place.find(target)
    manifest = place.read_manifest(folder)
    together.run("cannot load the checkpoint", lambda: _load(folder, manifest, model, group, strict=strict))
    return manifest["extra"]


def model_chunks(model: nn.Module) -> list[Chunk]:
    """Return all tensors of a model's ``state_dict``, whole; changes to them change the model."""
    chunks = []
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{name!r} of the model's state_dict is a {type(value).__name__}; only tensors are saved; use extra"
            )
        chunks.append(Chunk.whole(f"model.{name}", value))
    return chunks


class _Together:
    """Lets all ranks do a thing in the user's ``call``, and all fail if one does."""

    def __init__(self, group: CheckpointGroup, target: Path, call: str) -> None:
        self._group = group
        self._target = target
        self._call = call

    def run(self, what: str, action: Callable[[], Any]) -> list[Any]:
        """Return what each rank's ``action`` returned."""
        result, problem, cause = None, "", None
        try:
            result = action()
        except SynclineError as error:
            problem = str(error)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError) as error:
            problem, cause = _root_of(error), error
        answers = self._group.exchange({"problem": problem, "result": result}, self._call)
        ranks_by_problem: dict[str, list[int]] = {}
        for rank, answer in enumerate(answers):
            if answer["problem"]:
                ranks_by_problem.setdefault(answer["problem"], []).append(rank)
        if ranks_by_problem:
            shown = "; ".join(f"{name_ranks(ranks)}: {problem}" for problem, ranks in ranks_by_problem.items())
            raise CheckpointError(f"Checkpoint {self._target}: a rank {what}: {shown}") from cause
        return [answer["result"] for answer in answers]


def _root_of(error: BaseException) -> str:
    """Say what the operating system refused, if it did: torch's writer then fails once more, and says less."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.strerror:
            return found.strerror + (f" ({found.filename})" if found.filename else "")
        found = found.__cause__ or found.__context__
    return f"{type(error).__name__}: {error}"


def _begin(target: Path, group: CheckpointGroup, extra: Any) -> None:
    if group.rank == 0:
        json.dumps(extra)
        place.begin(target)


def _write(target: Path, model: nn.Module, group: CheckpointGroup, entries: list[StateEntry]) -> dict[str, Any]:
    folder = place.writing_folder(target)
    of_model = model_chunks(model) if group.rank == 0 else []
    records = write_chunks(folder, [*of_model, *state_chunks(entries, group.slots())], rank=group.rank)
    return {"records": records, "files": place.checksums(folder, (record["file"] for record in records))}


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "records": [record for part in parts for record in part["records"]],
        "files": {name: sums for part in parts for name, sums in part["files"].items()},
    }


def _complete(target: Path, manifest: dict[str, Any]) -> None:
    check_complete(manifest["records"])
    write_index(place.writing_folder(target), manifest["records"])
    place.commit(target, manifest)


def _check(target: Path, group: CheckpointGroup) -> None:
    folder = place.find(target)
    manifest = place.read_manifest(folder)
    place.check_files(folder, manifest["files"], part=group.rank, num_parts=group.world_size)


def _load(folder: Path, manifest: Mapping[str, Any], model: nn.Module, group: CheckpointGroup, *, strict: bool) -> None:
    records: list[Record] = manifest["records"]
    wanted = model_chunks(model)
    stored = {record["name"] for record in records if record["name"].startswith("model.")}
    names = {chunk.name for chunk in wanted}
    if strict and names != stored:
        missing, unknown = sorted(names - stored)[:5], sorted(stored - names)[:5]
        raise CheckpointError(
            f"The checkpoint {folder} is of another model: it lacks {missing}, and has {unknown} that the model lacks"
        )
    wanted = [chunk for chunk in wanted if chunk.name in stored]
    if group.optimizer is not None:
        if manifest["optimizer"] is None:
            raise CheckpointError(f"The checkpoint {folder} was saved without an optimizer; load it without one")
        source = CheckpointState(manifest["optimizer"]["state"])
        group.load_groups(manifest["optimizer"]["groups"])
        group.load_state(source)
        wanted += source.wanted
    with torch.no_grad():
        read_chunks(folder, records, wanted)
