"""Networks of known trees whose flows share links fairly, with noise, and random trees of racks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np

from syncline.discovery.following import crossed_links
from syncline.discovery.latencies import sites_of
from syncline.discovery.tree_search import Flow, Round, fair_shares
from syncline.topology import Host, Link, Rank, Switch, Topology
from syncline.topology.tree import relinked

HOST_RATES = (125e6, 125e6, 125e6, 62.5e6)
UPLINK_RATES = (12.5e6, 25e6, 50e6, 125e6)


class EmulatedNetwork:
    """Measures flows on a topology; host k is the k-th by first ranks. ``outliers``: this part is timed wrongly.

    All flows of a round have ``together`` bytes per second at most.
    """

    def __init__(
        self, topology: Topology, *, noise: float, seed: int, outliers: float = 0.0, together: float = np.inf
    ) -> None:
        self.topology = topology
        self.flat = Topology.flat_on([topology.host_of(rank).name for rank in range(topology.num_ranks)])
        self._ranks = [host.ranks[0].rank for host in self.flat.hosts]
        ranks = self._ranks
        pairs = permutations(range(len(ranks)), 2)
        self.round_trips = {(one, other): topology.round_trip_s(ranks[one], ranks[other]) for one, other in pairs}
        self.sites = sites_of(len(ranks), self.round_trips)
        self._noise, self._outliers, self._together = noise, outliers, together
        self._source = np.random.default_rng(seed)
        self.num_rounds = 0

    def measure(self, flows: Sequence[Flow]) -> Round:
        self.num_rounds += 1
        links, crosses = crossed_links(self.topology, self._ranks, [flows])
        rates = [*map(self.topology.bytes_per_s, links), self._together]
        shares = fair_shares(np.pad(crosses, ((0, 0), (0, 0), (0, 1)), constant_values=True), np.array(rates))[0]
        off = self._source.normal(0, self._noise, len(shares))
        is_wrong = self._source.random(len(shares)) < self._outliers
        off += np.where(is_wrong, self._source.uniform(-1, 1, len(shares)), 0)
        return Round(tuple(flows), tuple(map(float, shares * np.exp(off))))


def random_racks(seed: int, *, num_hosts: tuple[int, int] = (4, 16)) -> Topology:
    """Return so many hosts in racks, and racks in rows, uplinks up to 10 times slower, some slower downward."""
    source = random.Random(seed)
    numbers, names = iter(range(100)), iter(range(100))

    def host() -> Host:
        number = next(numbers)
        return Host(name=f"h{number}", link=Link.symmetric(source.choice(HOST_RATES)), ranks=(Rank(rank=number),))

    def switch(num_hosts: int, depth: int, link: Link | None) -> Switch:
        name = f"s{next(names)}"
        if depth == 0 or num_hosts <= 2:
            return Switch(name=name, link=link, children=tuple(host() for _ in range(num_hosts)))
        num_parts = source.randint(2, min(4, num_hosts))
        cuts = [0, *sorted(source.sample(range(1, num_hosts), num_parts - 1)), num_hosts]
        children: list[Switch | Host] = []
        for begin, end in pairwise(cuts):
            up = source.choice(UPLINK_RATES)
            down = source.choice((up, up, up / 2))
            if end - begin == 1:
                children.append(host())
            else:
                children.append(switch(end - begin, depth - 1, Link(up_bytes_per_s=up, down_bytes_per_s=down)))
        return Switch(name=name, link=link, children=tuple(children))

    return Topology(name=f"racks-{seed}", root=switch(source.randint(*num_hosts), source.randint(1, 2), None))


def shuffled(topology: Topology, seed: int) -> Topology:
    """Return the same tree with its ranks on other hosts."""
    order = list(range(topology.num_ranks))
    random.Random(seed).shuffle(order)
    return topology.permuted(order)


def with_random_latencies(topology: Topology, seed: int) -> Topology:
    draw = random.Random(seed)
    links = {
        name: replace(link, latency_s=draw.choice([0.0, 0.002, 0.010, 0.0255]) if is_switch else 0.0)
        for name, link in topology.links()
        if (is_switch := isinstance(node := topology.node(name), Switch)) or isinstance(node, Host)
    }
    return replace(topology, root=relinked(topology.root, links))
