"""Sharded steps of many ranks, level by level: at each parent the children exchange in trees that suit their links.

An in-tree for each owner, over all ranks (:mod:`syncline.schedule.in_trees`), is ranks^2 transfers. Here ranks exchange
with their siblings first, then those that hold the same range below different children of the next parent, and so on up
(:mod:`syncline.schedule.ownership` has the recursion). So many owners share a tree, and what an owner sends and
receives above loads its links by as much as it owns. At each parent that is the linear programme of a star
(:mod:`syncline.schedule.step_flow`), and its trees are drawn once for all ranges, and for all parents that are alike.
All are solved once, and again with the times of the slowest, which all have.

Parents of many children have them in groups, as if there were switches without limits between: that moves the same
bytes in far fewer messages. Complexity: O(transfers), which are ranks x children of the widest parents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from syncline.schedule.in_trees import draft_with_owners, weights_of_shares
from syncline.schedule.outline import DrawnExchange, Outline, Part, Shape, joined, shape_of
from syncline.schedule.step_flow import STEP, StepFlow, solve_step_flow
from syncline.schedule.transfers import IntArray
from syncline.topology import Host, Link, Rank, Switch, Topology
from syncline.topology.tree import ranks_below

T = TypeVar("T")

_MOST_CHILDREN = 32
"""Of a parent; more are grouped."""
Known = dict[Hashable, Any]
"""What steps of one topology share: its shapes, and the exchanges that were found."""
Through = tuple[tuple[float, float], ...]
"""Of each half, what is sent and received above by whoever owns everything below."""


class _Star:
    """A parent and its children: how much each owns, and the exchange, which is drawn when it is asked for."""

    def __init__(self, topology: Topology, weights: Sequence[int], flow: StepFlow, num_atoms: int) -> None:
        self._topology = topology
        self._weights = weights
        self.flow = flow
        self._num_atoms = num_atoms
        self.parts = [weight / sum(weights) for weight in weights]

    @cached_property
    def exchange(self) -> DrawnExchange:
        """The rows of each half, each as a reduce-scatter among the children."""
        owners = tuple(enumerate(self._weights))
        scatter, gather = (
            draft_with_owners(self._topology, half, owners, num_atoms=self._num_atoms, flow=part)
            for half, part in zip(STEP, self.flow.halves, strict=True)
        )
        sizes = np.diff(scatter.cuts).tolist()
        rows = (scatter.transfers, gather.transfers.reversed())
        return DrawnExchange(len(self._weights), sizes, scatter.owners[0].tolist(), rows)


class LevelledStep:
    """Plans one step within limits; ``seconds`` is how long the links of the busiest level take for a byte."""

    def __init__(
        self,
        topology: Topology,
        limits: Sequence[float],
        *,
        atoms_per_child: int = 1,
        known: Known | None = None,
    ) -> None:
        self._order: IntArray = np.array(ranks_below(topology.root), dtype=np.int32)
        self._limits, kinds = np.unique(limits, return_inverse=True)
        self._atoms_per_child = atoms_per_child
        self._known: Known = {} if known is None else known
        self._tree = self._find(kinds.tobytes(), lambda: _grouped(_marked(topology, kinds.tolist()), {}))
        self._rates = dict[Shape, tuple[float, float]]()
        self._room = dict[Shape, float]()
        self._measure(self._tree)
        self._least_s: tuple[float, ...] = (0.0,) * len(STEP)
        for _ in range(2):
            self._stars, self._parts = set[_Star](), dict[Hashable, Part]()
            self._root = self._part(self._tree, 1.0, ((0.0, 0.0),) * len(STEP))
            halves = zip(*(star.flow.halves for star in self._stars), strict=True)
            self._least_s = tuple(max(half.seconds for half in each) for each in halves)

    @property
    def seconds(self) -> float:
        """Both halves, one after another."""
        return sum(self._least_s)

    def outlines(self) -> tuple[Outline, Outline]:
        """Return both halves in outline."""
        scatter, gather = (
            Outline(collective=half, planner="levels", order=self._order, root=self._root) for half in STEP
        )
        return scatter, gather

    def _find(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = make()
        found: T = self._known[key]
        return found

    def _measure(self, shape: Shape) -> None:
        """Note what rates, and what limits, are below each shape."""
        if shape in self._room:
            return
        up, down, room = shape.up, shape.down, 0.0
        for child in dict.fromkeys(shape.children):
            self._measure(child)
        if shape.children:
            below = [self._rates[child] for child in shape.children]
            up, down = min(up, sum(each[0] for each in below)), min(down, sum(each[1] for each in below))
            room = sum(self._room[child] for child in shape.children)
        self._rates[shape] = up, down
        self._room[shape] = room if shape.children else float(self._limits[shape.mark[0]])

    def _part(self, shape: Shape, owned: float, through: Through) -> Part:
        """Find the exchange of each parent from the top down; ``owned`` is the share of all that is below."""
        children = shape.children
        most = [min(1.0, self._room[child] / owned) if owned > 0 else 1.0 for child in children]
        spare = sum(most)
        most = [part / min(1.0, spare) for part in most]  # rounded above, there may be a little too little room
        above = chain(most, *through) if children else ()
        key = (shape, *(round(part, 9) for part in above))
        if key not in self._parts:
            self._parts[key] = self._new_part(shape, owned, most, through) if children else Part(shape.latency_s)
        return self._parts[key]

    def _new_part(self, shape: Shape, owned: float, most: Sequence[float], through: Through) -> Part:
        star = self._star([self._rates[child] for child in shape.children], most, through)
        self._stars.add(star)
        below, moved = [], star.exchange.moved if any(child.children for child in shape.children) else []
        for number, (child, part) in enumerate(zip(shape.children, star.parts, strict=True)):
            above = through
            if child.children:
                above = tuple(
                    (float(sent[number]) + part * more[0], float(received[number]) + part * more[1])
                    for (sent, received), more in zip(moved, through, strict=True)
                )
            below.append(self._part(child, owned * part, above))
        return Part(shape.latency_s, below, lambda: star.exchange)

    def _star(self, rates: Sequence[tuple[float, float]], most: Sequence[float], through: Through) -> _Star:
        rounded = tuple(round(part, 6) for pair in through for part in pair)
        key = (tuple(rates), tuple(round(part, 9) for part in most), rounded, self._least_s, self._atoms_per_child)

        def solve() -> _Star:
            topology = _star(rates)
            limits = [(0.0, part) for part in most]
            flow = solve_step_flow(topology, limits, through=through, least_s=self._least_s)
            return _Star(topology, weights_of_shares(flow.shares, most), flow, self._atoms_per_child * len(rates))

        return self._find(key, solve)


def _marked(topology: Topology, kinds: Sequence[int]) -> Shape:
    return shape_of(topology, lambda node: (kinds[node.rank],) if isinstance(node, Rank) else ())


def _star(rates: Sequence[tuple[float, float]]) -> Topology:
    hosts = tuple(
        Host(
            name=f"c{number}",
            link=Link(up_bytes_per_s=up, down_bytes_per_s=down),
            ranks=(Rank(rank=number, link=Link.unlimited()),),
        )
        for number, (up, down) in enumerate(rates)
    )
    return Topology(name="star", root=Switch(name="parent", link=None, children=hosts))


def _grouped(shape: Shape, known: dict[Shape, Shape]) -> Shape:
    """Return the tree with the children of wide parents in groups of about as many as there are groups."""
    if shape not in known:
        children = tuple(_grouped(child, known) for child in shape.children)
        if len(children) > _MOST_CHILDREN:
            size = math.ceil(math.sqrt(len(children)))
            groups = [children[start : start + size] for start in range(0, len(children), size)]
            made = {group: joined(group) if len(group) > 1 else group[0] for group in groups}
            children = tuple(made[group] for group in groups)
        known[shape] = replace(shape, children=children)
    return known[shape]
