"""Who owns what on a tree, and the exchanges that bring it about, also where branches differ.

    own(rank)            = { [0, 1): rank }
    own(parent, c1..cd)  : cut [0, 1) at every breakpoint of own(c1) ... own(cd);
                           for each interval I, with p_k = own(c_k)(I) for every child:
                               split I in d parts; p_k is given part k; every other p_j sends part k to p_k, which adds

So branches exchange only the same range, a rank ends with the product of its branches' shares along its path, and a
branch with d - 1 siblings sends (d - 1)/d of the data upward once, not once for each of its ranks. Parts need not be
equal: each child has an integer *weight*. Parents with one child are passed through.

With target "rank_order" rank k must end with exactly [k/N, (k+1)/N): an interval whose final owner lies below child c
goes whole to p_c, any other is split as usual.

All cuts are exact integers over one denominator, chosen beforehand so that every split comes out even. Intervals are
columns; only the cuts themselves are Python integers. Complexity: O(intervals x degree) for each parent.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import numpy as np

from syncline.errors import ScheduleError
from syncline.schedule.draft import Collective
from syncline.schedule.transfers import IntArray, Transfers
from syncline.topology import Gateway, Host, Node, Topology
from syncline.topology.tree import changed, ranks_below

Target = Literal["balanced", "rank_order"]
Fractions = Mapping[str, Sequence[int]]
"""The integer weights of a parent's children in file order, by the parent's name; a parent not named splits evenly."""


class Ownership(NamedTuple):
    """[0, 1) divided among the ranks below one node: ``owners[i]`` owns [cuts[i], cuts[i + 1])."""

    cuts: list[int]
    owners: IntArray

    def lookup(self, cuts: Sequence[int]) -> IntArray:
        """Return the owner of each interval of a finer division."""
        position = dict(zip(cuts, range(len(cuts)), strict=True))
        return np.repeat(self.owners, np.diff([position[cut] for cut in self.cuts]))


class Exchange(NamedTuple):
    """What happens at one parent: for interval i, ``holders[i, k]`` holds it below child k and is given part k of it.

    Part k of interval i is [bounds[i * (d + 1) + k], bounds[i * (d + 1) + k + 1]); it may be empty. ``height`` counts
    the exchanges below, this one included.
    """

    parent: str
    height: int
    holders: IntArray
    bounds: list[int]


class TreeDivision:
    """The recursion, run over all below ``top``: ``exchanges`` with children before parents, and the final ``own``.

    ``denominator`` must be a multiple of :func:`denominator_of`; it lets several divisions share their cuts.
    """

    def __init__(
        self,
        top: Node,
        *,
        num_ranks: int,
        fractions: Fractions,
        target: Target = "balanced",
        denominator: int | None = None,
    ) -> None:
        self._num_ranks = num_ranks
        self._in_rank_order = target == "rank_order"
        self._fractions = fractions
        self.exchanges: list[Exchange] = []
        self.denominator = denominator or denominator_of(top, fractions, num_ranks if self._in_rank_order else 1)
        self.own, self.height = self._divide(top)

    def cuts(self) -> set[int]:
        """Return every cut that any exchange uses."""
        return {0, self.denominator}.union(*(exchange.bounds for exchange in self.exchanges))

    def _divide(self, node: Node) -> tuple[Ownership, int]:
        """Return who owns what below ``node``, and the number of exchanges on top of each other."""
        if not node.children:
            return Ownership(cuts=[0, self.denominator], owners=np.array(ranks_below(node), dtype=np.int32)), 0
        below = [self._divide(child) for child in node.children]
        if len(below) == 1:
            return below[0]
        height = 1 + max(part[1] for part in below)
        cuts, chosen = self._cut_at_breakpoints(node, [part[0] for part in below])
        holders = np.stack([part[0].lookup(cuts) for part in below], axis=1)
        bounds = _split(cuts, chosen, weights_of(node, self._fractions))
        self.exchanges.append(Exchange(parent=node.name, height=height, holders=holders, bounds=bounds))
        return _join_neighbours(bounds, holders), height

    def _cut_at_breakpoints(self, node: Node, children: Sequence[Ownership]) -> tuple[list[int], list[int | None]]:
        """Return the common cuts, and for each interval the child that must have it whole, if one must."""
        cuts = sorted(set().union(*(child.cuts for child in children)))
        if not self._in_rank_order:
            return cuts, [None] * (len(cuts) - 1)
        share = self.denominator // self._num_ranks
        child_of = {rank: place for place, child in enumerate(node.children) for rank in ranks_below(child)}
        cuts = sorted({*cuts, *(share * (rank + end) for rank in child_of for end in (0, 1))})
        return cuts, [child_of.get(cut // share) for cut in cuts[:-1]]


def weights_of(node: Node, fractions: Fractions) -> Sequence[int]:
    """Return the weights of a parent's children."""
    return fractions.get(node.name) or [1] * len(node.children)


def denominator_of(node: Node, fractions: Fractions, leaf_denominator: int = 1) -> int:
    """Return the smallest denominator over which every split below ``node`` comes out even."""
    if not node.children:
        return leaf_denominator
    below = math.lcm(*{denominator_of(child, fractions, leaf_denominator) for child in node.children})
    return below * sum(weights_of(node, fractions)) if len(node.children) > 1 else below


def check_fractions(topology: Topology, fractions: Fractions | None) -> Fractions:
    """Raise unless each named parent has a weight for each child, not all of them zero."""
    fractions = fractions or {}
    parents = {node.name: len(node.children) for node in topology.walk() if node.children}
    for name, weights in fractions.items():
        valid = len(weights) == parents.get(name) and all(weight >= 0 for weight in weights) and sum(weights) > 0
        if not valid:
            raise ScheduleError(
                f"fractions give each child of a parent an integer weight, not all zero; {name!r} has "
                f"{parents.get(name, 'no')} children and was given {list(weights)!r}"
            )
    return fractions


def _split(cuts: Sequence[int], chosen: Sequence[int | None], weights: Sequence[int]) -> list[int]:
    upto, total = [0, *accumulate(weights)], sum(weights)
    bounds: list[int] = []
    for (start, stop), child in zip(pairwise(cuts), chosen, strict=True):
        if child is None:
            bounds += [start + (stop - start) * weight // total for weight in upto]
        else:
            bounds += [start] * (child + 1) + [stop] * (len(weights) - child)
    return bounds


def _join_neighbours(bounds: Sequence[int], holders: IntArray) -> Ownership:
    degree = holders.shape[1]
    starts = [start for i in range(0, len(bounds), degree + 1) for start in bounds[i : i + degree]]
    stops = [stop for i in range(0, len(bounds), degree + 1) for stop in bounds[i + 1 : i + degree + 1]]
    filled = [part for part, (start, stop) in enumerate(zip(starts, stops, strict=True)) if start < stop]
    owners = holders.reshape(-1)[filled]
    changes = np.flatnonzero(np.diff(owners, prepend=-1))
    cuts = [starts[filled[change]] for change in changes.tolist()]
    return Ownership(cuts=[*cuts, bounds[-1]], owners=owners[changes])


def draw_exchanges(exchanges: Iterable[Exchange], cuts: Sequence[int], *, ring_at: str | None = None) -> Transfers:
    """Return the reduce-scatter that they make; the exchange of height h takes place in step h - 1.

    Siblings send in rotation: child k first to child k + 1, so that no receiver is hit by all at once. Those of
    ``ring_at``, above which nothing is exchanged, send to the next alone, in as many steps as there are others.
    """
    index = dict(zip(cuts, range(len(cuts)), strict=True))
    drawn = [_draw(exchange, index, in_ring=exchange.parent == ring_at) for exchange in exchanges]
    return Transfers.concatenate(drawn).in_order()


def _draw(exchange: Exchange, index: Mapping[int, int], *, in_ring: bool) -> Transfers:
    num_intervals, degree = exchange.holders.shape
    bounds = np.array([index[bound] for bound in exchange.bounds], dtype=np.int32).reshape(num_intervals, degree + 1)
    interval, part = np.nonzero(bounds[:, :-1] < bounds[:, 1:])
    offset = np.arange(1, degree)[:, None]
    src_child = (part + (offset if in_ring else -offset)) % degree  # in a ring the part of child k begins behind it
    dst_child = (src_child + 1) % degree if in_ring else np.broadcast_to(part, src_child.shape)
    step = np.broadcast_to((offset - 1) * in_ring + exchange.height - 1, src_child.shape)
    return Transfers(
        step=step.reshape(-1).astype(np.int32),
        src=exchange.holders[interval, src_child].reshape(-1),
        dst=exchange.holders[interval, dst_child].reshape(-1),
        first=np.broadcast_to(bounds[interval, part], src_child.shape).reshape(-1),
        last=np.broadcast_to(bounds[interval, part + 1], src_child.shape).reshape(-1),
        add=np.ones(src_child.size, dtype=np.bool_),
    )


# Gateways: hosts of which one rank alone exchanges with other hosts, for all ranks of its host.
#
# The tree planners honour them: a host's ranks send all that they have towards the gateway, which owns whatever the
# host owns. Inside a socket that the gateway is not in, ranks first combine what they have, so that the socket's link
# carries it once.
#
# Gateways bind what moves training's buckets: all-reduces, and the reduce-scatters and all-gathers in which a planner
# may choose who owns what. Where each rank has a part of its own by definition (``target="rank_order"``), and in a
# broadcast, every rank speaks.


def is_bound_to_gateways(topology: Topology, collective: Collective, target: Target) -> bool:
    """Whether a schedule must keep ranks behind a gateway from speaking to other hosts.

    >>> is_bound_to_gateways(Topology.parse("{host: a, ranks: 2, gateway: one}"), Collective.ALL_REDUCE, "balanced")
    True
    """
    return bool(topology.gateways) and collective is not Collective.BROADCAST and target == "balanced"


def gateway_fractions(topology: Topology) -> Mapping[str, list[int]]:
    """Return the weights with which gateways own all that their hosts own; none for other parents.

    >>> gateway_fractions(Topology.parse("{host: a, ranks: 3, gateway: one}"))
    {'a': [1, 0, 0]}
    """
    fractions = {}
    for gateway in dict.fromkeys(topology.gateways.values()):
        path = topology.path(gateway)
        for child, parent in zip(path, [*path[1:], topology.root], strict=True):
            fractions[parent.name] = [int(other is child) for other in parent.children]
            if isinstance(parent, Host):
                break
    return fractions


def speaking(topology: Topology) -> Topology:
    """Return the tree of those ranks that speak for themselves, whose switches have the same children as before.

    >>> speaking(Topology.parse("{host: a, ranks: 3, gateway: one}")).num_ranks
    1
    """
    return topology.restricted(topology.speakers) if topology.gateways else topology


def with_gateway(topology: Topology, gateway: Gateway, *, of: Collection[str]) -> Topology:
    """Return the topology in which those hosts have ``gateway`` that have one ``of`` these.

    >>> topology = Topology.parse("{host: a, ranks: 2, gateway: auto}")
    >>> with_gateway(topology, "one", of=["auto"]).gateways
    mappingproxy({1: 0})
    """

    def decide(node: Node) -> Node:
        return replace(node, gateway=gateway) if isinstance(node, Host) and node.gateway in of else node

    return replace(topology, root=changed(topology.root, decide))
