"""Two topologies of the same hosts side by side: what can pass each link of either, in both directions.

Links cannot be compared one with the other, since one tree may have switches that the other has not: a measured one
leaves out what was never full. So each link stands for the hosts below it, and what is compared is how much these can
send to all others at once, and receive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from syncline.errors import TopologyError
from syncline.topology.topology import Topology
from syncline.topology.tree import DirectedLink, Direction, Host, Switch, relinked, walk

DIFFERS = 1 / 3
"""Rates differ if one is larger than the other by more than this part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkComparison:
    """What passes one direction of a link of either topology: by the one, by the other, in bytes per second."""

    link: DirectedLink
    one_bytes_per_s: float
    other_bytes_per_s: float

    @property
    def differs(self) -> bool:
        """Whether one is larger by more than :data:`DIFFERS`."""
        least, most = sorted((self.one_bytes_per_s, self.other_bytes_per_s))
        return most > least * (1 + DIFFERS)


def compare(one: Topology, other: Topology) -> Iterator[LinkComparison]:
    """Compare what passes each link of ``one``, and each of ``other`` that divides hosts as none of ``one`` does.

    Raises :class:`TopologyError` if their hosts are not the same.

    >>> racks = syncline.Topology.load("two-racks-5-3")
    >>> any(each.differs for each in compare(racks, racks))
    False
    """
    names = [{host.name for host in each.hosts} for each in (one, other)]
    if names[0] != names[1]:
        odd = ", ".join(sorted(names[0] ^ names[1])[:8])
        raise TopologyError(f"topologies {one.name!r} and {other.name!r} do not have the same hosts: {odd} is in one")
    everyone = frozenset(names[0])
    seen: set[frozenset[str]] = set()
    for topology in (one, other):
        for node, below in _divisions(topology):
            if below in seen or below == everyone:
                continue
            seen |= {below, everyone - below}
            directions: tuple[Direction, Direction] = ("up", "down")
            for direction in directions:
                sending = below if direction == "up" else everyone - below
                yield LinkComparison(
                    link=DirectedLink(node.name, direction),
                    one_bytes_per_s=most_between(one, sending),
                    other_bytes_per_s=most_between(other, sending),
                )


def _divisions(topology: Topology) -> Iterator[tuple[Switch | Host, frozenset[str]]]:
    for node in topology.walk():
        if isinstance(node, Switch | Host) and node.link is not None:
            yield node, frozenset(below.name for below in walk(node) if isinstance(below, Host))


def most_between(topology: Topology, sending: frozenset[str]) -> float:
    """Return how much the hosts of these names can send to all others at once, in bytes per second.

    In a tree what can be matched below a switch is best matched there.

    >>> most_between(syncline.Topology.load("two-racks-5-3"), frozenset({"h5", "h6", "h7"})) * 8 / 1e6
    200.0
    """
    total = 0.0

    def visit(node: Switch | Host) -> tuple[float, float]:
        """Return what can leave ``node`` upward, and what it can take, beyond what was matched below it."""
        nonlocal total
        if isinstance(node, Host):
            sent, taken = (math.inf, 0.0) if node.name in sending else (0.0, math.inf)
        else:
            parts = [visit(child) for child in node.children]
            sent, taken = (sum(amounts) for amounts in zip(*parts, strict=True))
            matched = min(sent, taken)
            total += matched
            if not math.isinf(matched):
                sent, taken = sent - matched, taken - matched
        if node.link is None:
            return 0.0, 0.0
        return min(sent, node.link.up_bytes_per_s), min(taken, node.link.down_bytes_per_s)

    visit(topology.root)
    return total


def with_rates_of(structure: Topology, measured: Topology) -> Topology:
    """Return ``structure`` with a rate for each of its links between hosts: what passes it in ``measured``."""
    everyone = frozenset(host.name for host in structure.hosts)
    links = {}
    for node, below in _divisions(structure):
        rates = (
            most_between(measured, hosts) if below != everyone else math.inf for hosts in (below, everyone - below)
        )
        up, down = rates
        assert node.link is not None, "a division is a link"
        links[node.name] = replace(node.link, up_bytes_per_s=up, down_bytes_per_s=down)
    root = relinked(structure.root, links)
    return Topology(name=structure.name, root=root, source=structure.source, lines=structure.lines)
