"""Flat views of a shard: what an inner optimizer steps on, made of segments of one bucket that this rank owns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from syncline.updates.bucket import Bucket, Slot
from syncline.updates.bucket_schedule import Ranges
from syncline.updates.redistribution import StatePart
from syncline.updates.state import StateSource, copied, is_elementwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The part of one parameter that lies in one owned range: elements ``start`` to ``stop`` of the bucket."""

    slot: Slot
    start: int
    stop: int
    is_spare: bool = False
    """Whether another rank owns it, and this one keeps it, too."""

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def part(self) -> StatePart:
        """The same elements, counted from the beginning of the parameter."""
        return StatePart(self.slot.name, self.start - self.slot.start, self.stop - self.slot.start)


def segments_of(slots: Sequence[Slot], owned: Ranges, *, is_spare: bool = False) -> tuple[Segment, ...]:
    """Cut the owned ranges at the borders between parameters."""
    return tuple(
        Segment(slot=slot, start=max(start, slot.start), stop=min(stop, slot.stop), is_spare=is_spare)
        for start, stop in owned
        for slot in slots
        if max(start, slot.start) < min(stop, slot.stop)
    )


def merged(segments: Sequence[Segment]) -> Ranges:
    """Join segments that touch."""
    ranges: list[tuple[int, int]] = []
    for segment in segments:
        if ranges and ranges[-1][1] == segment.start:
            ranges[-1] = (ranges[-1][0], segment.stop)
        else:
            ranges.append((segment.start, segment.stop))
    return tuple(ranges)


class ShardView:
    """Segments of a bucket that one optimizer steps on as if they were one parameter.

    One that is one range of the bucket shares its memory; of several ranges, it is a copy that is filled before the
    step and written back after it. With ``shaped``, the view is one whole parameter in its own shape.
    """

    def __init__(self, bucket: Bucket, segments: Sequence[Segment], *, shaped: bool) -> None:
        self.segments = tuple(segments)
        self._bucket = bucket
        self._shaped = shaped
        self._ranges = merged(segments)
        self.is_view = len(self._ranges) == 1
        flat = bucket.stepped
        memory = self._pick(flat) if self.is_view else torch.empty_like(flat[: self.num_elements])
        self.tensor = torch.nn.Parameter(memory)

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return sum(segment.num_elements for segment in self.segments)

    def load(self) -> None:
        """Fill the view and its gradient from the bucket."""
        if not self.is_view:
            self._fill(self.tensor.data, self._bucket.stepped)
        self.tensor.grad = self._gather_gradient()

    def store(self) -> None:
        """Write the stepped view back into the bucket, and drop its gradient."""
        self.tensor.grad = None
        if self.is_view:
            return
        flat, start = self._bucket.stepped, 0
        for first, last in self._ranges:
            flat[first:last].copy_(self.tensor.data[start : start + last - first])
            start += last - first

    def elements(self, value: torch.Tensor) -> Iterator[tuple[Segment, torch.Tensor]]:
        """Divide a tensor that is shaped like the view into the elements of each segment (views, in memory order)."""
        yield from zip(self.segments, self._split(value), strict=True)

    def take_state(self, state: dict[str, Any], origin: ShardView) -> dict[str, Any]:
        """Return the part of another view's ``state`` that belongs to this view's segments."""
        mine = {segment.start for segment in self.segments}
        taken: dict[str, Any] = {}
        for key, value in state.items():
            if is_elementwise(key, value, origin.tensor.shape):
                taken[key] = torch.cat([part for place, part in origin.elements(value) if place.start in mine])
            else:
                taken[key] = copied(value)
        return taken

    def load_elements(self, source: StateSource, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor like the view that ``source`` fills."""
        target = torch.empty_like(self.tensor, dtype=dtype, requires_grad=False)
        for segment, part in self.elements(target):
            source.fill(segment.slot, key, segment.start - segment.slot.start, part)
        return target

    def _gather_gradient(self) -> torch.Tensor:
        if self.is_view:
            return self._pick(self._bucket.gradients)
        gathered = torch.empty_like(self.tensor)
        self._fill(gathered, self._bucket.gradients)
        return gathered

    def _fill(self, view: torch.Tensor, flat: torch.Tensor) -> None:
        torch.cat([flat[start:stop] for start, stop in self._ranges], out=view)

    def _pick(self, flat: torch.Tensor) -> torch.Tensor:
        if self._shaped:
            return self.segments[0].slot.view(flat)
        start, stop = self._ranges[0]
        return flat[start:stop]

    def _split(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat = self.segments[0].slot.flatten(value) if self._shaped else value
        return torch.split(flat, [segment.num_elements for segment in self.segments])
