"""A rank's shard of one bucket: the elements that it owns, and the only optimizer state that exists for them.

The shard begins as one view, so that an optimizer step is one sweep over contiguous memory. If parameters of the
bucket go unused on all ranks in some step, the view is divided there for good: an unused parameter must not be
decayed, nor its momentum or step count advanced. With ``whole_parameters`` each parameter is a view of its own
from the start.

With replicas there is a view for each group of ranges that have one owner in each of them, and with spares one for
each pair of an owner and a spare, so that all owners of an element step tensors of the same size: where a tensor ends,
an optimizer's kernels may round otherwise than within it. What a spare keeps is stepped like what is owned, but counts
in no norm and in no checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import torch

from syncline.schedule.layout import joined_ranges
from syncline.updates.bucket import Bucket, Slot
from syncline.updates.bucket_schedule import Ranges
from syncline.updates.inner import make_inner, step_without_hooks
from syncline.updates.peer_state import HeldState, StatePart
from syncline.updates.state import StateEntry, StateSource, copied, is_elementwise, num_state_bytes


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


def _ranges_of(segments: Iterable[Segment]) -> list[tuple[int, int]]:
    return joined_ranges((segment.start, segment.stop) for segment in segments)


class ShardView:
    """Segments of a bucket that one optimizer steps on as if they were one parameter.

    One that is one range of the bucket shares its memory; of several ranges, it is a copy that is filled before the
    step and written back after it. With ``shaped``, the view is one whole parameter in its own shape.
    """

    def __init__(self, bucket: Bucket, segments: Sequence[Segment], *, shaped: bool) -> None:
        self.segments = tuple(segments)
        self._bucket = bucket
        self._shaped = shaped
        self._ranges = _ranges_of(segments)
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
        sizes = [last - first for first, last in self._ranges]
        for (first, last), values in zip(self._ranges, torch.split(self.tensor.data, sizes), strict=True):
            self._bucket.stepped[first:last].copy_(values)

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

    def load_elements(self, source: StateSource, key: str, dtype: torch.dtype, before: Any) -> torch.Tensor:
        """Return a tensor like the view that ``source`` fills; the one ``before``, as new memory takes time to find."""
        like = self.tensor.shape, self.tensor.stride(), dtype
        is_like = isinstance(before, torch.Tensor) and (before.shape, before.stride(), before.dtype) == like
        target = before if is_like else torch.empty_like(self.tensor, dtype=dtype, requires_grad=False)
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


class Shard:
    """The owned elements of one bucket and the inner optimizer that steps on them."""

    def __init__(
        self,
        bucket: Bucket,
        owned: Sequence[Ranges],
        optimizer: torch.optim.Optimizer,
        *,
        whole_parameters: bool,
        spared: Sequence[Ranges] = (),
    ) -> None:
        self._bucket = bucket
        self._whole = whole_parameters
        slots = bucket.plan.slots
        self._groups = [
            *(segments_of(slots, ranges) for ranges in owned),
            *(segments_of(slots, ranges, is_spare=True) for ranges in spared),
        ]
        self.segments = tuple(chain.from_iterable(self._groups))
        groups = [(segment,) for segment in self.segments] if whole_parameters else self._groups
        self._views = [ShardView(bucket, group, shaped=whole_parameters) for group in groups]
        tensors = [view.tensor for view in self._views]
        self._inner = make_inner(optimizer, bucket.plan.group, tensors) if tensors else None
        self._before_step: tuple[list[dict[str, Any]], dict[str, Any]] | None = None

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:
        """The optimizer state, by view."""
        return {} if self._inner is None else self._inner.state

    @property
    def num_state_bytes(self) -> int:
        """Memory of the optimizer state."""
        return 0 if self._inner is None else num_state_bytes(self._inner.state)

    def scale(self, factors: Sequence[float]) -> None:
        """Multiply the owned gradients by their parameter's factor (by position), in place."""
        for factor, run in groupby(self.segments, key=lambda segment: factors[segment.slot.position]):
            if factor != 1.0:
                for start, stop in _ranges_of(run):
                    self._bucket.gradients[start:stop].mul_(factor)

    def step(self, options: Mapping[str, Any], present: Sequence[bool], *, may_undo: bool = False) -> None:
        """Step on the owned elements of the parameters that are ``present`` (by position).

        With ``may_undo`` a copy of the state is kept until :meth:`undo` or :meth:`commit`.
        """
        if self._inner is None:
            return
        self._divide(present)
        active = [view for view in self._views if present[view.segments[0].slot.position]]
        if may_undo:
            group = {name: value for name, value in self._inner.param_groups[0].items() if name != "params"}
            self._before_step = deepcopy(([self._inner.state.get(view.tensor, {}) for view in self._views], group))
        with torch.no_grad():
            if self._bucket.stepped is not self._bucket.parameters:
                for start, stop in _ranges_of(self.segments):
                    self._bucket.stepped[start:stop].copy_(self._bucket.parameters[start:stop])
            for view in active:
                view.load()
            self._inner.param_groups[0].update(options)
            step_without_hooks(self._inner)
            for view in active:
                view.store()

    def commit(self) -> None:
        """Forget what the state was before the last step."""
        self._before_step = None

    def undo(self) -> None:
        """Make the state what it was before the last step, which was made with ``may_undo``."""
        if self._inner is None or self._before_step is None:
            return
        states, group = self._before_step
        for view, state in zip(self._views, states, strict=True):
            self._inner.state.pop(view.tensor, None)
            if state:
                self._inner.state[view.tensor] = state
        self._inner.param_groups[0].update(group)
        self._before_step = None

    def gradients(self) -> Iterator[tuple[Segment, torch.Tensor]]:
        """Yield the combined gradient of each owned segment."""
        for segment in self.segments:
            yield segment, self._bucket.gradients[segment.start : segment.stop]

    def state_entries(self) -> Iterator[StateEntry]:
        """Yield the state, parameter by parameter; single values by who has the first element alone."""
        for segment, held in self.pieces():
            for entry in held.entries(is_spare=segment.is_spare):
                if entry.start is not None or held.part.start == 0:
                    yield entry

    def pieces(self) -> Iterator[tuple[Segment, HeldState]]:
        """Yield all that this rank keeps, a range of a parameter at a time; single values with each of them."""
        for view in self._views:
            assert self._inner is not None, "views have an optimizer"
            state = self._inner.state.get(view.tensor, {})
            divided = {
                key: [values for _, values in view.elements(value)]
                for key, value in state.items()
                if is_elementwise(key, value, view.tensor.shape)
            }
            single = {key: value for key, value in state.items() if key not in divided}
            for place, segment in enumerate(view.segments):
                values = {key: parts[place] for key, parts in divided.items()}
                yield segment, HeldState(part=segment.part, divided=values, single=single)

    def load_state(self, source: StateSource) -> None:
        """Replace the state by the owned part of what ``source`` has; parameters that it lacks start anew."""
        if self._inner is None:
            return
        values = {segment.slot.name: source.values(segment.slot.name) for segment in self.segments}
        kinds: dict[tuple[int, tuple[tuple[str, str], ...]], list[Segment]] = {}
        for number, group in enumerate(self._groups):
            for segment in group:
                # single values such as the number of steps are a whole view's, so they must be equal within it
                kind = tuple((key, _kind_of(value)) for key, value in sorted(values[segment.slot.name].items()))
                kinds.setdefault((number, kind), []).append(segment)
        groups = [[segment] for segment in self.segments] if self._whole else list(kinds.values())
        held = {view.segments: self._inner.state.get(view.tensor, {}) for view in self._views}
        self._inner.state.clear()
        self._replace_views([ShardView(self._bucket, group, shaped=self._whole) for group in groups])
        for view in self._views:
            told, before = values[view.segments[0].slot.name], held.get(view.segments, {})
            loaded = {
                key: view.load_elements(source, key, one, before.get(key))
                if isinstance(one, torch.dtype)
                else copied(one)
                for key, one in told.items()
            }
            if loaded:
                self._inner.state[view.tensor] = loaded

    def views(self) -> Iterator[tuple[tuple[Segment, ...], Mapping[str, Any]]]:
        """Yield the segments of each view, and its state as the optimizer has it."""
        for view in self._views:
            assert self._inner is not None, "views have an optimizer"
            yield view.segments, self._inner.state.get(view.tensor, {})

    def load_views(self, views: Sequence[tuple[Sequence[Segment], dict[str, Any]]]) -> None:
        """Go on with what :meth:`views` of another shard of the same ranges has told; the state is taken over."""
        if self._inner is None:
            return
        self._inner.state.clear()
        self._replace_views([ShardView(self._bucket, segments, shaped=self._whole) for segments, _ in views])
        for view, (_, state) in zip(self._views, views, strict=True):
            if state:
                self._inner.state[view.tensor] = state

    def _divide(self, present: Sequence[bool]) -> None:
        views: list[ShardView] = []
        for view in self._views:
            used = [segment for segment in view.segments if present[segment.slot.position]]
            unused = [segment for segment in view.segments if not present[segment.slot.position]]
            views += [self._carve(view, used), self._carve(view, unused)] if used and unused else [view]
        if len(views) != len(self._views):
            self._replace_views(views)

    def _carve(self, origin: ShardView, segments: list[Segment]) -> ShardView:
        assert self._inner is not None, "only a shard with elements is divided"
        view = ShardView(self._bucket, segments, shaped=False)
        state = self._inner.state.get(origin.tensor)
        if state:
            self._inner.state[view.tensor] = view.take_state(state, origin)
        return view

    def _replace_views(self, views: list[ShardView]) -> None:
        assert self._inner is not None, "only a shard with elements has views"
        kept = {id(view.tensor) for view in views}
        for view in self._views:
            if id(view.tensor) not in kept:
                self._inner.state.pop(view.tensor, None)
        self._views = views
        self._inner.param_groups[0]["params"] = [view.tensor for view in views]


def _kind_of(value: Any) -> str:
    """Return a text that two values share if they are the same; a tensor's own may round, and takes a millisecond."""
    return repr((value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value)
