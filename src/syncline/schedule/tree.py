"""The tree planner: reduce-scatter, all-gather and all-reduce by direct exchange at each parent of the topology.

Mechanism 2. From the leaves up, the children of one parent exchange apportioned, combined data (see
:mod:`syncline.schedule.ownership`); the all-gather is the same in reverse. Siblings send in rotation: child k first
to child k + 1, so that no receiver is hit by all at once.

Cost of one parent with R children that have the fractions f_c: for a reduce-scatter the link of child c carries (1 -
f_c) S up and (R - 1) f_c S down, for an all-gather the reverse, and for an all-reduce (1 + (R - 2) f_c) S in each
direction; links below also carry their share of what goes on above. There are as many steps as parents on the longest
path, twice for an all-reduce. Complexity: O(transfers).

Or the children of the root send in a ring, each to the next alone: as many bytes on each link, in R - 1 steps in place
of one. That is worse on a known tree. Where nothing is known of the network, and hosts that are neighbours may share a
link, it loads such a link with what two hosts exchange, not with what all do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from syncline.arguments import checked
from syncline.schedule.draft import UNOWNED, Collective, Draft, lowest_terms
from syncline.schedule.ownership import (
    Fractions,
    Ownership,
    Target,
    TreeDivision,
    check_fractions,
    denominator_of,
    draw_exchanges,
    gateway_fractions,
    is_bound_to_gateways,
    weights_of,
)
from syncline.schedule.schedule import Schedule
from syncline.schedule.transfers import Transfers
from syncline.schedule.verifier import verify
from syncline.topology import Node, Rank, Topology
from syncline.topology.tree import ranks_below, with_children

if TYPE_CHECKING:
    from syncline.schedule.outline import Outline


@checked
def plan_tree(
    topology: Topology,
    collective: Collective,
    *,
    fractions: Fractions | None = None,
    target: Target = "balanced",
    root: int = 0,
) -> Schedule:
    """Plan a collective along the tree; equal portions unless ``fractions`` weighs the children of some parents.

    ``target="rank_order"`` makes rank k own exactly [k/N, (k+1)/N). ``root`` matters to a broadcast alone.
    ``fractions``: for the name of a parent, an integer weight for each of its children. Ranks behind a gateway of the
    topology own nothing, whatever the fractions, but in a broadcast and in rank order, where every rank speaks.

    Cost: with the fractions f_c of R children, an all-reduce puts (1 + (R - 2) f_c) S on the link of child c in each
    direction; as many steps as parents on the longest path, twice for an all-reduce. O(transfers). Raises
    :class:`ScheduleError` for fractions that do not fit, :class:`TopologyError` for a root that does not exist.

    >>> topology = Topology.load("two-racks-5-3")
    >>> plan_tree(topology, Collective.ALL_REDUCE).num_steps
    4
    """
    return verify(draft_tree(topology, collective, fractions=fractions, target=target, root=root))


def draft_tree(
    topology: Topology,
    collective: Collective,
    *,
    fractions: Fractions | None = None,
    target: Target = "balanced",
    root: int = 0,
    planner: str = "tree",
    ring_at_root: bool = False,
) -> Draft:
    """Draw what :func:`plan_tree` verifies; with ``ring_at_root`` the children of the root exchange in a ring."""
    if collective is Collective.BROADCAST:
        return draft_tree_broadcast(topology, root=root, fractions=fractions, planner=planner)
    weights = _weights(topology, collective, fractions, target)
    division = TreeDivision(topology.root, num_ranks=topology.num_ranks, fractions=weights, target=target)
    cuts = tuple(sorted(division.cuts()))
    ring_at = division.exchanges[-1].parent if ring_at_root and division.exchanges else None
    scatter = draw_exchanges(division.exchanges, cuts, ring_at=ring_at).merged()
    gather = scatter.reversed()
    num_steps = int(scatter.step[-1]) + 1 if len(scatter) else 0
    transfers = {
        Collective.REDUCE_SCATTER: lambda: scatter,
        Collective.ALL_GATHER: lambda: gather,
        Collective.ALL_REDUCE: lambda: Transfers.concatenate([scatter, gather.shifted(num_steps)]),
    }[collective]()
    return Draft(
        collective=collective,
        num_ranks=topology.num_ranks,
        cuts=lowest_terms(cuts),
        transfers=transfers,
        owners=division.own.lookup(cuts),
        planner=planner,
    )


def outline_tree(
    topology: Topology, collective: Collective, *, fractions: Fractions | None = None, planner: str = "tree"
) -> Outline:
    """Return in outline what :func:`draft_tree` draws; no broadcast, and no other target than "balanced"."""
    from syncline.schedule.outline import DirectExchange, Outline, Part, Shape, shape_of  # no rank runs one

    weights = _weights(topology, collective, fractions, "balanced")
    exchanges, parts = dict[tuple[int, ...], DirectExchange](), dict[Shape, Part]()

    def exchange(weights: tuple[int, ...]) -> DirectExchange:
        return exchanges.setdefault(weights, DirectExchange(weights))

    def part(shape: Shape) -> Part:
        if shape not in parts:
            children, own = [part(child) for child in shape.children], shape.mark or (1,) * len(shape.children)
            parts[shape] = Part(shape.latency_s, children, lambda: exchange(own))
        return parts[shape]

    def mark(node: Node) -> tuple[int, ...]:
        return tuple(weights[node.name]) if node.name in weights else ()

    root = part(shape_of(topology, mark))
    order = np.array(ranks_below(topology.root), dtype=np.int32)
    return Outline(collective=collective, planner=planner, order=order, root=root)


def _weights(topology: Topology, collective: Collective, fractions: Fractions | None, target: Target) -> Fractions:
    weights = check_fractions(topology, fractions)
    return {**weights, **gateway_fractions(topology)} if is_bound_to_gateways(topology, collective, target) else weights


# A broadcast: scatter from the root outwards, gather inwards; no link carries the data more than once.
#
# Let v_1, v_2, ... be the root rank's ancestors that have more than one child. At v_i the branch that holds the root
# gives the data once to the other branches, divided among their ranks by the recursion of
# :mod:`syncline.schedule.ownership`; these gather it among themselves, and, at the same time, those ranks that received
# it at v_i hand it on at v_{i+1}. So the root sends S, every other rank receives S and sends at most S, and every link
# carries at most S in each direction, down into every branch exactly S. It takes as many steps as the tree has levels,
# twice at most.


def draft_tree_broadcast(
    topology: Topology, *, root: int, fractions: Fractions | None = None, planner: str = "tree"
) -> Draft:
    """Draw a broadcast from ``root``."""
    num_ranks = topology.num_ranks
    levels = list(_levels(topology, root, check_fractions(topology, fractions)))
    denominator = math.lcm(1, *(denominator_of(others, weights) for others, weights in levels))
    divisions = [
        TreeDivision(others, num_ranks=num_ranks, fractions=weights, denominator=denominator)
        for others, weights in levels
    ]
    cuts = sorted(
        {0, denominator}.union(
            *(division.cuts() for division in divisions), *(division.own.cuts for division in divisions)
        )
    )
    source = Ownership(cuts=[0, denominator], owners=np.array([root], dtype=np.int32))
    parts = []
    for step, division in enumerate(divisions):
        parts.append(_scatter(source, division.own, cuts).shifted(step))
        parts.append(draw_exchanges(division.exchanges, cuts).reversed().shifted(step + 1))
        source = division.own
    return Draft(
        collective=Collective.BROADCAST,
        num_ranks=num_ranks,
        cuts=lowest_terms(cuts),
        transfers=Transfers.concatenate(parts).in_order().merged(),
        owners=np.full(len(cuts) - 1, UNOWNED, dtype=np.int32),
        planner=planner,
        root=root,
    )


def _levels(topology: Topology, root: int, fractions: Fractions) -> Iterator[tuple[Node, Fractions]]:
    """Yield each ancestor of the root without the branch that the root is in, and the weights that hold in it."""
    path = topology.path(root)
    for branch, parent in zip(path, [*path[1:], topology.root], strict=True):
        if isinstance(parent, Rank) or len(parent.children) == 1:
            continue
        given = zip(parent.children, weights_of(parent, fractions), strict=True)
        weights = [weight for child, weight in given if child is not branch]
        others = with_children(parent, tuple(child for child in parent.children if child is not branch))
        yield others, {**fractions, parent.name: weights if any(weights) else []}


def _scatter(source: Ownership, target: Ownership, cuts: Sequence[int]) -> Transfers:
    """Move every range from its owner in ``source`` to its owner in ``target``."""
    src, dst = source.lookup(cuts), target.lookup(cuts)
    changes = np.flatnonzero((np.diff(src, prepend=-1) != 0) | (np.diff(dst, prepend=-1) != 0))
    return Transfers(
        step=np.zeros(len(changes), dtype=np.int32),
        src=src[changes],
        dst=dst[changes],
        first=changes.astype(np.int32),
        last=np.append(changes[1:], len(cuts) - 1).astype(np.int32),
        add=np.zeros(len(changes), dtype=np.bool_),
    )
