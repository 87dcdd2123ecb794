"""The schedules and layouts of a job, planned when they are first needed and remembered.

Every rank plans by itself and must come to the same plan; so sizes are rounded to powers of two before a planner is
chosen, and nothing else than the call's own arguments goes in.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

from syncline.schedule import Collective, Layout, Schedule, choose
from syncline.topology import Topology

Target = Literal["balanced", "rank_order"]
Planner = Callable[[Topology, Collective, int, Target, int], Schedule]
"""Topology, collective, bytes, target, root."""


def plan_best(topology: Topology, collective: Collective, num_bytes: int, target: Target, root: int) -> Schedule:
    """Return the schedule with the least predicted time."""
    return choose(topology, collective, num_bytes, target=target, root=root)


NUM_SLICES_WITHIN_MACHINE = 4
"""Enough to keep reduction and copying busy at once; more slices only cost messages."""
MESSAGE_BYTES_WITHIN_MACHINE = 1 << 20
"""What a copy between two processes needs to hide the cost of announcing it."""


class Plans:
    """Plans for one topology; any thread may ask.

    Slices are of about ``slice_bytes``, the size that a network wants. Where no link has a rate (ranks of one machine)
    messages cost time and bytes hardly do, so slices are as large as a few of them per buffer allow.
    """

    def __init__(self, topology: Topology, planner: Planner, *, slice_bytes: int, max_layouts: int = 256) -> None:
        self._topology = topology
        self._planner = planner
        self._slice_bytes = slice_bytes
        self._largest_slice_bytes = max(slice_bytes, _slice_bytes_without_rates(topology))
        self._max_layouts = max_layouts
        self._schedules: dict[tuple[Collective, int, str, int], Schedule] = {}
        self._layouts: OrderedDict[tuple[str, str, int, int], Layout] = OrderedDict()
        self._lock = threading.Lock()

    def schedule(
        self, collective: Collective, num_bytes: int, *, target: Target = "balanced", root: int = 0
    ) -> Schedule:
        """Return the schedule for a buffer of ``num_bytes``."""
        size_class = max(num_bytes - 1, 0).bit_length()
        key = (collective, size_class, target, root)
        with self._lock:
            if key not in self._schedules:
                self._schedules[key] = self._planner(self._topology, collective, 1 << size_class, target, root)
            return self._schedules[key]

    def layout(self, schedule: Schedule, num_elements: int, itemsize: int, *, is_contiguous: bool = False) -> Layout:
        """Return how ``num_elements`` are cut; ``is_contiguous`` keeps each rank's part in one piece."""
        within_machine = min(num_elements * itemsize // NUM_SLICES_WITHIN_MACHINE, self._largest_slice_bytes)
        slice_elements = max(1, max(self._slice_bytes, within_machine) // itemsize)
        key = (schedule.digest, "contiguous" if is_contiguous else "even", num_elements, slice_elements)
        with self._lock:
            layout = self._layouts.get(key)
            if layout is None:
                build = Layout.contiguous if is_contiguous else Layout.build
                layout = build(schedule, num_elements, slice_elements)
                self._layouts[key] = layout
                if len(self._layouts) > self._max_layouts:
                    self._layouts.popitem(last=False)
            return layout


def _slice_bytes_without_rates(topology: Topology) -> int:
    """Return the largest slice for a network whose links do not limit anything; 0 if some do."""
    rates = [rate for _, link in topology.links() for rate in (link.up_bytes_per_s, link.down_bytes_per_s)]
    return MESSAGE_BYTES_WITHIN_MACHINE * topology.num_ranks if all(map(math.isinf, rates)) else 0
