"""Which link holds ranks up: one that is full, that loses what is sent on it, or that is far below its rate.

Ranks tell of their flows: what each has sent to each other rank, what TCP sent again of that as it was lost, and for
how long TCP had some of it under way. A flow crosses several links, and its loss or slowness is that of one of them:
that which explains most of what was lost, and on which no flow is fast while others, elsewhere, are. That last
comparison matters: where processors are busy all flows are slow, and no link is at fault.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from syncline.topology import DirectedLink, Host, Switch, Topology
from syncline.units import format_rate

LEAST_USE, LEAST_WAIT = 0.6, 0.25
"""A link holds ranks up that is used for so much of the time, while they wait so much of it, and not much longer."""
LEAST_LOST = 0.01
"""A link loses so much of what is sent on it, where that is worth a line: TCP then keeps far below its rate."""
MOST_SLOW_PART = 0.25
"""A link is slow that carries at most so much of its rate while a flow across it has something under way;"""
LEAST_CONTRAST = 3.0
"""and flows elsewhere are so many times as fast as any across it, by rate and by what their path should give them."""
LEAST_BUSY, LEAST_BYTES_PER_S = 0.005, 50_000.0
"""A flow tells a rate that is under way for so much of the time, and moves so much."""
ALIKE = 0.8
"""Links are told apart that explain less than this part of what the best explains."""
MOST_NAMES = 3


class Flow(NamedTuple):
    """What one rank sent to another: in all, or in a second."""

    sent_bytes: float
    lost_bytes: float
    busy_s: float


Flows = Mapping[tuple[int, int], Flow]
"""In a second, by the ranks that send and receive."""


def watched_links(topology: Topology) -> dict[DirectedLink, float]:
    """Return each direction of a link with its rate (bytes per second; without end if unknown), alike on all ranks."""
    both = [(DirectedLink(name, "up"), DirectedLink(name, "down")) for name, _ in topology.links()]
    return {link: topology.bytes_per_s(link) for ways in both for link in ways}


def flows_on_links(flows: Flows, topology: Topology) -> dict[DirectedLink, list[tuple[int, int]]]:
    """Return the flows that cross each link."""
    crossing: defaultdict[DirectedLink, list[tuple[int, int]]] = defaultdict(list)
    for pair in flows:
        for link in topology.route(*pair):
            crossing[link].append(pair)
    return crossing


def find_bad_links(flows: Flows, topology: Topology, waited: float) -> tuple[tuple[str, ...], str]:
    """Return the links that hold ranks up, by their lower ends, and how; nothing where none are known to.

    ``waited`` is the part of the time in which ranks wait. Several are named where the flows do not tell them apart.
    """
    if waited < LEAST_WAIT:
        return (), ""
    network = _Network(flows, topology)
    lossy, lost = network.lossy()
    full = network.full(waited)
    if full is not None:
        also = f", {lost:.0%} of what is sent there is lost" if full in lossy else ""
        used = f"{network.use(full):.0%} of {format_rate(network.rates[full])} is used ({full}){also}"
        return (full.child,), f"{used}, and they wait {waited:.0%} of the time"
    slow, how = network.slow(waited)
    if lossy:
        what = f"{lost:.1%} of what is sent there is lost, and sent again ({_listed(lossy)})"
        what += f"; {how}" if {link.child for link in lossy} & {link.child for link in slow} else ""
    else:
        what = how
    children = tuple(dict.fromkeys(link.child for link in lossy or slow))[:MOST_NAMES]
    return children, f"{what}; they wait {waited:.0%} of the time" if children else ""


class _Network:
    """The flows of a second, and the links that they cross. Those within a host may be full as well."""

    def __init__(self, flows: Flows, topology: Topology) -> None:
        self.rates = watched_links(topology)
        between = {node.name for node in topology.walk() if isinstance(node, Host | Switch)}
        self._between = [link for link in self.rates if link.child in between]
        self._flows = flows
        self._routes = {pair: topology.route(*pair) for pair in flows}
        self._crossing = flows_on_links(flows, topology)

    def use(self, link: DirectedLink) -> float:
        """Return the part of a link's rate that is used."""
        return self._sum(link, "sent_bytes") / self.rates[link]

    def full(self, waited: float) -> DirectedLink | None:
        """Return the link of which most is used, if that is much."""
        fullest = max(self._crossing, key=self.use, default=None)
        return fullest if fullest is not None and self.use(fullest) >= max(LEAST_USE, 0.8 * waited) else None

    def lossy(self) -> tuple[list[DirectedLink], float]:
        """Return the links that lose what is sent on them, and the part: what was lost crossed them."""
        lost = {link: self._sum(link, "lost_bytes") for link in self._crossing}
        parts = {link: lost[link] / max(1.0, self._sum(link, "sent_bytes")) for link in lost}
        explained = {link: parts[link] * lost[link] for link in self._between if parts.get(link, 0.0) >= LEAST_LOST}
        most = max(explained.values(), default=0.0)
        best = [link for link in self._between if explained.get(link, 0.0) >= ALIKE * most > 0]
        return best, max((parts[link] for link in best), default=0.0)

    def slow(self, waited: float) -> tuple[list[DirectedLink], str]:
        """Return the links that are far below their rates, with something under way for as long as ranks wait."""
        speeds = self._speeds()
        found = [link for link in self._between if self._is_slow(link, waited, speeds)]
        under_way = {link: self._sum(link, "busy_s") for link in found}
        names = [link for link in found if under_way[link] >= 0.95 * max(under_way.values())]
        if not names:
            return [], ""
        link = max(names, key=under_way.__getitem__)
        carried = f"{format_rate(self._carried(link))} of {format_rate(self.rates[link])}"
        how = (
            f"messages were under way there ({_listed(names)}) for {self._busiest(link):.0%} of the time, at {carried}"
        )
        return names, how

    def _is_slow(
        self, link: DirectedLink, waited: float, speeds: Mapping[tuple[int, int], tuple[float, float]]
    ) -> bool:
        here = [speeds[pair] for pair in self._crossing.get(link, ()) if pair in speeds]
        if not here or self._busiest(link) < 0.8 * waited:
            return False
        if math.isinf(self.rates[link]) or self._carried(link) > MOST_SLOW_PART * self.rates[link]:
            return False
        # Acknowledgements wait behind the data of the other direction, so that may be slow as well.
        others = [
            speed
            for pair, speed in speeds.items()
            if all(crossed.child != link.child for crossed in self._routes[pair])
        ]
        return bool(others) and all(
            median(elsewhere) >= LEAST_CONTRAST * max(across)
            for elsewhere, across in zip(zip(*others, strict=True), zip(*here, strict=True), strict=True)
        )

    def _speeds(self) -> dict[tuple[int, int], tuple[float, float]]:
        """Return the rate of each flow that tells one, and the same as a part of its share of the path's links."""
        found = {}
        for pair, flow in self._flows.items():
            shares = [
                self.rates[link] * self._busiest(link) / self._sum(link, "busy_s")
                for link in self._routes[pair]
                if flow.busy_s >= LEAST_BUSY and not math.isinf(self.rates[link])
            ]
            if shares and flow.sent_bytes >= LEAST_BYTES_PER_S:
                rate = flow.sent_bytes / flow.busy_s
                found[pair] = rate, rate / min(shares)
        return found

    def _carried(self, link: DirectedLink) -> float:
        return self._sum(link, "sent_bytes") / max(self._busiest(link), 1e-9)

    def _busiest(self, link: DirectedLink) -> float:
        return min(1.0, max(self._flows[pair].busy_s for pair in self._crossing[link]))

    def _sum(self, link: DirectedLink, counter: str) -> float:
        return sum(float(getattr(self._flows[pair], counter)) for pair in self._crossing[link])


def _listed(links: Sequence[DirectedLink]) -> str:
    return ", ".join(map(str, links[:MOST_NAMES]))
