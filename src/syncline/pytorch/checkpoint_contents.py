"""What a checkpoint holds, whoever wrote it: this library, or a program with ``torch.distributed.checkpoint``.

Where our manifest lies beside, that is asked. Else it is DCP's own index, a pickle, of which only the classes that DCP
writes are loaded; it has names alone, so the model is looked for by its parameters' names, behind whatever the program
put before them (``model.``, ``app.model.``, ``model.module.``), and the optimizer's state likewise.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from syncline.errors import CheckpointError
from syncline.pytorch import checkpoint_folder as place
from syncline.pytorch.checkpoint_chunks import SAVE_ID, ChunkTable
from syncline.pytorch.checkpoint_manifest import STATE_PREFIX
from syncline.pytorch.checkpoint_state import MODEL_PREFIX, Catalogue
from syncline.updates.bucket import Slot
from syncline.updates.private_torch import CHECKPOINT_INDEX_NAMES
from syncline.updates.state import SINGLE_VALUES, StateEntry
from syncline.updates.state_values import encode_single


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContents:
    """What is to be loaded, by names; elements are still on the disk."""

    table: ChunkTable
    model_prefix: str = MODEL_PREFIX
    state_prefix: str = STATE_PREFIX
    catalogue: Catalogue | None
    """None if it was saved without an optimizer."""
    groups: list[dict[str, Any]]
    iteration: int = 0
    extra: Any = None
    parts: Mapping[str, str]
    """States of schedulers, samplers and the like, by name."""

    @property
    def model_names(self) -> set[str]:
        """Names of the model's tensors."""
        prefix = self.model_prefix
        return {name.removeprefix(prefix) for name in self.table.tensors if name.startswith(prefix)}


def read_contents(
    folder: Path, model_names: Collection[str], slots: Mapping[str, Slot], groups: Sequence[Collection[str]]
) -> CheckpointContents:
    """Read what there is for a model of these names, whose optimizer has these parameters and groups of their names."""
    if not (folder / place.MANIFEST).is_file():
        return _of_others(folder, model_names, slots, groups)
    manifest = place.read_manifest(folder)
    optimizer = manifest.optimizer
    return CheckpointContents(
        table=ChunkTable.of_records(folder, manifest.records),
        catalogue=None if optimizer is None else {name: one.model_dump() for name, one in optimizer.state.items()},
        groups=[] if optimizer is None else optimizer.groups,
        iteration=manifest.iteration,
        extra=manifest.extra,
        parts=manifest.parts,
    )


class _IndexUnpickler(pickle.Unpickler):
    """Loads the classes of DCP's index, and no other: a pickle can name any function."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that DCP writes."""
        if (module, name) == ("builtins", "getattr"):
            return _member  # so Python 3.11.2, among others, writes a member of an enum
        root = module.partition(".")[0]
        is_known = name in CHECKPOINT_INDEX_NAMES and root in {"torch", "pathlib", "collections"}
        if not is_known and not (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of DCP has")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Any:
    """Return the member of an enum; nothing else of anything is got for a pickle."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"it asks for {name!r} of {kind!r}, which no index of DCP does")
    return kind[name]


def _read_index(folder: Path) -> ChunkTable:
    try:
        with (folder / place.DCP_INDEX).open("rb") as file:
            index = _IndexUnpickler(file).load()
        is_ours = getattr(index.storage_meta, "save_id", None) == SAVE_ID
        tensors = {name: one for name, one in index.state_dict_metadata.items() if hasattr(one, "chunks")}
        places = dict(index.storage_data)
        table = None if is_ours else ChunkTable(folder=folder, tensors=tensors, places=places)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(
            f"The index {folder / place.DCP_INDEX} of torch.distributed.checkpoint cannot be read: {error}"
        ) from error
    if table is None:
        raise CheckpointError(f"The checkpoint {folder} is damaged: {place.MANIFEST} is missing; use the previous one")
    return table


def _of_others(
    folder: Path, model_names: Collection[str], slots: Mapping[str, Slot], groups: Sequence[Collection[str]]
) -> CheckpointContents:
    table = _read_index(folder)
    model_prefix = _prefix_of_model(table, model_names)
    names = [*table.tensors, *table.values]
    found = {
        name[: name.index(mark)]
        for name in names
        for mark in ("state.", "param_groups.")
        if mark in name and not name.startswith(model_prefix + mark)
    }
    prefixes = {prefix for prefix in found if any(name.startswith(f"{prefix}param_groups.") for name in names)}
    if len(prefixes) > 1:
        raise CheckpointError(
            f"The checkpoint {folder} has several optimizers ({', '.join(sorted(prefixes))}); load the model alone"
        )
    if not prefixes:
        return CheckpointContents(table=table, model_prefix=model_prefix, catalogue=None, groups=[], parts={})
    (prefix,) = prefixes
    return CheckpointContents(
        table=table,
        model_prefix=model_prefix,
        state_prefix=f"{prefix}state.",
        catalogue=_catalogue(table, f"{prefix}state.", slots),
        groups=_groups(table, f"{prefix}param_groups.", groups),
        parts={},
    )


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
    found = _read_all(table, [name for name, _, _ in singles])
    for name, parameter, key in singles:
        entry = StateEntry(parameter=parameter, key=key, value=found[name])
        catalogue.setdefault(parameter, {"state": {}})["state"][key] = [encode_single(entry)]
    return catalogue


def _groups(table: ChunkTable, prefix: str, names: Sequence[Collection[str]]) -> list[dict[str, Any]]:
    """Return hyper-parameters by group: stored by its number, or (``flatten_optimizer_state_dict``) by parameter."""
    found = _read_all(table, [name for name in (*table.tensors, *table.values) if name.startswith(prefix)])
    by_owner: dict[str, dict[str, Any]] = {}
    for name, value in found.items():
        owner, _, key = name.removeprefix(prefix).rpartition(".")
        if key not in {"params", "param_names"}:
            by_owner.setdefault(owner, {})[key] = value
    if all(owner.isdecimal() for owner in by_owner):
        return [by_owner[owner] for owner in sorted(by_owner, key=int)]
    return [next((by_owner[name] for name in group if name in by_owner), {}) for group in names]


def _read_all(table: ChunkTable, names: list[str]) -> dict[str, Any]:
    values = table.read_values([name for name in names if name not in table.tensors])
    return values | {name: table.read_tensor(name) for name in names if name in table.tensors}
