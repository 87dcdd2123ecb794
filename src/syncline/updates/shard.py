"""A rank's shard of one bucket: the elements that it owns, and the only optimizer state that exists for them.

The shard begins as one piece, so that an optimizer step is one sweep over contiguous memory. If parameters of the
bucket go unused on all ranks in some step, the piece is divided there for good: an unused parameter must not be decayed,
nor its momentum or step count advanced. With ``whole_parameters`` each parameter is a piece of its own from the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from syncline.updates.bucket import Bucket
from syncline.updates.inner import make_inner
from syncline.updates.lane import Ranges
from syncline.updates.piece import Piece, Segment, segments_of
from syncline.updates.state import StateByName, StateEntry, is_elementwise, num_state_bytes


class Shard:
    """The owned elements of one bucket and the inner optimizer that steps on them."""

    def __init__(
        self, bucket: Bucket, owned: Ranges, optimizer: torch.optim.Optimizer, *, whole_parameters: bool
    ) -> None:
        self._bucket = bucket
        self._whole = whole_parameters
        self.segments = segments_of(bucket.plan.slots, owned)
        groups = [[segment] for segment in self.segments] if whole_parameters else [list(self.segments)]
        self._pieces = [Piece(bucket, group, shaped=whole_parameters) for group in groups if group]
        tensors = [piece.tensor for piece in self._pieces]
        self._inner = make_inner(optimizer, bucket.plan.group, tensors) if tensors else None

    @property
    def num_elements(self) -> int:
        """Number of owned elements."""
        return sum(segment.num_elements for segment in self.segments)

    @property
    def num_state_bytes(self) -> int:
        """Memory of the optimizer state."""
        return 0 if self._inner is None else num_state_bytes(self._inner)

    def step(self, options: Mapping[str, Any], present: Sequence[bool], scales: Sequence[float]) -> None:
        """Step on the owned elements of the parameters that are ``present`` (both sequences by position)."""
        if self._inner is None:
            return
        self._divide(present)
        active = [piece for piece in self._pieces if present[piece.segments[0].slot.position]]
        with torch.no_grad():
            for piece in active:
                piece.load(scales)
            self._inner.param_groups[0].update(options)
            self._inner.step()
            for piece in active:
                piece.store()

    def gradients(self) -> Iterator[tuple[Segment, torch.Tensor]]:
        """Yield the combined gradient of each owned segment."""
        for segment in self.segments:
            yield segment, self._bucket.gradients[segment.start : segment.stop]

    def state_entries(self) -> Iterator[StateEntry]:
        """Yield the owned state, parameter by parameter; single values by the owner of the first element alone."""
        for piece in self._pieces:
            assert self._inner is not None, "pieces have an optimizer"
            for key, value in self._inner.state.get(piece.tensor, {}).items():
                yield from _entries(piece, key, value)

    def load_state(self, state: StateByName) -> None:
        """Replace the state by the owned part of ``state``; parameters that it lacks start anew."""
        if self._inner is None:
            return
        kinds: dict[tuple[Any, ...], list[Segment]] = {}
        for segment in self.segments:
            kinds.setdefault(_kind(segment, state.get(segment.slot.name, {})), []).append(segment)
        groups = [[segment] for segment in self.segments] if self._whole else list(kinds.values())
        self._inner.state.clear()
        self._replace_pieces([Piece(self._bucket, group, shaped=self._whole) for group in groups])
        for piece in self._pieces:
            loaded = _loaded(piece, state)
            if loaded:
                self._inner.state[piece.tensor] = loaded

    def _divide(self, present: Sequence[bool]) -> None:
        pieces: list[Piece] = []
        for piece in self._pieces:
            used = [segment for segment in piece.segments if present[segment.slot.position]]
            unused = [segment for segment in piece.segments if not present[segment.slot.position]]
            pieces += [self._carve(piece, used), self._carve(piece, unused)] if used and unused else [piece]
        if len(pieces) != len(self._pieces):
            self._replace_pieces(pieces)

    def _carve(self, origin: Piece, segments: list[Segment]) -> Piece:
        assert self._inner is not None, "only a shard with elements is divided"
        piece = Piece(self._bucket, segments, shaped=False)
        state = self._inner.state.get(origin.tensor)
        if state:
            self._inner.state[piece.tensor] = piece.take_state(state, origin)
        return piece

    def _replace_pieces(self, pieces: list[Piece]) -> None:
        assert self._inner is not None, "only a shard with elements has pieces"
        kept = {id(piece.tensor) for piece in pieces}
        for piece in self._pieces:
            if id(piece.tensor) not in kept:
                self._inner.state.pop(piece.tensor, None)
        self._pieces = pieces
        self._inner.param_groups[0]["params"] = [piece.tensor for piece in pieces]


def _entries(piece: Piece, key: str, value: Any) -> Iterator[StateEntry]:
    if is_elementwise(key, value, piece.tensor.shape):
        for segment, part in piece.elements(value):
            first = segment.start - segment.slot.start
            last = segment.stop - segment.slot.start
            yield StateEntry(parameter=segment.slot.name, key=key, value=part, start=first, stop=last)
        return
    for segment in piece.segments:
        if segment.start == segment.slot.start:
            yield StateEntry(parameter=segment.slot.name, key=key, value=value)


def _kind(segment: Segment, state: Mapping[str, Any]) -> tuple[Any, ...]:
    """Segments may share a piece if their state has the same keys and the same single values."""
    return tuple(
        (key, None if is_elementwise(key, value, segment.slot.shape) else repr(value))
        for key, value in sorted(state.items())
    )


def _loaded(piece: Piece, state: StateByName) -> dict[str, Any]:
    first = state.get(piece.segments[0].slot.name, {})
    loaded: dict[str, Any] = {}
    for key, value in first.items():
        if is_elementwise(key, value, piece.segments[0].slot.shape):
            loaded[key] = _joined(piece, key, state)
        else:
            loaded[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return loaded


def _joined(piece: Piece, key: str, state: StateByName) -> torch.Tensor:
    sample = state[piece.segments[0].slot.name][key]
    target = torch.empty_like(piece.tensor, dtype=sample.dtype, requires_grad=False).detach()
    for segment, part in piece.elements(target):
        slot = segment.slot
        source = slot.flatten(state[slot.name][key])
        part.copy_(source[segment.start - slot.start : segment.stop - slot.start])
    return target
