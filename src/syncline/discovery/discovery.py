"""Discovery: ranks of several hosts measure their network together, and all get the same tree of it.

Every rank calls :func:`discover_network` at the same time, on a communicator of the job's hosts at one switch. Rank 0
orders what is measured, finds the tree, and gives it to all. What was found on the same hosts before is looked at
first: where a few flows still are as it predicts, it holds.

What is measured at once: each pair of hosts in both directions, all hosts at once (a round-robin tournament: 2 (N - 1)
rounds for N hosts; of many hosts most pairs in one direction only), where a host that sends does not receive, so that
no answer waits behind data. Then each host with all others at once, where there are few. Then, for each switch that
these tell of, all below it with all others, which fills the link above it. So every link is full in some round, and
links that are shared show.

A flow that is far takes many round trips. But round trips tell what is far from what, and cost one question: hosts that
are near each other are a *site*, pairs are measured within sites, and between two sites all hosts at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product, zip_longest
from pathlib import Path
from typing import TypeVar

import numpy as np

from syncline.discovery.following import changed_rates, crossed_links
from syncline.discovery.kept import keep, recall
from syncline.discovery.latencies import sites_of, with_latencies
from syncline.discovery.probe import NUM_ROUND_TRIPS, ROUND_S, Prober
from syncline.discovery.tree_search import (
    ALIKE,
    DOUBT,
    FittedTree,
    Flow,
    Round,
    Set,
    build_topology,
    children,
    describe_topology,
    fair_shares,
    fit_tree,
    likely_sets,
    off_by_link,
)
from syncline.runtime.communicator import Communicator
from syncline.runtime.port import Port
from syncline.topology import Switch, Topology

NAME = "measured"
NUM_PASSES = 3
MOST_HOSTS = 64
"""More are not measured: rounds grow with their number."""
NUM_BOTH_WAYS = 32
"""Pairs are measured in so many rounds, or as many as it takes for each two to speak one way."""
NUM_LOOKS = 4
"""So many rounds show whether a network is as it was."""
SAME_PART = 1 / 3
"""It is, while most of the links that limit flows differ by less than this part."""
FLOW_S = (0.035, 0.15)
"""How long flows send; longer only where the first tree was in doubt, and round trips do not make them longer still."""
AGAIN_S = (0.06, 0.2)
"""While a job trains, flows of pairs send so long, and flows that fill links: what is a third off is to be seen."""
DISCOVERY_S = 240.0
"""The others wait for rank 0 so long; every round has a deadline, and most take a tenth of a second."""
MARGIN_S = 5.0
_SIZE_BYTES = 8
Measure = Callable[[Sequence[Flow]], Round]
Around = Callable[[Set], Set]
"""With which hosts those of a set are to be measured, and these are among them."""
Player = TypeVar("Player")
FEW = 3
"""A host speaks with two others of its switch at once, where this many are there."""
MOST_STARS = 8
"""So many hosts, or fewer, whose switch has fewer speak with all others at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """What was found, how far flows were off it (as a part), and how long it took (s); ``kept``: in which file."""

    topology: Topology
    error: float
    seconds: float
    is_recalled: bool = False
    kept: str = ""

    @property
    def is_in_doubt(self) -> bool:
        """Whether steps should show if it holds; there is nothing to choose from where no flow ended."""
        return DOUBT < self.error < math.inf

    def __str__(self) -> str:
        if math.isinf(self.error):
            return (
                f"the network could not be measured, as some flow did not end within {ROUND_S:g} s: one switch is "
                "taken for it, which is slow on uneven racks; give a topology, or look for what is in the way with "
                "`syncline doctor`"
            )
        how = "the network is as it was" if self.is_recalled else "measured the network"
        where = f"; kept in {self.kept}" if self.kept else ""
        return f"{how} ({self.seconds:.1f} s, give or take {self.error:.0%}): {describe_topology(self.topology)}{where}"


def discover_network(communicator: Communicator, *, folder: Path | None = None, recalls: bool = True) -> Discovery:
    """Return the tree of the network between the communicator's hosts, the same on every rank; each of them calls it.

    The communicator's topology is one switch for all. ``folder`` is where rank 0 keeps what is found; with ``recalls``
    what it has kept is taken if it still holds. Where a flow does not end within ``ROUND_S`` the network stays that one
    switch.
    """
    flat = communicator.topology
    leaders = [host.ranks[0].rank for host in flat.hosts]
    port = communicator.open_port("discovery of the network")
    prober = _open_prober(communicator, port, leaders, stream=communicator.user_stream + 1)
    began_s = time.monotonic()
    text = b""
    if communicator.rank == 0:
        measuring, trips = partial(_measuring, port, prober), partial(_round_trips, port, prober)
        known = recall(folder, flat) if folder is not None and recalls else None
        text = _lead(flat, measuring, trips, known, folder).encode()
    text = broadcast_bytes(communicator, text)
    port.call_soon(port.close)
    error, is_recalled, kept, written = text.decode().split("\n", 3)
    return Discovery(
        topology=Topology.parse(written, source=kept or NAME),
        error=float(error),
        seconds=time.monotonic() - began_s,
        is_recalled=bool(is_recalled),
        kept=kept,
    )


def _open_prober(communicator: Communicator, port: Port, leaders: Sequence[int], *, stream: int) -> Prober:
    """Return this rank's prober when all ranks heed orders: where one listened before, none is kept until it does."""
    known_s = communicator.topology.round_trip_s
    prober = Prober(port, leaders, stream=stream, known_s=lambda one, other: known_s(leaders[one], leaders[other]))
    if communicator.rank in leaders:
        port.run(prober.open(), MARGIN_S)
    communicator.barrier().wait()
    return prober


def _measuring(port: Port, prober: Prober, flow_s: float) -> Measure:
    return lambda flows: port.run(prober.measure(flows, flow_s), ROUND_S + MARGIN_S)


def _round_trips(port: Port, prober: Prober) -> Mapping[Flow, float]:
    return port.run(prober.round_trips(), ROUND_S + MARGIN_S)


def _lead(
    flat: Topology,
    measuring: Callable[[float], Measure],
    round_trips: Callable[[], Mapping[Flow, float]],
    known: Topology | None,
    folder: Path | None,
) -> str:
    """Return what rank 0 tells all: the error, whether it was known before, the file, and the topology.

    ``measuring(seconds)`` measures with flows that last so long.
    """
    try:
        trips = round_trips()
        sites = sites_of(len(flat.hosts), trips)
        if known is not None and (off := look_at(known, sites, measuring(FLOW_S[0]))) <= SAME_PART:
            firsts = sorted(host.ranks[0].rank for host in known.hosts)
            return f"{off:.4f}\nrecalled\n{known.source}\n{with_latencies(known, firsts, trips).to_yaml()}"
        trees = []
        for flow_s in FLOW_S:
            trees.append(find_tree(sites, measuring(flow_s)))
            if trees[-1].error <= DOUBT or NUM_ROUND_TRIPS * max(trips.values(), default=0.0) > FLOW_S[-1]:
                break
        tree = min(trees, key=lambda each: each.error)
    except TimeoutError:
        return f"inf\n\n\n{flat.to_yaml()}"
    leaders = [host.ranks[0].rank for host in flat.hosts]
    found = with_latencies(build_topology(tree, flat, name=NAME), leaders, trips)
    kept = keep(folder, found) if folder is not None else None
    return f"{tree.error:.4f}\n\n{kept or ''}\n{found.to_yaml()}"


def find_tree(sites: Sequence[Set], measure: Measure) -> FittedTree:
    """Measure until there is nothing new to look at, then again what the tree rests on, and what is off it."""
    everyone = _everyone(sites)
    pairs = _rounds_of_pairs(sites)
    near = [flows for flows in pairs if any(site.issuperset(flows[0]) for site in sites)] or pairs
    rounds = [measure(flows) for flows in (*pairs, *near[:: max(1, len(near) // NUM_LOOKS)])]  # some twice: the noise
    fit = partial(fit_tree, len(everyone), sites=sites)
    tree = fit(rounds, known=_sides(sites, lambda _: everyone))
    for _ in range(NUM_PASSES):
        around = partial(_around, sites, _rates(tree))
        across = _sides((*tree.switches, *likely_sets(len(everyone), rounds, sites)), around)
        wanted = (*_rounds_across(across, around), *_rounds_inside(_groups(tree, sites), around))
        measured = {each.flows for each in rounds}
        new = [flows for flows in wanted if flows not in measured]
        if not new:
            break
        rounds += map(measure, new)
        tree = fit(rounds, known=tree.switches)
    rounds += map(measure, _rounds_across(tree.switches, partial(_around, sites, _rates(tree))))
    tree = fit(rounds, known=tree.switches)
    if not tree.doubtful:
        return tree
    rounds = [each for each in rounds if each.flows not in tree.doubtful] + list(map(measure, tree.doubtful))
    return fit(rounds, known=tree.switches)


def _rates(tree: FittedTree) -> dict[Set, float]:
    """Return what each node's link carries either way; of all beside a switch it is the switch's."""
    everyone = frozenset(range(tree.num_hosts))
    rates = {node: min(tree.up[node], tree.down[node]) for node in tree.up}
    return {everyone - node: rate for node, rate in rates.items()} | rates


def _groups(tree: FittedTree, sites: Sequence[Set]) -> list[Set]:
    """Return the hosts of a site that are right below one switch, for each."""
    nodes = (children(tree.num_hosts, tree.switches, above) for above in (_everyone(sites), *tree.switches))
    hosts = [frozenset(chain(*(node for node in each if len(node) == 1))) for each in nodes]
    return sorted(filter(None, {each & site for each, site in product(hosts, sites)}), key=sorted)


def measure_again(port: Port, communicator: Communicator, *, stream: int) -> Topology:
    """Return the communicator's topology with the rates that links have now; every rank calls this at the same time.

    The tree stays; a rate that is no more than a third off does too. ``stream`` is for this alone.
    """
    known = communicator.topology
    leaders = sorted(host.ranks[0].rank for host in known.hosts)
    prober = _open_prober(communicator, port, leaders, stream=stream)
    text = b""
    if communicator.rank == 0:
        try:
            sites = sites_of(len(leaders), _round_trips(port, prober))
            parts = zip(AGAIN_S, flows_of_links(known, leaders, sites), strict=True)
            rounds = [_measuring(port, prober, flow_s)(each) for flow_s, flows in parts for each in flows]
            text = changed_rates(known, leaders, rounds).to_yaml().encode()
        except TimeoutError:
            text = known.to_yaml().encode()
    found = Topology.parse(broadcast_bytes(communicator, text).decode(), source=known.source or NAME)
    port.call_soon(port.close)
    return found


def look_at(known: Topology, sites: Sequence[Set], measure: Measure) -> float:
    """Measure a few rounds; return by how much, as a part, one of four links is off ``known``, or more."""
    firsts = sorted(host.ranks[0].rank for host in known.hosts)
    looks = _rounds_of_pairs(sites)
    looks = looks[:: max(1, len(looks) // NUM_LOOKS)][:NUM_LOOKS]
    looks += _rounds_across_all(_switches(known, firsts)[:NUM_LOOKS], sites)
    predicted = np.concatenate([predicted_rates(known, firsts, flows) for flows in looks])
    measured = np.concatenate([each.rates for each in map(measure, looks)])
    off, _ = off_by_link(np.repeat(np.arange(len(looks)), [*map(len, looks)]), measured, predicted)
    return math.expm1(float(np.quantile(off, 0.75)))


def flows_of_links(
    known: Topology, ranks: Sequence[int], sites: Sequence[Set]
) -> tuple[list[tuple[Flow, ...]], list[tuple[Flow, ...]]]:
    """Return rounds of pairs, and rounds that fill the links between switches, twice; ``ranks[k]`` is of host k."""
    across = _rounds_across_all(_switches(known, ranks), sites)
    return _rounds_of_pairs(sites), [*across, *across]


def _switches(known: Topology, ranks: Sequence[int]) -> list[Set]:
    """Return the hosts below each switch but the root, the widest first, by their places in ``ranks``."""
    below: dict[str, set[int]] = {}
    for place, rank in enumerate(ranks):
        for node in known.path(rank):
            if isinstance(node, Switch):
                below.setdefault(node.name, set()).add(place)
    return sorted(map(frozenset, below.values()), key=lambda hosts: (-len(hosts), sorted(hosts)))


def predicted_rates(topology: Topology, ranks: Sequence[int], flows: Sequence[Flow]) -> list[float]:
    """Return the fair share of each flow, bytes per second; hosts are named by a rank of each."""
    links, crosses = crossed_links(topology, ranks, [flows])
    rates = np.array([topology.bytes_per_s(link) for link in links])
    return [float(share) for share in fair_shares(crosses, rates)[0]]


def _everyone(sites: Iterable[Set]) -> Set:
    return frozenset(chain(*sites))


def _around(sites: Sequence[Set], rates: Mapping[Set, float], hosts: Set) -> Set:
    """Return with whom these show what they can do: their site, or all if their site can do more than they showed.

    Where a set is no node of the tree, nothing limits it.
    """
    site = next((each for each in sites if hosts < each), None)
    if site is None or ALIKE * rates.get(hosts, math.inf) < rates.get(site, math.inf):
        return _everyone(sites)
    return site


def _sides(sets: Iterable[Set], around: Around) -> list[Set]:
    """Return the smaller of two sides of each, of more than a host: what is measured across is the same."""
    sides = {min(each, around(each) - each, key=lambda side: (len(side), sorted(side))) for each in sets}
    return sorted((side for side in sides if len(side) > 1), key=sorted)


def broadcast_bytes(communicator: Communicator, payload: bytes) -> bytes:
    """Give rank 0's bytes to all."""
    size = bytearray(len(payload).to_bytes(_SIZE_BYTES, "little"))
    communicator.broadcast(memoryview(size), label="size of the network's tree", timeout_s=DISCOVERY_S).wait()
    content = bytearray(payload if communicator.rank == 0 else int.from_bytes(size, "little"))
    communicator.broadcast(memoryview(content), label="the network's tree", timeout_s=DISCOVERY_S).wait()
    return bytes(content)


def _both_ways(rounds: Iterable[tuple[Flow, ...]]) -> Iterator[tuple[Flow, ...]]:
    for flows in rounds:
        yield flows
        yield _back(flows)


def _back(flows: tuple[Flow, ...]) -> tuple[Flow, ...]:
    return tuple((target, source) for source, target in flows)


def _rounds_of_pairs(sites: Sequence[Set]) -> list[tuple[Flow, ...]]:
    """Return rounds of pairs that share no host: each two of a site, all sites at once, and then as many of each two.

    Each two of a site speak both ways, but of many hosts most one way only: there is enough then that tells of a link.
    """
    near = _at_once(zip_longest(*(_tournament(sorted(site)) for site in sites), fillvalue=()))
    far = ((zip(sorted(one), sorted(other), strict=False) for one, other in pairs) for pairs in _tournament(sites))
    there = [_back(flows) if number % 2 else flows for number, flows in enumerate(near)]  # who has sent receives
    back = map(_back, there[: max(0, NUM_BOTH_WAYS - len(there))])
    return [*there, *back, *_both_ways(_at_once(far))]


def _at_once(rounds: Iterable[Iterable[Iterable[Flow]]]) -> list[tuple[Flow, ...]]:
    """Return the rounds in which all parts of each are measured together."""
    return [flows for parts in rounds if (flows := tuple(chain(*parts)))]


def _tournament(players: Sequence[Player]) -> Iterator[tuple[tuple[Player, Player], ...]]:
    """Yield rounds of pairs that share no player, in which each pair comes once (the circle method).

    >>> [len(pairs) for pairs in tournament(range(5))]
    [2, 2, 2, 2, 2]
    """
    places: list[Player | None] = list(players)
    if len(places) % 2:
        places.append(None)
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        yield tuple((first, second) for first, second in pairs if first is not None and second is not None)
        places = [places[0], places[-1], *places[1:-1]]


def _rounds_across(switches: Sequence[Set], around: Around) -> Iterator[tuple[Flow, ...]]:
    """Yield two rounds for each switch: all below it to others, and back; who has no partner of its own shares one."""

    def across(inside: Sequence[int], outside: Sequence[int]) -> tuple[Flow, ...]:
        longest = max(len(inside), len(outside))
        return tuple((inside[k % len(inside)], outside[k % len(outside)]) for k in range(longest))

    return _both_ways(across(sorted(switch), sorted(around(switch) - switch)) for switch in switches)


def _rounds_across_all(switches: Sequence[Set], sites: Sequence[Set]) -> list[tuple[Flow, ...]]:
    """Return these rounds with all others, each once: the links of two sides are one."""
    return list(dict.fromkeys(_rounds_across(switches, lambda _: _everyone(sites))))


def _rounds_inside(groups: Sequence[Set], around: Around) -> Iterator[tuple[Flow, ...]]:
    """Yield rounds in which each host speaks with two others of its group at once, all groups together.

    So what it can do shows beyond what one other can. A host that has not two beside it speaks with all there are.
    """
    parts = [_forks(sorted(group)) for group in groups if len(group) > 1]
    outward = _at_once(zip_longest(*parts, fillvalue=()))
    few = [host for group in groups if len(group) < FEW for host in group]
    if len(few) <= MOST_STARS:
        others = {host: around(frozenset((host,))) - {host} for host in few}
        outward += [tuple((host, other) for other in sorted(others[host])) for host in few]
    return _both_ways(outward)


def _forks(hosts: Sequence[int]) -> Iterator[tuple[Flow, ...]]:
    """Yield rounds of flows from each of these hosts once to two others, from as many at once as share none."""
    at_once = max(1, len(hosts) // FEW)
    num_rounds = math.ceil(len(hosts) / at_once)
    for number in range(num_rounds):
        sources = hosts[number::num_rounds]
        others = [host for host in hosts if host not in sources]
        yield tuple((source, other) for k, source in enumerate(sources) for other in others[2 * k : 2 * k + 2])
