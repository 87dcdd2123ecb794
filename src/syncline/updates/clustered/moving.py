"""Optimizer state as vectors: what ranks that come together in a new cluster must have in common, beside parameters.

Members of a cluster step from the same mean, so they stay equal only if their optimizers are. When clusters are made
anew, the members of each send their state with the gradients of the first batch; its mean, weighted by samples as the
gradients are, comes back with theirs, and all of them take it. That is one record, so no death can divide them.

Each vector holds one state of the shape of the parameters (Adam: `exp_avg`, `exp_avg_sq`); the place where a vector of
gradients tells which of them exist holds one value for each parameter: first whether it has any state, then the states
that are a single number (Adam: `step`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from syncline.updates.bucket import Bucket, Slot
from syncline.updates.flat import Vector, VectorShape
from syncline.updates.state import is_elementwise

WHOLE, SINGLE, FIXED = "whole", "single", "fixed"
"""A state for each element of a parameter, one number for each parameter, and one that cannot be averaged."""


class MovingState:
    """The state of one rank's optimizer, by name: ``"whole exp_avg"``, ``"single step"``."""

    def __init__(self, buckets: Sequence[Bucket], optimizer: torch.optim.Optimizer, shape: VectorShape) -> None:
        self._buckets = tuple(buckets)
        self._optimizer = optimizer
        self._shape = shape

    def names(self) -> tuple[str, ...]:
        """Return what there is now; a name that begins with ``fixed`` says that ranks cannot move."""
        found = (
            f"{self._kind(bucket, slot, key, value)} {key}"
            for bucket, _, slot, tensor in self._slots()
            for key, value in self._optimizer.state.get(tensor, {}).items()
            if value is not None
        )
        return tuple(sorted(set(found)))

    def pack(self, names: Sequence[str]) -> list[Vector]:
        """Return the state as vectors."""
        wholes, singles = keys_of(names)
        vectors = [self._shape.zeros() for _ in range(num_vectors(names))]
        for _, part, slot, tensor in self._slots():
            state = self._optimizer.state.get(tensor)
            if not state:
                continue
            vectors[0].presence[slot.position] = 1.0
            for vector, key in zip(vectors, wholes, strict=False):
                if state.get(key) is not None:
                    slot.view(vector.parts[part]).copy_(state[key])
            for vector, key in zip(vectors[1:], singles, strict=False):
                vector.presence[slot.position] = float(state[key]) if state.get(key) is not None else 0.0
        return vectors

    def unpack(self, names: Sequence[str], vectors: Sequence[Vector]) -> None:
        """Take the mean of several ranks' state; a parameter for which none of them had any has none."""
        wholes, singles = keys_of(names)
        for _, part, slot, tensor in self._slots():
            share = float(vectors[0].presence[slot.position])
            if share == 0.0:
                self._optimizer.state.pop(tensor, None)
                continue
            state = self._optimizer.state[tensor]
            for vector, key in zip(vectors, wholes, strict=False):
                if state.get(key) is None:
                    state[key] = torch.empty_like(tensor, requires_grad=False)
                state[key].copy_(slot.view(vector.parts[part]) / share)
            for vector, key in zip(vectors[1:], singles, strict=False):
                state[key] = _like(state.get(key), float(vector.presence[slot.position]) / share)

    def _slots(self) -> Iterator[tuple[Bucket, int, Slot, torch.nn.Parameter]]:
        for part, bucket in enumerate(self._buckets):
            for slot, tensor in zip(bucket.plan.slots, bucket.tensors, strict=True):
                yield bucket, part, slot, tensor

    @staticmethod
    def _kind(bucket: Bucket, slot: Slot, key: str, value: Any) -> str:
        if is_elementwise(key, value, slot.shape):
            return WHOLE if value.dtype == bucket.plan.dtype else FIXED
        is_number = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        return SINGLE if is_number and not isinstance(value, bool) else FIXED


def can_move(names: Sequence[str]) -> bool:
    """Whether all of the state can be averaged."""
    return not any(name.startswith(f"{FIXED} ") for name in names)


def keys_of(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the keys of the states for each element, and of those that are one number."""
    split = [name.split(" ", 1) for name in names]
    return [key for kind, key in split if kind == WHOLE], [key for kind, key in split if kind == SINGLE]


def num_vectors(names: Sequence[str]) -> int:
    """Return how many vectors hold the state."""
    wholes, singles = keys_of(names)
    return max(len(wholes), 1 + len(singles)) if names else 0


def _like(old: Any, value: float) -> Any:
    """Return ``value`` as the kind of number that the optimizer keeps; a mean of whole numbers becomes whole."""
    if isinstance(old, torch.Tensor):
        return old.fill_(value) if old.is_floating_point() else old.fill_(round(value))
    if isinstance(old, int):
        return round(value)
    return value if isinstance(old, float) else torch.tensor(value, dtype=torch.float32)
