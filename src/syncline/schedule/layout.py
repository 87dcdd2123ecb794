"""How a buffer is laid over a schedule: cut into slices that run by themselves, each at the schedule's cuts.

A schedule is correct for any monotone map from its cuts to element offsets, so a layout may choose: even slices that
each look like a small copy of the whole (:meth:`Layout.build`); slices that keep every rank's part in one piece
(:meth:`Layout.contiguous`), as PyTorch's collectives of equal chunks want it; the same with cuts moved to given
boundaries (:meth:`Layout.aligned`), so that no parameter has two owners in a replica; ranges of any length for each
rank (:meth:`Layout.uneven`).
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from syncline.errors import ScheduleError
from syncline.schedule.schedule import Schedule

_MAX_WINDOW_OFFSETS = 1 << 21
_GOLDEN_SECTION = 0.618


@dataclass(frozen=True, kw_only=True)
class Layout:
    """For each slice the m + 1 absolute element offsets of the schedule's cuts; atom i is [offsets[i], offsets[i + 1]).

    Slices do not overlap and cover the buffer; their order is the order in which they should run. A buffer of no
    elements has one empty slice.

    >>> schedule = PLANNERS["ring"].plan(Topology.flat(2), Collective.ALL_REDUCE)
    >>> Layout.contiguous(schedule, num_elements=10, slice_elements=6).slices
    ((0, 2, 2), (5, 5, 7), (2, 5, 5), (7, 7, 10))
    """

    slices: tuple[tuple[int, ...], ...]
    num_elements: int

    @classmethod
    def build(cls, schedule: Schedule, num_elements: int, slice_elements: int, *, num_ramp: int = 0) -> Layout:
        """Cut the buffer into even slices of at most ``slice_elements``, each divided like the whole.

        The first ``num_ramp`` slices, and the last, are smaller: ... 1/4, 1/2 of a slice, and back. So the scarce links
        are busy soon after the beginning, and until shortly before the end. Short buffers are cut evenly.
        """
        _check_sizes(num_elements, slice_elements)
        bounds = _bounds(num_elements, slice_elements, num_ramp)
        within = {stop - start: schedule.offsets(stop - start) for start, stop in pairwise(bounds)}
        slices = tuple(
            tuple(start + offset for offset in within[stop - start]) if start else within[stop - start]
            for start, stop in pairwise(bounds)
        )
        return cls(slices=slices, num_elements=num_elements)

    @classmethod
    def contiguous(cls, schedule: Schedule, num_elements: int, slice_elements: int) -> Layout:
        """Cut the buffer as a whole at the schedule's cuts, so that each owner's part is in one piece.

        With a schedule of target "rank_order", rank k owns exactly the elements [k n / N, (k + 1) n / N), floored.
        Slices then are windows on one owner's part each. They go round the owners, and each time to another place of
        their parts: places differ in the ways that they take, so all links stay busy.
        """
        _check_sizes(num_elements, slice_elements)
        return cls._windows(schedule, schedule.offsets(num_elements), slice_elements)

    @classmethod
    def uneven(cls, schedule: Schedule, parts: Sequence[int], slice_elements: int) -> Layout:
        """Cut the buffer so that rank k owns ``parts[k]`` elements, one rank's after the other's, in one range each.

        For schedules of target "rank_order": their cuts within the part of a rank move in proportion to its size, so
        each element takes the way that one in its place takes where all parts are equal.
        """
        if len(parts) != schedule.num_ranks or min(parts) < 0:
            raise ScheduleError(f"each of {schedule.num_ranks} ranks has a part of 0 or more elements, not {parts[:8]}")
        _check_sizes(sum(parts), slice_elements)
        starts = tuple(accumulate(parts, initial=0))
        places = [divmod(cut * schedule.num_ranks, schedule.denominator) for cut in schedule.cuts[:-1]]
        offsets = [starts[rank] + rest * parts[rank] // schedule.denominator for rank, rest in places]
        return cls._windows(schedule, (*offsets, starts[-1]), slice_elements)

    @classmethod
    def aligned(cls, schedule: Schedule, boundaries: Sequence[int], slice_elements: int) -> Layout:
        """Move each cut to the nearest of ``boundaries``, so that what lies between two of them has the same owners.

        ``boundaries`` rise from 0 to the number of elements.
        """
        if not boundaries or boundaries[0] != 0 or any(left > right for left, right in pairwise(boundaries)):
            raise ScheduleError(f"boundaries must rise from 0 to the number of elements, not {list(boundaries)[:8]}...")
        _check_sizes(boundaries[-1], slice_elements)
        offsets = tuple(_nearest(boundaries, offset) for offset in schedule.offsets(boundaries[-1]))
        return cls._windows(schedule, offsets, slice_elements)

    @classmethod
    def _windows(cls, schedule: Schedule, offsets: tuple[int, ...], slice_elements: int) -> Layout:
        num_elements = offsets[-1]
        parts = _parts(schedule, offsets)
        most_rounds = max(1, _MAX_WINDOW_OFFSETS // (len(offsets) * max(1, len(parts))))
        num_rounds = min(-(-num_elements // slice_elements), most_rounds)
        if num_rounds <= 1:
            return cls(slices=(offsets,), num_elements=num_elements)
        windows = [
            (start + (stop - start) * number // num_rounds, start + (stop - start) * (number + 1) // num_rounds)
            for number in _scattered(num_rounds)
            for start, stop in parts
        ]
        slices = tuple(_clamp(offsets, start, stop) for start, stop in windows if start < stop)
        return cls(slices=slices, num_elements=num_elements)

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> str:
        """A hash of the layout, equal in all processes."""
        return hashlib.blake2b(repr((self.num_elements, self.slices)).encode(), digest_size=8).hexdigest()

    def owned_ranges(self, schedule: Schedule, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the element ranges [start, stop) that ``rank`` owns: sorted, merged, none of them empty."""
        return self._ranges(schedule.owned(rank))

    def owned_alike(
        self, schedule: Schedule, rank: int, *, row: int | None = None
    ) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return the same ranges, those together that have the same owner in each other replica; no group is empty.

        ``row`` as in :meth:`Schedule.owned_alike`.
        """
        groups = (self._ranges(runs) for runs in schedule.owned_alike(rank, row=row))
        return tuple(ranges for ranges in groups if ranges)

    def _ranges(self, runs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple(joined_ranges((offsets[first], offsets[last]) for offsets in self.slices for first, last in runs))


def joined_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges [start, stop) in order, those that meet or overlap as one, and none that is empty."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        elif start < stop:
            joined.append((start, stop))
    return joined


def _check_sizes(num_elements: int, slice_elements: int) -> None:
    if num_elements < 0 or slice_elements < 1:
        raise ScheduleError(
            f"a buffer has at least 0 elements and a slice at least 1, not {num_elements} and {slice_elements}"
        )


def _bounds(num_elements: int, slice_elements: int, num_ramp: int) -> list[int]:
    """Return where slices begin, and where the last ends."""
    rising = list(accumulate((slice_elements >> place for place in range(num_ramp, 0, -1)), initial=0))
    between = num_elements - 2 * rising[-1]
    if between < 2 * slice_elements:
        rising, between = [0], num_elements
    num_slices = max(1, -(-between // slice_elements))
    even = [rising[-1] + between * number // num_slices for number in range(num_slices + 1)]
    return [*rising[:-1], *even, *(num_elements - size for size in rising[-2::-1])]


def _nearest(boundaries: Sequence[int], offset: int) -> int:
    above = bisect.bisect_left(boundaries, offset)
    candidates = boundaries[max(0, above - 1) : above + 1]
    return min(candidates, key=lambda boundary: abs(boundary - offset))


def _parts(schedule: Schedule, offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Return the element ranges of the runs of atoms that have the same owners, in order, empty ones left out."""
    starts = [0, *(np.flatnonzero(np.diff(schedule.owners).any(axis=0)) + 1).tolist()]
    ends = [offsets[start] for start in starts] + [offsets[-1]]
    return [(start, stop) for start, stop in pairwise(ends) if start < stop]


def _scattered(count: int) -> list[int]:
    """Return the numbers below ``count``, those that follow each other far apart: in steps of the golden section."""
    step = next(step for step in range(round(count * _GOLDEN_SECTION), count + 1) if math.gcd(step, count) == 1)
    return [number * step % count for number in range(count)]


def _clamp(offsets: Sequence[int], start: int, stop: int) -> tuple[int, ...]:
    return tuple(min(max(offset, start), stop) for offset in offsets)
