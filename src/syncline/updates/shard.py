"""A rank's shard of one bucket: the elements that it owns, and the only optimizer state that exists for them.

The shard begins as one piece, so that an optimizer step is one sweep over contiguous memory. If parameters of the
bucket go unused on all ranks in some step, the piece is divided there for good: an unused parameter must not be
decayed, nor its momentum or step count advanced. With ``whole_parameters`` each parameter is a piece of its own
from the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from syncline.updates.bucket import Bucket
from syncline.updates.inner import make_inner
from syncline.updates.lane import Ranges
from syncline.updates.piece import Piece, Segment, merged, segments_of
from syncline.updates.state import StateEntry, StateSource, copied, is_elementwise, num_state_bytes


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
    def state(self) -> Mapping[torch.Tensor, Any]:
        """The optimizer state, by piece."""
        return {} if self._inner is None else self._inner.state

    @property
    def num_state_bytes(self) -> int:
        """Memory of the optimizer state."""
        return 0 if self._inner is None else num_state_bytes(self._inner)

    def scale(self, factors: Sequence[float]) -> None:
        """Multiply the owned gradients by their parameter's factor (by position), in place."""
        for factor, run in groupby(self.segments, key=lambda segment: factors[segment.slot.position]):
            if factor != 1.0:
                for start, stop in merged(tuple(run)):
                    self._bucket.gradients[start:stop].mul_(factor)

    def step(self, options: Mapping[str, Any], present: Sequence[bool]) -> None:
        """Step on the owned elements of the parameters that are ``present`` (by position)."""
        if self._inner is None:
            return
        self._divide(present)
        active = [piece for piece in self._pieces if present[piece.segments[0].slot.position]]
        with torch.no_grad():
            for piece in active:
                piece.load()
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

    def load_state(self, source: StateSource) -> None:
        """Replace the state by the owned part of what ``source`` has; parameters that it lacks start anew."""
        if self._inner is None:
            return
        kinds: dict[tuple[tuple[str, str], ...], list[Segment]] = {}
        for segment in self.segments:
            # single values such as the number of steps are a whole piece's, so they must be equal within it
            kind = tuple((key, repr(value)) for key, value in sorted(source.values(segment.slot.name).items()))
            kinds.setdefault(kind, []).append(segment)
        groups = [[segment] for segment in self.segments] if self._whole else list(kinds.values())
        self._inner.state.clear()
        self._replace_pieces([Piece(self._bucket, group, shaped=self._whole) for group in groups])
        for piece in self._pieces:
            loaded = {
                key: piece.load_elements(source, key, value) if isinstance(value, torch.dtype) else copied(value)
                for key, value in source.values(piece.segments[0].slot.name).items()
            }
            if loaded:
                self._inner.state[piece.tensor] = loaded

    def pieces(self) -> Iterator[tuple[tuple[Segment, ...], Mapping[str, Any]]]:
        """Yield the segments of each piece, and its state as the optimizer has it."""
        for piece in self._pieces:
            assert self._inner is not None, "pieces have an optimizer"
            yield piece.segments, self._inner.state.get(piece.tensor, {})

    def load_pieces(self, pieces: Sequence[tuple[Sequence[Segment], dict[str, Any]]]) -> None:
        """Go on with what :meth:`pieces` of another shard of the same ranges has told; the state is taken over."""
        if self._inner is None:
            return
        self._inner.state.clear()
        self._replace_pieces([Piece(self._bucket, segments, shaped=self._whole) for segments, _ in pieces])
        for piece, (_, state) in zip(self._pieces, pieces, strict=True):
            if state:
                self._inner.state[piece.tensor] = state

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
