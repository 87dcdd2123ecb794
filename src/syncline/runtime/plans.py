"""The schedules and layouts of a job, planned when they are first needed and remembered.

Every rank plans by itself and must come to the same plan; so sizes are rounded to powers of two before a planner is
chosen, and nothing else than the call's own arguments goes in.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from syncline.schedule import UNOWNED, Collective, Layout, Schedule, choose, plan_tree, predict
from syncline.topology import Host, Link, Switch, Topology

Target = Literal["balanced", "rank_order"]
Planner = Callable[[Topology, Collective, int, Target, int], Schedule]
"""Topology, collective, bytes, target, root."""


LOOP_BYTES_PER_S = 1.5e9
"""What one communication loop moves in each direction: a rank is no faster, whatever its link is said to carry."""
LONG_BYTES = 1 << 20


def plan_best(topology: Topology, collective: Collective, num_bytes: int, target: Target, root: int) -> Schedule:
    """Return the schedule with the least predicted time, where a rank is no faster than its communication loop.

    A schedule without owners adds up the whole buffer on every rank, which the prediction does not count; so for long
    buffers the tree is taken if it is as fast within a tenth.
    """
    limited = _limit_ranks(topology)
    schedule = choose(limited, collective, num_bytes, target=target, root=root)
    if collective is not Collective.ALL_REDUCE or num_bytes < LONG_BYTES or not (schedule.owners == UNOWNED).any():
        return schedule
    tree = plan_tree(topology, collective, target=target)
    seconds, tree_seconds = (predict(each, limited, num_bytes).seconds for each in (schedule, tree))
    return tree if tree_seconds <= 1.1 * seconds else schedule


def _limit_ranks(topology: Topology) -> Topology:
    def limit(link: Link) -> Link:
        return Link(
            up_bytes_per_s=min(link.up_bytes_per_s, LOOP_BYTES_PER_S),
            down_bytes_per_s=min(link.down_bytes_per_s, LOOP_BYTES_PER_S),
            latency_s=link.latency_s,
        )

    def rebuild(node: Switch | Host) -> Switch | Host:
        if isinstance(node, Switch):
            return replace(node, children=tuple(rebuild(child) for child in node.children))
        return replace(node, ranks=tuple(replace(rank, link=limit(rank.link)) for rank in node.ranks))

    return Topology(name=topology.name, root=rebuild(topology.root), source=topology.source, lines=topology.lines)


class Plans:
    """Plans for one topology; any thread may ask. Slices are of about ``slice_bytes``."""

    def __init__(self, topology: Topology, planner: Planner, *, slice_bytes: int, max_layouts: int = 256) -> None:
        self._topology = topology
        self._planner = planner
        self._slice_bytes = slice_bytes
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
        slice_elements = max(1, self._slice_bytes // itemsize)
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
