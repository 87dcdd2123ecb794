"""Optimizer state as a checkpoint has it: a catalogue that JSON can say, and chunks of elements on disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from syncline.errors import CheckpointError
from syncline.pytorch.checkpoint_chunks import Chunk
from syncline.pytorch.optimizer_state import decode_single, dtype_of
from syncline.updates.bucket import Slot
from syncline.updates.state import StateEntry

Catalogue = dict[str, dict[str, Any]]
"""By parameter's name: its memory order, and for each key a number type (divided into elements) or the value."""


def state_chunks(entries: Iterable[StateEntry], slots: Mapping[str, Slot]) -> list[Chunk]:
    """Return the divided part of this rank's state as chunks."""
    return [
        Chunk(
            name=_name(entry.parameter, entry.key),
            size=(slots[entry.parameter].num_elements,),
            offset=(entry.start,),
            tensor=entry.value,
        )
        for entry in entries
        if entry.start is not None
    ]


def join_catalogues(parts: Iterable[Mapping[str, Mapping[str, Any]]], slots: Mapping[str, Slot]) -> Catalogue:
    """Join what the ranks have, and say in which order elements lie."""
    joined: Catalogue = {}
    for part in parts:
        for name, keys in part.items():
            entry = joined.setdefault(name, {"order": _order(slots[name]), "state": {}})
            entry["state"].update(keys)
    return joined


class CheckpointState:
    """Optimizer state of a checkpoint as a source; :attr:`wanted` is what is still to be read from disk."""

    def __init__(self, catalogue: Mapping[str, Mapping[str, Any]]) -> None:
        self._catalogue = catalogue
        self.wanted: list[Chunk] = []

    def values(self, parameter: str) -> Mapping[str, Any]:
        """Return a parameter's state: a number type for what has one value for each element, else the value."""
        state = self._catalogue[parameter]["state"] if parameter in self._catalogue else {}
        return {
            key: dtype_of(value) if isinstance(value, str) else decode_single(value[0]) for key, value in state.items()
        }

    def fill(self, slot: Slot, key: str, start: int, target: torch.Tensor) -> None:
        """Note that elements are wanted."""
        if self._catalogue[slot.name]["order"] != _order(slot):
            raise CheckpointError(
                f"The elements of {slot.name!r} lie in another order than when the checkpoint was saved; give "
                "the model the same memory_format before distribute()"
            )
        name, size = _name(slot.name, key), (slot.num_elements,)
        if target.numel():
            self.wanted.append(Chunk(name=name, size=size, offset=(start,), tensor=target))


def _name(parameter: str, key: str) -> str:
    return f"optimizer.{parameter}.{key}"


def _order(slot: Slot) -> list[int]:
    """Return the dimensions that count, from the slowest to the fastest in memory."""
    counting = [dimension for dimension, size in enumerate(slot.shape) if size > 1]
    return sorted(counting, key=lambda dimension: -slot.stride[dimension])
