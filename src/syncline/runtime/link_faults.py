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
from typing import NamedTuple

from numpy import median

from syncline.topology import DirectedLink, Host, Switch, Topology

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
Speed = tuple[float, float]
"""Of a flow while something of it is under way: bytes per second, and those as a part of what its path should give.

A path gives no more than the fastest flow has: where links are faster than that, processors are the limit.
"""


class BadLinks(NamedTuple):
    """Links that hold ranks up, by their lower ends, and how; the flows do not tell them apart where they are several.

    ``is_fault``: they lose what is sent, or are far below their rates. A link that is only full does what it can.
    """

    children: tuple[str, ...] = ()
    how: str = ""
    is_fault: bool = False


class LinkWatch:
    """The links of a topology, each direction with its rate (bytes per second; without end if unknown)."""

    def __init__(self, topology: Topology) -> None:
        both = [(DirectedLink(name, "up"), DirectedLink(name, "down")) for name, _ in topology.links()]
        self.rates = {link: topology.bytes_per_s(link) for ways in both for link in ways}
        between = {node.name for node in topology.walk() if isinstance(node, Host | Switch)}
        self.between = [link for link in self.rates if link.child in between]
        """Those that are no host's own, which may be full as well."""
        self._topology = topology
        self._routes: dict[tuple[int, int], tuple[DirectedLink, ...]] = {}

    def route(self, pair: tuple[int, int]) -> tuple[DirectedLink, ...]:
        """Return the links that lead from one rank to another."""
        if pair not in self._routes:
            self._routes[pair] = tuple(self._topology.route(*pair))
        return self._routes[pair]

    def find_bad(self, flows: Flows, waited: float) -> BadLinks:
        """Return the links that hold ranks up; ``waited`` is the part of the time in which ranks wait."""
        return LinkLoads(flows, self).find_bad(waited) if waited >= LEAST_WAIT else BadLinks()


class LinkLoads:
    """What flows put on each link that they cross: all together, and for how long the busiest has something there."""

    def __init__(self, flows: Flows, watch: LinkWatch) -> None:
        self._flows, self._watch = flows, watch
        self._crossing: defaultdict[DirectedLink, list[tuple[int, int]]] = defaultdict(list)
        for pair in flows:
            for link in watch.route(pair):
                self._crossing[link].append(pair)
        self.totals = {
            link: Flow(*map(sum, zip(*(flows[pair] for pair in pairs), strict=True)))
            for link, pairs in self._crossing.items()
        }
        self._busiest = {
            link: min(1.0, max(flows[pair].busy_s for pair in pairs)) for link, pairs in self._crossing.items()
        }

    def use(self, link: DirectedLink) -> float:
        """Return the part of a link's rate that is used."""
        return self.totals[link].sent_bytes / self._watch.rates[link] if link in self.totals else 0.0

    def lost(self, link: DirectedLink) -> float:
        """Return the part of what is sent on a link that is lost."""
        return self.totals[link].lost_bytes / max(1.0, self.totals[link].sent_bytes) if link in self.totals else 0.0

    def find_bad(self, waited: float) -> BadLinks:
        """Return what :meth:`LinkWatch.find_bad` does."""
        from syncline.units import format_rate  # where a link is at fault

        lossy, lost = self._lossy()
        full = self._full(waited)
        if full is not None:
            also = f", {lost:.0%} of what is sent there is lost" if full in lossy else ""
            used = f"{self.use(full):.0%} of {format_rate(self._watch.rates[full])} is used ({full}){also}"
            return BadLinks((full.child,), f"{used}, and they wait {waited:.0%} of the time", full in lossy)
        slow, how = self._slow(waited)
        if lossy:
            what = f"{lost:.1%} of what is sent there is lost, and sent again ({_listed(lossy)})"
            what += f"; {how}" if {link.child for link in lossy} & {link.child for link in slow} else ""
        else:
            what = how
        children = tuple(dict.fromkeys(link.child for link in lossy or slow))[:MOST_NAMES]
        return BadLinks(children, f"{what}; they wait {waited:.0%} of the time", True) if children else BadLinks()

    def _full(self, waited: float) -> DirectedLink | None:
        """Return the link of which most is used, if that is much."""
        fullest = max(self.totals, key=self.use, default=None)
        return fullest if fullest is not None and self.use(fullest) >= max(LEAST_USE, 0.8 * waited) else None

    def _lossy(self) -> tuple[list[DirectedLink], float]:
        """Return the links that lose what is sent on them, and the part: what was lost crossed them."""
        explained = {
            link: self.lost(link) * self.totals[link].lost_bytes
            for link in self._watch.between
            if self.lost(link) >= LEAST_LOST
        }
        most = max(explained.values(), default=0.0)
        best = [link for link in explained if explained[link] >= ALIKE * most]
        return best, max(map(self.lost, best), default=0.0)

    def _slow(self, waited: float) -> tuple[list[DirectedLink], str]:
        """Return the links that are far below their rates, with something under way for as long as ranks wait."""
        speeds = self._speeds()
        fastest = tuple(map(max, zip(*speeds.values(), strict=True)))
        found = [link for link in self._watch.between if self._is_slow(link, waited, speeds, fastest)]
        most = max((self.totals[link].busy_s for link in found), default=0.0)
        names = [link for link in found if self.totals[link].busy_s >= 0.95 * most]
        if not names:
            return [], ""
        from syncline.units import format_rate

        link = max(names, key=lambda one: self.totals[one].busy_s)
        carried = f"{format_rate(self._carried(link))} of {format_rate(self._watch.rates[link])}"
        how = (
            f"messages were under way there ({_listed(names)}) for {self._busiest[link]:.0%} of the time, at {carried}"
        )
        return names, how

    def _is_slow(
        self, link: DirectedLink, waited: float, speeds: Mapping[tuple[int, int], Speed], fastest: Sequence[float]
    ) -> bool:
        here = [speeds[pair] for pair in self._crossing.get(link, ()) if pair in speeds]
        if not here or self._busiest[link] < 0.8 * waited:
            return False
        rate = self._watch.rates[link]
        if math.isinf(rate) or self._carried(link) > MOST_SLOW_PART * rate:
            return False
        least = [LEAST_CONTRAST * max(across) for across in zip(*here, strict=True)]
        if any(speed < bound for speed, bound in zip(fastest, least, strict=True)):
            return False  # as on most links of a network where all is alike, which would take long to compare
        # Acknowledgements wait behind the data of the other direction, so that may be slow as well.
        near = {*self._crossing.get(DirectedLink(link.child, "up"), ())}
        near.update(self._crossing.get(DirectedLink(link.child, "down"), ()))
        others = [speed for pair, speed in speeds.items() if pair not in near]
        return bool(others) and all(
            median(elsewhere) >= bound for elsewhere, bound in zip(zip(*others, strict=True), least, strict=True)
        )

    def _speeds(self) -> dict[tuple[int, int], Speed]:
        """Return the rate of each flow that tells one, and the same as a part of its share of the path's links."""
        shares = {
            link: self._watch.rates[link] * self._busiest[link] / total.busy_s
            for link, total in self.totals.items()
            if total.busy_s and not math.isinf(self._watch.rates[link])
        }
        rates = {
            pair: flow.sent_bytes / flow.busy_s
            for pair, flow in self._flows.items()
            if flow.busy_s >= LEAST_BUSY and flow.sent_bytes >= LEAST_BYTES_PER_S
        }
        fastest, found = max(rates.values(), default=0.0), {}
        for pair, rate in rates.items():
            share = min((shares[link] for link in self._watch.route(pair) if link in shares), default=0.0)
            if share:
                found[pair] = rate, rate / min(share, fastest)
        return found

    def _carried(self, link: DirectedLink) -> float:
        return self.totals[link].sent_bytes / max(self._busiest[link], 1e-9)


def _listed(links: Sequence[DirectedLink]) -> str:
    return ", ".join(map(str, links[:MOST_NAMES]))
