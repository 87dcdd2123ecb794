"""What a schedule puts on each directed link of a topology, as a whole and step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from syncline.schedule.draft import Draft
from syncline.schedule.transfers import Transfers
from syncline.topology import DirectedLink, Topology

Floats = npt.NDArray[np.float64]


class LinkTable(NamedTuple):
    """The directed links of a topology as columns: all links up, then, in the same order, all links down.

    ``ancestors[rank, level]`` is the number of the link by which the rank hangs below level ``level`` of the tree, the
    root's level being 0, or -1 where the rank's path is shorter.
    """

    links: tuple[DirectedLink, ...]
    bytes_per_s: Floats
    latency_s: Floats
    ancestors: npt.NDArray[np.int64]

    @classmethod
    def of(cls, topology: Topology) -> LinkTable:
        """Tabulate a topology, or return what was tabulated just before."""
        for known, table in tuple(_TABLES):
            if known is topology:
                return table
        table = cls._tabulated(topology)
        _TABLES.append((topology, table))
        return table

    @classmethod
    def _tabulated(cls, topology: Topology) -> LinkTable:
        links = topology.links()
        number = {name: index for index, (name, _) in enumerate(links)}
        depth = max(len(topology.path(rank)) for rank in range(topology.num_ranks))
        ancestors = np.full((topology.num_ranks, depth), -1, dtype=np.int64)
        for rank in range(topology.num_ranks):
            path = topology.path(rank)[::-1]
            ancestors[rank, : len(path)] = [number[node.name] for node in path]
        rates = [(link.up_bytes_per_s, link.down_bytes_per_s) for _, link in links]
        return cls(
            links=tuple(DirectedLink(name, direction) for direction in ("up", "down") for name, _ in links),
            bytes_per_s=np.array(rates).T.reshape(-1),
            latency_s=np.array([link.latency_s for _, link in links] * 2),
            ancestors=ancestors,
        )

    @property
    def num_pairs(self) -> int:
        """Number of links, both directions counted as one."""
        return len(self.links) // 2

    def load(self, src: npt.NDArray[np.int32], dst: npt.NDArray[np.int32], amounts: Floats) -> Floats:
        """Return for each directed link the sum of the amounts of all messages that cross it."""
        loads = np.zeros(len(self.links) + 1)  # the last one takes what belongs to no link
        for level in range(self.ancestors.shape[1]):
            above_src, above_dst = self.ancestors[src, level], self.ancestors[dst, level]
            apart = above_src != above_dst
            for above, offset in ((above_src, 0), (above_dst, self.num_pairs)):
                crossed = np.where(apart & (above >= 0), above + offset, len(self.links))
                loads += np.bincount(crossed, weights=amounts, minlength=len(loads))
        return loads[:-1]

    def latencies(self, src: npt.NDArray[np.int32], dst: npt.NDArray[np.int32]) -> Floats:
        """Return the sum of the latencies along each route."""
        total = np.zeros(len(src))
        padded = np.append(self.latency_s[: self.num_pairs], 0.0)
        for level in range(self.ancestors.shape[1]):
            above_src, above_dst = self.ancestors[src, level], self.ancestors[dst, level]
            total += np.where(above_src != above_dst, padded[above_src] + padded[above_dst], 0.0)
        return total


_TABLES = deque[tuple[Topology, LinkTable]](maxlen=2)
"""The last topologies: whoever compares schedules asks for the same ones again and again."""


class StepTraffic(NamedTuple):
    """What one step of a schedule puts on each directed link, in parts of the data, and on each rank.

    Of ranks it is the messages that each sends and receives, and the parts of the data in them; what is added counts
    twice. ``latency_s`` is that of the longest way.
    """

    links: Floats
    messages: Floats
    handled: Floats
    latency_s: float


def traffic_of(draft: Draft, table: LinkTable, messages: Floats) -> Iterator[StepTraffic]:
    """Yield what each step moves, where transfers are so many messages each."""
    moved = shares(draft)
    for rows in steps_of(draft.transfers):
        src, dst, part, number = draft.transfers.src[rows], draft.transfers.dst[rows], moved[rows], messages[rows]
        received = part * (1 + draft.transfers.add[rows])
        yield StepTraffic(
            links=table.load(src, dst, part),
            messages=sums(src, number, draft.num_ranks) + sums(dst, number, draft.num_ranks),
            handled=sums(src, part, draft.num_ranks) + sums(dst, received, draft.num_ranks),
            latency_s=float(table.latencies(src, dst).max()),
        )


def link_bytes(draft: Draft, topology: Topology, num_bytes: int) -> Mapping[DirectedLink, int]:
    """Return the bytes on each directed link for a buffer of ``num_bytes`` single bytes in one slice."""
    table = LinkTable.of(topology)
    offsets = np.array([cut * num_bytes // draft.denominator for cut in draft.cuts], dtype=np.float64)
    rows = draft.transfers
    loads = table.load(rows.src, rows.dst, offsets[rows.last] - offsets[rows.first])
    return dict(zip(table.links, np.rint(loads).astype(np.int64).tolist(), strict=True))


def shares(draft: Draft) -> Floats:
    """Return what part of the data each transfer moves."""
    positions = np.array([cut / draft.denominator for cut in draft.cuts])
    moved: Floats = positions[draft.transfers.last] - positions[draft.transfers.first]
    return moved


def sums(places: npt.NDArray[Any], amounts: Floats, count: int) -> Floats:
    """Return the sum of the amounts at each of so many places."""
    return np.asarray(np.bincount(places, amounts, count), dtype=np.float64)


def steps_of(rows: Transfers) -> Iterator[slice]:
    """Yield the rows of each step that has any, as slices."""
    starts = np.flatnonzero(np.diff(rows.step, prepend=-1)).tolist()
    for start, stop in zip(starts, [*starts[1:], len(rows)][: len(starts)], strict=True):
        yield slice(start, stop)
