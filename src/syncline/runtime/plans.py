"""The schedules and layouts of a job, planned when they are first needed and remembered.

Every rank plans by itself and must come to the same plan; so sizes are rounded to powers of two before a planner is
chosen, and nothing else than the call's own arguments goes in.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from typing import Literal

from syncline.fabric.options import MOST_CONNECTED
from syncline.schedule import Collective, Draft, Layout, Schedule, plan_tree, verify
from syncline.schedule.draft import check_plannable
from syncline.topology import Topology
from syncline.topology.tree import longest_way_s

Target = Literal["balanced", "rank_order"]
Planner = Callable[[Topology, Collective, int, Target, int], Schedule]
"""Topology, collective, bytes, target, root."""


MOST_INFLIGHT_BYTES = 8 << 20
MIN_INFLIGHT_SLICES = 4
SLICE_S = 0.020
MAX_SLICE_BYTES = 2 << 20
LEAST_SLICE_BYTES = 256 << 10
"""Of a slice, however slow the links are: smaller messages cost more than they move."""
LEAST_SLICE_BYTES_WITHOUT_RATES, LEAST_BYTES_PER_RANK_WITHOUT_RATES = 512 << 10, 64 << 10
"""Where nothing is known that would make small slices worth it."""
NUM_CROSSINGS = 6
"""Of the network by one slice, at its longest: to its sum and back it is announced, granted and sent."""
NUM_RAMP = 2
"""Slices at either end that are smaller than the others, where links have rates."""
NUM_SLICES_WITHIN_MACHINE = 4
"""Enough to keep reduction and copying busy at once; more slices only cost messages."""
NUM_BUCKET_SLICES_WITHIN_MACHINE = 2
"""Of a bucket: other buckets keep everybody busy beside it, so it is cut only that its sums meet its copies."""
MESSAGE_BYTES_WITHIN_MACHINE = 1 << 20
"""What a copy between two processes needs to hide the cost of announcing it."""


MOST_DRAFTED = 2
"""Kinds of calls whose drafts are kept, for other sizes: a start asks for all-reduces and broadcasts in turn."""


class Plans:
    """Plans for one topology; any thread may ask.

    Slices are of about ``slice_bytes``, the size that a network wants; None takes it from the topology: what its
    links reduce in SLICE_S, and no less than LEAST_BYTES_PER_RANK for each rank. Where no link has a rate
    (ranks of one machine) messages cost time and bytes hardly do, so slices are as large as a few of them per buffer
    allow. Without a ``planner`` each schedule is the one with the least predicted time of all.
    """

    def __init__(
        self, topology: Topology, planner: Planner | None = None, *, slice_bytes: int | None, max_layouts: int = 256
    ) -> None:
        self._topology = topology
        self.planner = planner
        self.slice_bytes = slice_bytes or _slice_bytes(topology)
        self._largest_slice_bytes = max(self.slice_bytes, _slice_bytes_without_rates(topology))
        self._schedules: dict[tuple[Collective, int, str, int], Schedule] = {}
        self._draft_all = lru_cache(MOST_DRAFTED)(partial(_draft_all, topology))
        self._lay_out = lru_cache(max_layouts)(partial(_lay_out, NUM_RAMP if topology.has_rates else 0))
        self._lock = threading.Lock()

    @property
    def inflight_bytes(self) -> int:
        """How much of all slices together is best under way: enough that ranks which are late do not idle the links.

        More makes the first slices wait behind the others on the fast links, before the scarce ones have any work. What
        the scarce ones carry while a slice does nothing but cross a network of high latency is under way beside it.
        """
        if not self._topology.has_rates:
            return MOST_INFLIGHT_BYTES
        num_levels = max(len(self._topology.path(rank)) for rank in range(self._topology.num_ranks)) - 1
        inflight_bytes = max(MIN_INFLIGHT_SLICES, 2 * num_levels) * self.slice_bytes
        crossing_s = NUM_CROSSINGS * longest_way_s(self._topology.root)
        return inflight_bytes + int(crossing_s * _reduced_bytes_per_s(self._topology)) if crossing_s else inflight_bytes

    @cached_property
    def at_hand(self) -> Schedule:
        """An all-reduce that is planned in a tenth of the time in which the fastest is chosen, and proved too.

        Of many ranks each exchanges with a few.
        """
        check_plannable(self._topology)
        if self._topology.num_ranks > MOST_CONNECTED:
            from syncline.schedule.recursive_doubling import draft_recursive_doubling

            return verify(draft_recursive_doubling(self._topology, Collective.ALL_REDUCE))
        return plan_tree(self._topology, Collective.ALL_REDUCE)

    def schedule(
        self, collective: Collective, num_bytes: int, *, target: Target = "balanced", root: int = 0
    ) -> Schedule:
        """Return the schedule for a buffer of ``num_bytes``."""
        size_class = max(num_bytes - 1, 0).bit_length()
        key = (collective, size_class, target, root)
        with self._lock:
            if key not in self._schedules:
                self._schedules[key] = self._plan(collective, 1 << size_class, target, root)
            return self._schedules[key]

    def _plan(self, collective: Collective, num_bytes: int, target: Target, root: int) -> Schedule:
        if self.planner is not None:
            return self.planner(self._topology, collective, num_bytes, target, root)
        from syncline.schedule.cost import predicted_slice_bytes  # a start makes do with what is at hand
        from syncline.schedule.planners import best_of

        drafts = self._draft_all(collective, target=target, root=root)
        draft = best_of(drafts, self._topology, num_bytes, slice_bytes=predicted_slice_bytes(self._topology))
        known = (schedule for schedule in self._schedules.values() if schedule.transfers is draft.transfers)
        return next(known, None) or verify(draft)

    def bucket_slice_bytes(self, num_bytes: int) -> int:
        """Return about how large the slices are of a bucket of ``num_bytes``, which moves beside others."""
        return self._divide(num_bytes, NUM_BUCKET_SLICES_WITHIN_MACHINE)

    def _divide(self, num_bytes: int, num_slices: int) -> int:
        """Return the size of each of ``num_slices``; where links have rates, their size."""
        return max(self.slice_bytes, min(num_bytes // num_slices, self._largest_slice_bytes))

    def layout(
        self,
        schedule: Schedule,
        num_elements: int,
        itemsize: int,
        *,
        is_contiguous: bool = False,
        parts: tuple[int, ...] = (),
    ) -> Layout:
        """Return how ``num_elements`` are cut; ``is_contiguous`` keeps each rank's part in one range.

        ``parts`` are the elements of each rank's part, where they are not equal.
        """
        slice_elements = max(1, self._divide(num_elements * itemsize, NUM_SLICES_WITHIN_MACHINE) // itemsize)
        return self._lay_out(schedule, num_elements, slice_elements, is_contiguous, parts)


def _draft_all(topology: Topology, collective: Collective, *, target: Target, root: int) -> list[Draft]:
    from syncline.schedule.planners import draft_all

    return draft_all(topology, collective, target=target, root=root)


def _lay_out(
    num_ramp: int,
    schedule: Schedule,
    num_elements: int,
    slice_elements: int,
    is_contiguous: bool,
    parts: tuple[int, ...],
) -> Layout:
    if parts:
        return Layout.uneven(schedule, parts, slice_elements)
    if is_contiguous:
        return Layout.contiguous(schedule, num_elements, slice_elements)
    return Layout.build(schedule, num_elements, slice_elements, num_ramp=num_ramp)


def _slice_bytes(topology: Topology) -> int:
    """Return the size of slices between machines; it depends on nothing else than the topology."""
    if not topology.has_rates:
        return max(LEAST_SLICE_BYTES_WITHOUT_RATES, LEAST_BYTES_PER_RANK_WITHOUT_RATES * topology.num_ranks)
    from syncline.schedule.cost import LEAST_BYTES_PER_RANK

    wanted = int(min(MAX_SLICE_BYTES, SLICE_S * _reduced_bytes_per_s(topology)))
    return max(wanted, LEAST_SLICE_BYTES, LEAST_BYTES_PER_RANK * topology.num_ranks)


def _reduced_bytes_per_s(topology: Topology) -> float:
    """Return how much of a buffer all ranks could reduce in a second, by what links carry."""
    from syncline.schedule import lower_bound

    seconds = lower_bound(topology, Collective.ALL_REDUCE, MAX_SLICE_BYTES)
    return MAX_SLICE_BYTES / seconds if seconds else math.inf


def _slice_bytes_without_rates(topology: Topology) -> int:
    """Return the largest slice for a network whose links do not limit anything; 0 if some do."""
    return 0 if topology.has_rates else MESSAGE_BYTES_WITHIN_MACHINE * topology.num_ranks
