"""The end of a period on one rank: what is averaged, and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncline.updates.bucket import Bucket
from syncline.updates.rounds.outer import VELOCITY, Nesterov, OuterStep
from syncline.updates.state import is_elementwise

Parts = Sequence[Sequence[torch.Tensor]]


class EndOfPeriod:
    """Averages parameters, and optimizer state if it should; then the outer optimizer, if there is one, steps."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        optimizer: torch.optim.Optimizer,
        *,
        outer: Nesterov | None,
        should_average_state: bool,
    ) -> None:
        self._buckets = buckets
        self._optimizer = optimizer
        self._outer = [] if outer is None else [OuterStep(bucket, optimizer, outer) for bucket in buckets]
        self._starts: list[torch.Tensor] = []
        self._should_average_state = should_average_state
        self._states: list[dict[str, torch.Tensor]] = []

    def begin(self) -> None:
        """Take note of what the parameters are at the start."""
        if self._outer:
            self._starts = [bucket.parameters.clone() for bucket in self._buckets]

    @torch.no_grad()
    def gather(self) -> Parts:
        """Return what is to be averaged: for each bucket its parameters, then its states; to be overwritten."""
        self._states = [self._gather_state(bucket) for bucket in self._buckets]
        return [[bucket.parameters, *state.values()] for bucket, state in zip(self._buckets, self._states, strict=True)]

    @torch.no_grad()
    def finish(self, has_come: Sequence[Sequence[bool]]) -> None:
        """Go on from the averages, which are where :meth:`gather` said; ``has_come`` tells which."""
        for bucket, state, (_, *is_new) in zip(self._buckets, self._states, has_come, strict=True):
            self._spread_states(bucket, state, is_new)
        for outer, bucket, start in zip(self._outer, self._buckets, self._starts, strict=False):
            outer.apply(start, bucket.parameters)

    def _gather_state(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """Return each kind of state that has one value for each element, flat; zeros where a parameter has none."""
        if not self._should_average_state:
            return {}
        kinds = {
            key
            for slot, tensor in zip(bucket.plan.slots, bucket.tensors, strict=True)
            for key, value in self._optimizer.state.get(tensor, {}).items()
            if key != VELOCITY and is_elementwise(key, value, slot.shape)
        }
        return {key: self._flatten(bucket, key) for key in sorted(kinds)}

    def _flatten(self, bucket: Bucket, key: str) -> torch.Tensor:
        flat = torch.zeros(bucket.plan.num_elements, dtype=bucket.plan.dtype)
        for slot, tensor in zip(bucket.plan.slots, bucket.tensors, strict=True):
            value = self._optimizer.state.get(tensor, {}).get(key)
            if value is not None:
                slot.view(flat).copy_(value)
        return flat

    def _spread_states(self, bucket: Bucket, state: dict[str, torch.Tensor], has_come: Sequence[bool]) -> None:
        for (key, flat), is_new in zip(state.items(), has_come, strict=True):
            if is_new:
                self._spread_state(bucket, key, flat)

    def _spread_state(self, bucket: Bucket, key: str, flat: torch.Tensor) -> None:
        for slot, tensor in zip(bucket.plan.slots, bucket.tensors, strict=True):
            value = self._optimizer.state.get(tensor, {}).get(key)
            if value is not None:
                value.copy_(slot.view(flat))
