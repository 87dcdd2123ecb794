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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from syncline.schedule.bound import Branch, branch_of
from syncline.schedule.collective import Collective
from syncline.schedule.draft import Draft, lowest_terms
from syncline.schedule.in_trees import draft_with_owners, weights_of_shares
from syncline.schedule.step_flow import STEP, StepFlow, solve_step_flow
from syncline.schedule.step_prediction import Pair
from syncline.schedule.traffic import Floats, shares
from syncline.schedule.transfers import IntArray, Transfers
from syncline.topology import Host, Link, Rank, Switch, Topology

_MOST_CHILDREN = 32
"""Of a parent; more are grouped."""
Through = tuple[tuple[float, float], ...]
"""Of each half, what is sent and received above by whoever owns everything below."""
Own = tuple[list[int], IntArray]
"""Cuts of [0, denominator), and the owner of each range."""


@dataclass(frozen=True, kw_only=True)
class LevelExchange:
    """What the children of a parent do: how much each owns, and each half's trees, which are drawn when asked for."""

    star: Topology
    weights: tuple[int, ...]
    flow: StepFlow
    num_atoms: int

    @property
    def parts(self) -> list[float]:
        """The part of each child."""
        return [weight / sum(self.weights) for weight in self.weights]

    @cached_property
    def _drafts(self) -> list[Draft]:
        owners = tuple(enumerate(self.weights))
        return [
            draft_with_owners(self.star, half, owners, num_atoms=self.num_atoms, flow=part)
            for half, part in zip(STEP, self.flow.halves, strict=True)
        ]

    @property
    def owners(self) -> IntArray:
        """The child that owns each atom."""
        owners: IntArray = self._drafts[0].owners[0]
        return owners

    @cached_property
    def sizes(self) -> list[int]:
        """The size of each atom."""
        return [stop - start for start, stop in pairwise(self._drafts[0].cuts)]

    @cached_property
    def halves(self) -> tuple[Transfers, ...]:
        """The rows of each half, each as a reduce-scatter among the children."""
        scatter, gather = self._drafts
        return scatter.transfers, gather.transfers.reversed()

    @cached_property
    def moved(self) -> list[tuple[Floats, Floats]]:
        """What each child sends and receives in each half."""
        scatter, gather = self._drafts
        count = len(self.weights)
        return [
            (_sums(half.src, moved, count), _sums(half.dst, moved, count))
            for half, moved in zip(self.halves, (shares(scatter), shares(gather)[::-1]), strict=True)
        ]


class LevelledStep:
    """Draws one step within limits; ``seconds`` is how long the links of the busiest level take for a byte."""

    def __init__(self, topology: Topology, limits: Sequence[float], *, atoms_per_child: int = 1) -> None:
        self._num_ranks = topology.num_ranks
        self._limits = limits
        self._atoms_per_child = atoms_per_child
        self._tree = _grouped(branch_of(topology))
        self._rates = dict[int, tuple[float, float]]()
        self._room = dict[int, float]()
        self._measure(self._tree)
        self._solved = dict[object, LevelExchange]()
        self._exchanges = dict[int, LevelExchange]()
        self._least_s: tuple[float, ...] = (0.0,) * len(STEP)
        for _ in range(2):
            self._exchanges.clear()
            self._solve(self._tree, 1.0, ((0.0, 0.0),) * len(STEP))
            halves = zip(*(exchange.flow.halves for exchange in self._exchanges.values()), strict=True)
            self._least_s = tuple(max(half.seconds for half in each) for each in halves)

    @property
    def seconds(self) -> float:
        """Both halves, one after another."""
        return sum(self._least_s)

    def draw(self) -> Pair:
        """Return both halves."""
        denominator = self._denominator(self._tree)
        steps = [list(accumulate(self._steps(half), initial=0)) for half in range(len(STEP))]
        levels: list[tuple[int, LevelExchange, IntArray, list[int]]] = []
        cuts, owners = self._divide(self._tree, denominator, levels)
        every = sorted({0, denominator}.union(*(bounds for *_, bounds in levels)))
        place = dict(zip(every, range(len(every)), strict=True))
        scatter, gather = (
            Transfers.concatenate(
                [
                    _rows(exchange.halves[half].shifted(steps[half][height - 1]), holders, [place[b] for b in bounds])
                    for height, exchange, holders, bounds in levels
                ]
            )
            .in_order()
            .merged()
            for half in range(len(STEP))
        )
        draft = Draft(
            collective=Collective.REDUCE_SCATTER,
            num_ranks=self._num_ranks,
            cuts=lowest_terms(every),
            transfers=scatter,
            owners=np.repeat(owners, np.diff([place[cut] for cut in cuts])),
            planner="levels",
        )
        return draft, replace(draft, collective=Collective.ALL_GATHER, transfers=gather.reversed())

    def _measure(self, branch: Branch) -> None:
        """Note what rates, and what limits, are below each node."""
        for child in branch.children:
            self._measure(child)
        up, down = branch.up, branch.down
        if branch.children:
            below = [self._rates[id(child)] for child in branch.children]
            up, down = min(up, sum(each[0] for each in below)), min(down, sum(each[1] for each in below))
        self._rates[id(branch)] = up, down
        self._room[id(branch)] = sum(self._limits[rank] for rank in branch.ranks)

    def _solve(self, branch: Branch, owned: float, through: Through) -> None:
        """Find the exchange of each parent from the top down; ``owned`` is the share of all that is below."""
        children = branch.children
        most = [min(1.0, self._room[id(child)] / owned) if owned > 0 else 1.0 for child in children]
        spare = sum(most)
        most = [part / min(1.0, spare) for part in most]  # rounded above, there may be a little too little room
        rates = [self._rates[id(child)] for child in children]
        rounded = tuple(round(part, 6) for pair in through for part in pair)
        key = (tuple(rates), tuple(round(part, 9) for part in most), rounded, self._least_s)
        if key not in self._solved:
            self._solved[key] = self._exchange(rates, most, through)
        exchange = self._exchanges[id(branch)] = self._solved[key]
        for number, (child, part) in enumerate(zip(children, exchange.parts, strict=True)):
            if not child.children:
                continue
            above = tuple(
                (float(sent[number]) + part * more[0], float(received[number]) + part * more[1])
                for (sent, received), more in zip(exchange.moved, through, strict=True)
            )
            self._solve(child, owned * part, above)

    def _exchange(self, rates: Sequence[tuple[float, float]], most: Sequence[float], through: Through) -> LevelExchange:
        star = _star(rates)
        flow = solve_step_flow(star, [(0.0, part) for part in most], through=through, least_s=self._least_s)
        weights = weights_of_shares(flow.shares, most)
        return LevelExchange(star=star, weights=tuple(weights), flow=flow, num_atoms=self._atoms_per_child * len(rates))

    def _denominator(self, branch: Branch) -> int:
        below = math.lcm(*{self._denominator(child) for child in branch.children}) if branch.children else 1
        exchange = self._exchanges.get(id(branch))
        return below * sum(exchange.sizes) if exchange else below

    def _steps(self, half: int) -> Iterator[int]:
        """Yield how many steps the exchanges of each height take."""
        longest = dict[int, int]()

        def visit(branch: Branch) -> int:
            height = max((visit(child) for child in branch.children), default=0)
            exchange = self._exchanges.get(id(branch))
            if exchange is None:
                return height
            rows = exchange.halves[half]
            longest[height] = max(longest.get(height, 0), int(rows.step[-1]) + 1 if len(rows) else 0)
            return height + 1

        return (longest[height] for height in range(visit(self._tree)))

    def _divide(
        self,
        branch: Branch,
        denominator: int,
        levels: list[tuple[int, LevelExchange, IntArray, list[int]]],
    ) -> Own:
        """Return who owns what below a node, and note its exchanges, with their heights, holders and bounds."""
        if not branch.children:
            return [0, denominator], np.array(branch.ranks, dtype=np.int32)
        begun = len(levels)
        below = [self._divide(child, denominator, levels) for child in branch.children]
        exchange = self._exchanges[id(branch)]
        cuts = sorted(set().union(*(part[0] for part in below)))
        place = dict(zip(cuts, range(len(cuts)), strict=True))
        holders = np.stack(
            [np.repeat(owners, np.diff([place[cut] for cut in starts])) for starts, owners in below], axis=1
        )
        upto, total = [0, *accumulate(exchange.sizes)], sum(exchange.sizes)
        bounds = [start + (stop - start) * size // total for start, stop in pairwise(cuts) for size in upto]
        height = 1 + max((level[0] for level in levels[begun:]), default=0)
        levels.append((height, exchange, holders, bounds))
        owners = holders[:, exchange.owners].reshape(-1)
        changes = np.flatnonzero(np.diff(owners, prepend=-1))
        starts = np.array(bounds, dtype=object).reshape(len(holders), -1)[:, :-1].reshape(-1)
        return [*starts[changes].tolist(), denominator], owners[changes]


def _rows(rows: Transfers, holders: IntArray, bounds: Sequence[int]) -> Transfers:
    """Return the rows of an exchange for each of its ranges."""
    places = np.array(bounds, dtype=np.int32).reshape(len(holders), -1)
    return Transfers(
        step=np.broadcast_to(rows.step, (len(holders), len(rows))).reshape(-1),
        src=holders[:, rows.src].reshape(-1),
        dst=holders[:, rows.dst].reshape(-1),
        first=places[:, rows.first].reshape(-1),
        last=places[:, rows.last].reshape(-1),
        add=np.ones(len(holders) * len(rows), dtype=np.bool_),
    )


def _sums(children: IntArray, moved: Floats, count: int) -> Floats:
    sums: Floats = np.bincount(children, moved, count).astype(np.float64)
    return sums


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


def _grouped(branch: Branch) -> Branch:
    """Return the tree with the children of wide parents in groups of about as many as there are groups.

    Whoever has one child is one with it.
    """
    children = tuple(map(_grouped, branch.children))
    if len(children) == 1:
        (only,) = children
        return replace(only, up=min(branch.up, only.up), down=min(branch.down, only.down))
    if len(children) > _MOST_CHILDREN:
        size = math.ceil(math.sqrt(len(children)))
        children = tuple(_group(children[start : start + size]) for start in range(0, len(children), size))
    return replace(branch, children=children)


def _group(children: tuple[Branch, ...]) -> Branch:
    if len(children) == 1:
        return children[0]
    ranks = tuple(rank for child in children for rank in child.ranks)
    return Branch(name="", up=math.inf, down=math.inf, ranks=ranks, is_whole=False, children=children)
