"""Which tree of links explains the rates that were measured, found by itself: no structure is known beforehand.

A *round* is a set of flows between hosts that ran at the same time, with the rate that each of them got. A tree
predicts these: flows share links fairly (max-min). Its links need no search: what a link carried at the most, in all
rounds, is its rate where it was ever full, and where it never was, no plan will notice.

So only the switches are searched for, as sets of the hosts below each. From one switch for all, the change that makes
predictions better by the most is made (a switch above two neighbours, a node moved into a switch or out of it, a switch
taken away), until none is worth the two numbers that a switch adds. What is left of the error says how sure it is.

The tree that is found becomes a topology: hosts and switches with names. Measurements tell which hosts a link divides
from which others, and not which of the two sides is the upper one. So the root is put where every link has at least as
many hosts above it as below.
"""

from __future__ import annotations

import math
import statistics
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from syncline.topology import Host, Link, Switch, Topology
from syncline.units import format_rate

Flow = tuple[int, int]
"""From which host to which."""
Set = frozenset[int]

LEAST_NOISE = 0.12
"""How far a flow of a few hundredths of a second is off its fair share where nothing disturbs it, as a logarithm."""
CALM = 2.0
"""From so many times the noise on, errors count linearly: something else may have been in a flow's way."""
SWITCH_COST = 8.0
"""A switch must explain so much more, in squared errors over squared noise, than a tree without it; and twice as much
where it has some hosts of a site and some beside it, as few flows between sites tell of that."""
APART = 0.85
"""Hosts may be below a switch of their own if the next ones are only so near, as a part, or less."""
MOST_NEAR = 4
"""A node may be joined with so many of those that are nearest to it."""
_MOST_OF_TWO = 1.645 * math.sqrt(2)
"""Of two normal values nine in ten differ by less than so many deviations of one."""
_FULL, NUM_MEANS = 0.85, 4
"""A link was full in the rounds in which it carried at least this part of its rate, which is their mean."""
_LEAST = 1e-9
DOUBT = 0.2
"""A tree or a round is in doubt where flows are off by more than this part: other traffic was there, or hosts busy."""
MANY = 3
"""One flow of so many may be timed wrongly, and their sum is hardly off."""
ALIKE = 1.25
"""Rates that differ by less are told as one."""
SAME = 1.12
"""And rates that differ by less are taken for one, since flows of one link differ by as much."""


@dataclass(frozen=True, slots=True)
class Round:
    """Flows that ran at once, and the rate of each in bytes per second."""

    flows: tuple[Flow, ...]
    rates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class FittedTree:
    """Switches, as sets of the hosts below each (without the root's), the rates of all links, and what is left open."""

    num_hosts: int
    switches: tuple[Set, ...]
    up: dict[Set, float]
    down: dict[Set, float]
    error: float
    """The mean by which flows that share what limits them are off their prediction together, as a part of it."""
    doubtful: tuple[tuple[Flow, ...], ...]
    """Rounds in which that is more than DOUBT."""


def fit_tree(
    num_hosts: int, rounds: Sequence[Round], *, known: Iterable[Set] = (), sites: Sequence[Set] = ()
) -> FittedTree:
    """Return the tree that explains ``rounds`` best; every host is in one of them at least.

    ``known`` are the switches of a tree that explained some of them; without, the search begins with likely ones. What
    divides one of the ``sites`` must explain more. Where the same flows were measured more than once, how far they
    differ is the noise that a tree need not explain.
    """
    noise = noise_of(rounds)
    rounds = _plausible(num_hosts, _together(rounds))
    evidence = _Evidence(num_hosts, rounds, noise, sites)
    near = _nearness(num_hosts, rounds)
    hints = [hint for hint, _ in _hints(near)]

    best = frozenset(known)
    for hint in reversed(hints):  # each once, the widest first, is most of the way, for little
        best = min([best, *_with_hints(best, [hint])], key=evidence.score)
    while True:
        candidates = {*_with_hints(best, hints), *_neighbours(near, best)} - {best}
        scored = [(evidence.score(candidate), _order(candidate)) for candidate in candidates]
        if not scored or min(scored)[0] >= evidence.score(best) - _LEAST:
            return evidence.describe(best)
        best = frozenset(map(frozenset, min(scored)[1]))


def noise_of(rounds: Sequence[Round]) -> float:
    """Return how far flows differ from their own repetitions, as a logarithm, and at least LEAST_NOISE."""
    seen: dict[tuple[Flow, ...], np.ndarray] = {}
    differences: list[float] = []
    for each in rounds:
        logarithms = np.log(np.maximum(each.rates, _LEAST))
        if each.flows in seen:
            differences += np.abs(logarithms - seen[each.flows]).tolist()
        seen[each.flows] = logarithms
    return max(LEAST_NOISE, float(np.quantile(differences or [0.0], 0.9)) / _MOST_OF_TWO)


def _together(rounds: Sequence[Round]) -> list[Round]:
    """Return the rounds with those of the same flows as one: each flow has the geometric mean of its rates."""
    alike: dict[tuple[Flow, ...], list[tuple[float, ...]]] = {}
    for each in rounds:
        alike.setdefault(each.flows, []).append(each.rates)
    return [
        Round(flows, tuple(np.exp(np.log(np.maximum(rates, _LEAST)).mean(axis=0)).tolist()))
        for flows, rates in alike.items()
    ]


class _Evidence:
    """The rounds as arrays: (round, flow), padded with flows of no host.

    Hosts' links are the same in every tree: most carry one flow of a round, which is a cap on that flow, and only those
    that carry more are shared as switches' links are. So is what all flows of a round have together, wherever they go:
    a switch can forward so much, or the machine that an emulated network is on. Without it racks would explain that.
    """

    def __init__(self, num_hosts: int, rounds: Sequence[Round], noise: float, sites: Sequence[Set]) -> None:
        shape = (len(rounds), max(len(each.flows) for each in rounds))
        self._num_hosts, self._noise, self._sites = num_hosts, noise, sites
        self._flows = [each.flows for each in rounds]
        self._sources, self._targets = np.full(shape, num_hosts), np.full(shape, num_hosts)
        self._rates, self._is_real = np.zeros(shape), np.zeros(shape, bool)
        for number, each in enumerate(rounds):
            count = len(each.flows)
            self._sources[number, :count], self._targets[number, :count] = np.array(each.flows).T
            self._rates[number, :count] = each.rates
            self._is_real[number, :count] = True
        self._scores: dict[frozenset[Set], float] = {}
        crosses, self._host_rates = self._links([frozenset((host,)) for host in range(num_hosts)])
        is_shared = np.asarray(crosses.sum(axis=1) > 1)
        most = is_shared.sum(axis=1).max()
        places = np.argsort(~is_shared, axis=1, kind="stable")[:, :most]  # of each round's shared links
        self._caps = np.where(crosses & ~is_shared[:, None, :], self._host_rates, np.inf).min(axis=2)
        shared = np.take_along_axis(crosses & is_shared[:, None, :], places[:, None, :], axis=2)
        together = np.broadcast_to(_rates_of(self._rates.sum(axis=1, keepdims=True)), (len(rounds), 1))
        self._shared = np.concatenate([shared, self._is_real[:, :, None]], axis=2)
        self._shared_rates = np.concatenate([self._host_rates[places], together], axis=1)

    def score(self, switches: frozenset[Set]) -> float:
        """Return how badly these switches explain what was measured; less is better."""
        if switches not in self._scores:
            predicted, _ = self._predict(sorted(switches, key=sorted))
            off = np.abs(np.log(np.maximum(predicted, _LEAST) / np.maximum(self._rates, _LEAST))) / self._noise
            losses = huber_losses(off[self._is_real])
            num_split = sum(not _is_laminar(switch, site) for switch in switches for site in self._sites)
            self._scores[switches] = float(np.sum(losses)) + SWITCH_COST * (len(switches) + num_split)
        return self._scores[switches]

    def describe(self, switches: frozenset[Set]) -> FittedTree:
        """Return the tree with its rates."""
        nodes = _nodes(self._num_hosts, switches)
        predicted, rates = self._predict(nodes[self._num_hosts :])
        places = np.nonzero(self._is_real)
        off, numbers = off_by_link(places[0], self._rates[places], predicted[places])
        of_rounds = np.bincount(numbers, off) / np.bincount(numbers)
        both = zip(np.split(self._host_rates, 2), np.split(rates, 2), strict=True)
        up, down = (dict(zip(nodes, np.concatenate(each).tolist(), strict=True)) for each in both)
        return FittedTree(
            num_hosts=self._num_hosts,
            switches=tuple(sorted(switches, key=lambda each: (-len(each), sorted(each)))),
            up=up,
            down=down,
            error=float(np.mean(off)),
            doubtful=tuple(self._flows[number] for number in np.flatnonzero(of_rounds > DOUBT)),
        )

    def _predict(self, switches: Sequence[Set]) -> tuple[np.ndarray, np.ndarray]:
        """Return each flow's fair share, and the rates of the switches' links, up and then down."""
        crosses, rates = self._links(switches)
        every_rate = np.concatenate([self._shared_rates, np.tile(rates, (len(crosses), 1))], axis=1)
        return fair_shares(np.concatenate([self._shared, crosses], axis=2), every_rate, self._caps), rates

    def _links(self, nodes: Sequence[Set]) -> tuple[np.ndarray, np.ndarray]:
        """Return which of the nodes' links, up and then down, each flow crosses, and the rates of these links."""
        below = np.array([[host in node for node in nodes] for host in range(self._num_hosts + 1)], bool)
        from_below, to_below = below[self._sources], below[self._targets]
        crosses = np.concatenate([from_below & ~to_below, to_below & ~from_below], axis=2)
        return crosses, _rates_of(np.asarray((self._rates[:, None, :] @ crosses)[:, 0]))


def off_by_link(numbers: np.ndarray, measured: np.ndarray, predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return by how much, as a logarithm, what is limited by one link of a round is off, and that round's number.

    All three are by flow, and ``numbers`` says in which round. TCP divides a link unevenly, which is no doubt of it.
    """
    limited, places = np.unique(np.stack([numbers, predicted]), axis=1, return_inverse=True)
    totals = (np.maximum(np.bincount(places.ravel(), each), _LEAST) for each in (measured, predicted))
    return np.abs(np.subtract(*map(np.log, totals))), limited[0].astype(int)


def huber_losses(errors: np.ndarray) -> np.ndarray:
    """Return the losses of Huber: squares, and from CALM on lines."""
    return np.where(errors <= CALM, errors**2, CALM * (2 * errors - CALM))


def _rates_of(carried: np.ndarray) -> np.ndarray:
    """Return each link's rate from what it carried (round, link): the mean of the rounds in which it was full.

    The most of many rounds is far above the rate where flows are noisy, and few come near it: so which were full is
    asked again by the mean of those that were, until it hardly moves.
    """
    rates = carried.max(axis=0)
    for _ in range(NUM_MEANS):
        is_full = np.asarray(carried >= _FULL * rates)
        rates = (carried * is_full).sum(axis=0) / np.maximum(is_full.sum(axis=0), 1)
    return np.where(rates > 0, rates, np.inf)


def _plausible(num_hosts: int, rounds: Sequence[Round]) -> list[Round]:
    """Return the rounds with no flow faster than its hosts: one in many is timed wrongly, and looks like a wide link.

    A host sends or receives as much as in its second best round, where a round with many flows counts twice.
    """
    totals, counts = np.zeros((2, len(rounds), num_hosts)), np.zeros((2, len(rounds), num_hosts))
    for number, each in enumerate(rounds):
        for hosts, rate in zip(each.flows, each.rates, strict=True):
            totals[(0, 1), number, hosts] += rate
            counts[(0, 1), number, hosts] += 1
    totals = np.concatenate([totals, np.where(counts >= MANY, totals, 0.0)], axis=1)
    ordered = -np.sort(-totals, axis=1)
    most = ordered[:, 1]
    most = np.where(most > 0, most, ordered[:, 0])
    return [
        Round(
            each.flows,
            tuple(
                min(rate, float(most[0, source]), float(most[1, target]))
                for (source, target), rate in zip(each.flows, each.rates, strict=True)
            ),
        )
        for each in rounds
    ]


def fair_shares(crosses: np.ndarray, rates: np.ndarray, caps: np.ndarray | float = np.inf) -> np.ndarray:
    """Return the max-min fair rate of every flow of every round.

    ``crosses`` says which links (last axis) each flow (second axis) of each round (first axis) crosses; flows of one
    round share them. ``rates`` are the links', or each round's, and ``caps`` what flows have at most. A flow that
    crosses none and has no cap has the rate 0, one that nothing limits an infinite one.
    """
    caps = np.broadcast_to(caps, crosses.shape[:2])
    shares = np.zeros(crosses.shape[:2])
    is_open = crosses.any(axis=2) | np.isfinite(caps)
    left = np.broadcast_to(rates, (crosses.shape[0], crosses.shape[2])).astype(float)
    while is_open.any():
        uses: np.ndarray = crosses & is_open[:, :, None]
        num_open = uses.sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(num_open > 0, np.maximum(left, 0.0) / num_open, np.inf)
        own = np.minimum(np.where(uses, share[:, None, :], np.inf).min(axis=2, initial=np.inf), caps)
        narrowest = np.where(uses, own[:, :, None], np.inf).min(axis=1)  # of all flows of a link
        is_full = (num_open > 0) & (narrowest >= share * (1 - _LEAST))  # nothing else holds its flows back
        ends = is_open & ((uses & np.asarray(is_full)[:, None, :]).any(axis=2) | (own >= caps))
        shares = np.where(ends, own, shares)
        moved = np.where(ends & np.isfinite(own), own, 0.0)
        left = left - np.where(uses, moved[:, :, None], 0.0).sum(axis=1)
        is_open &= ~ends
    return shares


def _nodes(num_hosts: int, switches: Iterable[Set]) -> list[Set]:
    return [frozenset((host,)) for host in range(num_hosts)] + sorted(switches, key=sorted)


def children(num_hosts: int, switches: Iterable[Set], above: Set) -> list[Set]:
    """Return what hangs on the switch above those hosts: hosts and other switches."""
    inside = [node for node in _nodes(num_hosts, switches) if node < above]
    return [node for node in inside if not any(node < other for other in inside)]


def _nearness(num_hosts: int, rounds: Sequence[Round]) -> np.ndarray:
    """Return for each pair how fast its flows were, beside what both can do, when all others spoke too.

    Two that never spoke are not near: they are of other sites.
    """
    pairs = np.full((num_hosts, num_hosts), np.nan)
    for each in rounds:
        if len({host for flow in each.flows for host in flow}) == 2 * len(each.flows):  # each host in one flow
            for (source, target), rate in zip(each.flows, each.rates, strict=True):
                pairs[source, target] = np.fmin(pairs[source, target], rate)
    most = np.nan_to_num(pairs)
    part = pairs / np.minimum(most.max(axis=1)[:, None], most.max(axis=0)[None, :])
    of_two = np.where(np.isnan(part + part.T), np.fmin(part, part.T), np.sqrt(part * part.T))
    return np.asarray(np.nan_to_num(of_two))


def _between(near: np.ndarray, nodes: Sequence[Set]) -> np.ndarray:
    """Return how near each two of these are: the mean of their hosts; none is near itself."""
    below = np.array([[host in node for host in range(len(near))] for node in nodes], float)
    sizes = below.sum(axis=1)
    means = np.asarray(below @ near @ below.T / np.outer(sizes, sizes))
    np.fill_diagonal(means, -1.0)
    return means


def likely_sets(num_hosts: int, rounds: Sequence[Round], sites: Sequence[Set]) -> list[Set]:
    """Return sets of hosts that may be below a switch, whether or not a tree of them explains more: look there.

    None of them has some hosts of a site and some beside it.
    """
    likely = (hosts for hosts, part in _hints(_nearness(num_hosts, rounds)) if part < APART)
    return [hosts for hosts in likely if all(_is_laminar(hosts, site) for site in sites)]


def _hints(near: np.ndarray) -> Iterator[tuple[Set, float]]:
    """Yield sets of hosts that are nearer to each other than to others: every step of joining the nearest two sets.

    With each: how near the nearest other set is, as a part of how near these two are.
    """
    groups: list[Set] = [frozenset((host,)) for host in range(len(near))]
    means = _between(near, groups)
    while len(groups) > 2:
        first, second = sorted(map(int, np.unravel_index(means.argmax(), means.shape)))
        within = means[first, second]
        groups[first] |= groups.pop(second)
        means = _between(near, groups)
        yield groups[first], float(means[first].max() / within)


def _is_laminar(first: Set, second: Set) -> bool:
    return first <= second or second <= first or not first & second


def _with_hints(switches: frozenset[Set], hints: Sequence[Set]) -> list[frozenset[Set]]:
    return [switches | {hint} for hint in hints if all(_is_laminar(hint, switch) for switch in switches)]


def _neighbours(near: np.ndarray, switches: frozenset[Set]) -> Iterator[frozenset[Set]]:
    """Yield the trees that are one change away; only what is near another node may be joined with it."""
    num_hosts = len(near)
    everyone = frozenset(range(num_hosts))
    for above in (everyone, *switches):
        inside = children(num_hosts, switches, above)
        for first, second in _nearest_pairs(near, inside):
            if first | second != above:
                yield from _joined(switches, first, second)
        if above != everyone:
            yield switches - {above}
            for node in inside:
                yield _valid((switches - {above}) | {above - node})


def _nearest_pairs(near: np.ndarray, nodes: Sequence[Set]) -> Iterator[tuple[Set, Set]]:
    for node, means in zip(nodes, _between(near, nodes), strict=True):
        nearest = np.argsort(-means, kind="stable")[:MOST_NEAR].tolist()
        yield from ((node, nodes[other]) for other in nearest if nodes[other] != node)


def _joined(switches: frozenset[Set], first: Set, second: Set) -> Iterator[frozenset[Set]]:
    """Yield the trees in which two neighbours are below one switch: a new one, one of them, or one for both."""
    both = first | second
    yield switches | {both}
    for gone in ({first}, {second}, {first, second}):
        if gone <= switches:
            yield (switches - gone) | {both}


def _valid(switches: frozenset[Set]) -> frozenset[Set]:
    return frozenset(switch for switch in switches if len(switch) > 1)


def _order(switches: frozenset[Set]) -> tuple[tuple[int, ...], ...]:
    """Return the same switches in an order: of two trees that explain as much, the same is taken each time."""
    return tuple(sorted(tuple(sorted(switch)) for switch in switches))


def build_topology(tree: FittedTree, flat: Topology, *, name: str) -> Topology:
    """Return ``flat``, which has one switch for all of its hosts, with the switches and rates that were found.

    ``flat.hosts[k]`` is the tree's host k.
    """
    tree = _with_rates_alike(tree)
    sides = _downward(tree)
    taken = {node.name for node in flat.walk()}
    names = (each for each in _switch_names() if each not in taken)

    def build(above: Set, link: Link | None, name: str) -> Switch:
        nodes = sorted(children(tree.num_hosts, sides, above), key=min)
        parts: list[Switch | Host] = []
        for node in nodes:
            if node in sides:
                parts.append(build(node, sides[node], next(names)))
            else:
                (host,) = node
                link_of_host = Link(up_bytes_per_s=tree.up[node], down_bytes_per_s=tree.down[node])
                parts.append(replace(flat.hosts[host], link=link_of_host))
        return Switch(name=name, link=link, children=tuple(parts))

    root = next(each for each in ("switch", *map("switch-{}".format, range(len(taken)))) if each not in taken)
    return Topology(name=name, root=build(frozenset(range(tree.num_hosts)), None, root))


def _with_rates_alike(tree: FittedTree) -> FittedTree:
    """Return the tree in which rates that are near each other are the same: their mean, to three digits.

    What is a few hundredths off is noise, and where no two links are alike a plan has ten times as many messages.
    """
    groups = [[math.log(rate)] for rate in sorted({*tree.up.values(), *tree.down.values()})]
    while near := [
        (statistics.fmean(above) - statistics.fmean(below), place)
        for place, (below, above) in enumerate(pairwise(groups))
        if above[-1] - below[0] <= math.log(SAME)
    ]:
        _, place = min(near)
        groups[place] += groups.pop(place + 1)
    mean = {each: _rounded(math.exp(statistics.fmean(group)), digits=3) for group in groups for each in group}
    up, down = ({node: mean[math.log(rate)] for node, rate in rates.items()} for rates in (tree.up, tree.down))
    return replace(tree, up=up, down=down)


def _downward(tree: FittedTree) -> dict[Set, Link]:
    """Return the link above each switch, as the set of hosts below it: the side with fewer hosts.

    Hosts beside racks get a switch of their own, as two racks are found by one link. It carries what the others do.
    """
    everyone = frozenset(range(tree.num_hosts))
    links: dict[Set, Link] = {}
    for switch in tree.switches:
        link = Link(up_bytes_per_s=tree.up[switch], down_bytes_per_s=tree.down[switch])
        below = min(switch, everyone - switch, key=lambda side: (len(side), min(side)))
        if len(below) > 1:
            links[below] = link if below == switch else _turned(link)
    racks = [node for node in children(tree.num_hosts, links, everyone) if node in links]
    beside = everyone.difference(*racks)
    if racks and len(beside) > 1:
        up, down = (sum(rates[frozenset((host,))] for host in beside) for rates in (tree.up, tree.down))
        links[beside] = Link(
            up_bytes_per_s=min(up, sum(links[rack].down_bytes_per_s for rack in racks)),
            down_bytes_per_s=min(down, sum(links[rack].up_bytes_per_s for rack in racks)),
        )
    return links


def _turned(link: Link) -> Link:
    return Link(up_bytes_per_s=link.down_bytes_per_s, down_bytes_per_s=link.up_bytes_per_s)


def _switch_names() -> Iterator[str]:
    yield from (f"rack-{letter}" for letter in string.ascii_lowercase)
    yield from (f"rack-{number}" for number in range(10**6))


def describe_topology(topology: Topology) -> str:
    """Say in a few words what was found: ``"2 racks of 5 and 3 hosts, uplinks about 200 Mbit/s"``."""
    racks = [child for child in topology.root.children if isinstance(child, Switch)]
    alone = len(topology.root.children) - len(racks)
    if not racks:
        return f"{len(topology.hosts)} hosts at one switch, {_rates(topology.hosts)}"
    sizes = [sum(rack in topology.path(host.ranks[0].rank) for host in topology.hosts) for rack in racks]
    *most, last = map(str, sorted(sizes, reverse=True))
    named = f"{', '.join(most)} and {last}" if most else last
    beside = f" and {alone} host{'s' * (alone > 1)} beside" if alone else ""
    return f"{len(racks)} rack{'s' * (len(racks) > 1)} of {named} hosts{beside}, uplinks {_rates(racks)}"


def _rates(nodes: Sequence[Switch | Host]) -> str:
    rates = [rate for node in nodes if node.link for rate in (node.link.up_bytes_per_s, node.link.down_bytes_per_s)]
    least, most = min(rates), max(rates)
    if most < ALIKE * least:
        return f"about {_told(math.sqrt(least * most))}"
    return f"of {_told(least)} to {_told(most)}"


def _told(bytes_per_s: float) -> str:
    return format_rate(_rounded(bytes_per_s, digits=2))


def _rounded(bytes_per_s: float, *, digits: int) -> float:
    return float(f"{8 * bytes_per_s:.{digits}g}") / 8
