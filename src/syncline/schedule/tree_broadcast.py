"""Broadcast along the tree: scatter from the root outwards, gather inwards; no link carries the data more than once.

Let v_1, v_2, ... be the root rank's ancestors that have more than one child. At v_i the branch that holds the root
gives the data once to the other branches, divided among their ranks by the recursion of
:mod:`syncline.schedule.ownership`; these gather it among themselves, and, at the same time, those ranks that received
it at v_i hand it on at v_{i+1}. So the root sends S, every other rank receives S and sends at most S, and every link
carries at most S in each direction, down into every branch exactly S. It takes as many steps as the tree has levels,
twice at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from syncline.schedule.collective import Collective
from syncline.schedule.draft import UNOWNED, Draft, lowest_terms
from syncline.schedule.ownership import (
    Fractions,
    Ownership,
    TreeDivision,
    check_fractions,
    denominator_of,
    draw_exchanges,
)
from syncline.schedule.transfers import Transfers
from syncline.topology import Host, Node, Socket, Switch, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """One ancestor of the root without the branch that the root is in, and the weights that hold in it."""

    others: Node
    fractions: Fractions


def draft_tree_broadcast(
    topology: Topology, *, root: int, fractions: Fractions | None = None, planner: str = "tree"
) -> Draft:
    """Draw a broadcast from ``root``."""
    num_ranks = topology.num_ranks
    levels = _levels(topology, root, check_fractions(topology, fractions))
    denominator = math.lcm(1, *(denominator_of(level.others, level.fractions) for level in levels))
    divisions = [
        TreeDivision(level.others, num_ranks=num_ranks, fractions=level.fractions, denominator=denominator)
        for level in levels
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


def _levels(topology: Topology, root: int, fractions: Fractions) -> list[_Level]:
    path = topology.path(root)
    levels = []
    for branch, parent in zip(path, [*path[1:], topology.root], strict=True):
        if len(parent.children) > 1:
            levels.append(_without(parent, branch, fractions))
    return levels


def _without(parent: Node, branch: Node, fractions: Fractions) -> _Level:
    rest = {name: weights for name, weights in fractions.items() if name != parent.name}
    given = fractions.get(parent.name, [0] * len(parent.children))
    weights = [weight for child, weight in zip(parent.children, given, strict=True) if child is not branch]
    if any(weights):
        rest[parent.name] = weights
    return _Level(others=_prune(parent, branch), fractions=rest)


def _prune(parent: Node, branch: Node) -> Node:
    others = tuple(child for child in parent.children if child is not branch)
    if isinstance(parent, Host):
        return parent.with_children(others)  # type: ignore[arg-type]
    assert isinstance(parent, Switch | Socket)
    return replace(parent, children=others)  # type: ignore[arg-type]


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
