"""How much of a sharded step may cross each link, at best: a linear programme over the nodes of the tree.

A reduce-scatter makes an in-tree of each element: every rank but the owner sends once, when all that comes to it is
added, and all paths end at the owner. (More messages never help: of any schedule that is correct, keep of each rank the
last message of which a path leads to the owner. These are such a tree, and no link carries more than before.) Of the
messages of the average element, let *I_v* go down the link of node v and *U_v* up, and let x_v be the share that is
owned below v. At a parent v with children k nothing ends and nothing begins, so

    sum_k (I_k - U_k) = I_v - U_v,    U_k >= 1 - x_k,    I_k >= x_k,    I_k <= T down_k,    U_k <= T up_k,

I and U are 0 where all ranks are below, and a rank sends its own contribution on, U = 1 - x. Elements that are owned
below a node, below its siblings, and outside its parent obey this each for themselves, so messages are counted in these
three classes, *own*, *sibling* and *outside*. An all-gather is the reverse in time, with up and down exchanged.

Every schedule has such averages, so the least T_rs + T_ag is a lower bound of a step whose owners are the same in both
halves; all arguments of :mod:`syncline.schedule.bound` follow from the same sums, those about several links too: the
sum over the nodes of any connected set gives what must enter that hub. Conversely, averages with U = 1 - x (branches
*merge* what they send) are reached by :mod:`syncline.schedule.in_trees`. So a plan minimises the same programme with
that rule and small prices: on messages that make a detour by way of the owner's siblings, each of which costs a step;
on shares that are not equal; on children of a parent that get more than others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product

import numpy as np

from syncline.errors import ScheduleError
from syncline.schedule.bound import Branch, bound_of, branch_of, condensed
from syncline.schedule.draft import Collective
from syncline.schedule.traffic import Floats
from syncline.topology import Topology

STEP = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
_PRICE = 1e-3
_DIRECT_PRICE = 1e3
_NONE = 1e-6
_MOST_NODES_OF_BOUND = 4096
"""Of which no siblings are alike; beyond, the halves have bounds of their own, since a programme would take minutes."""
Limits = Sequence[tuple[float, float]]
"""The least and the most that each rank may own, as parts of the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One half of a step: messages of the average element that come down to each node, in the order of the tree.

    ``seconds`` is for one byte. ``sibling`` and ``outside``: of elements that are owned below a sibling of the node, or
    not below its parent. ``detours``: by number of a parent and owner, what comes to siblings of the owner's branch.
    """

    seconds: float
    sibling: tuple[float, ...]
    outside: tuple[float, ...]
    detours: Mapping[tuple[int, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlow:
    """The share of each rank, and the flow of each half."""

    shares: tuple[float, ...]
    halves: tuple[Flow, ...]

    @property
    def seconds(self) -> float:
        """How long all halves take for one byte, one after another."""
        return sum(half.seconds for half in self.halves)

    @property
    def has_detours(self) -> bool:
        """Whether sums meet at siblings of the owner's branch on their way."""
        return any(messages > _NONE for half in self.halves for messages in half.sibling)


def solve_step_flow(
    topology: Topology,
    limits: Limits,
    *,
    halves: Sequence[Collective] = STEP,
    is_bound: bool = False,
    is_direct: bool = False,
    is_at_once: bool = False,
    through: Sequence[tuple[float, float]] = ((0.0, 0.0), (0.0, 0.0)),
    least_s: Sequence[float] = (),
) -> StepFlow:
    """Return the flow that takes the least time; ``is_direct`` avoids detours at any price.

    ``through``: what owners send and receive besides in each half, times what they own. ``least_s``: the seconds
    per byte that each half may take in any case. ``is_at_once``: both halves of an all-reduce share the links, and
    the time of both together counts as that of the first. ``is_bound`` lets branches send without merging, has no
    prices, and looks at one of siblings that are alike. O(nodes) variables and rows. Raises :class:`ScheduleError`
    if no shares are within the limits.
    """
    trees = [branch_of(topology, swapped=half is Collective.ALL_GATHER) for half in halves]
    trees = [condensed(tree, limits) for tree in trees] if is_bound else trees
    fastest = list(least_s) or [bound_of(each, half) for each, half in zip(trees, halves, strict=True)]
    if is_at_once:
        fastest = [bound_of(trees[0], Collective.ALL_REDUCE), 0.0]
    if is_bound and sum(1 for _ in trees[0].walk()) > _MOST_NODES_OF_BOUND:
        times = [Flow(seconds=seconds, sibling=(), outside=(), detours={}) for seconds in fastest]
        return StepFlow(shares=(), halves=tuple(times))
    unit = sum(fastest) or 1 / min((rate for rate in _rates(trees[0]) if rate < math.inf), default=1.0)
    layout = _Columns(tuple(trees[0].walk()), len(halves), follows=not is_bound)
    program = _Program(num_columns=layout.num_columns)
    _divide(program, layout, limits)
    for number, tree in enumerate(trees):
        _Half(program, layout, number, tuple(tree.walk()), through[number]).build(
            unit, least=fastest[number] / unit, merges=not is_bound, is_alone=not is_at_once
        )
        program.costs[layout.seconds(number)] = 1.0
    if is_at_once:
        _share_links(program, layout, unit, least=fastest[0] / unit)
    if not is_bound:
        _set_prices(program, layout, is_direct=is_direct)
    values = program.solve()
    return StepFlow(
        shares=tuple(values[layout.shares(node)] for node in layout.node_of_rank.values()),
        halves=tuple(layout.flow(values, number, unit) for number in range(len(halves))),
    )


def _rates(tree: Branch) -> Iterator[float]:
    return (rate for branch in tree.walk() for rate in (branch.up, branch.down))


class _Columns:
    """Where each variable of the programme stands: shares, distances from equal shares, and a block for each half."""

    OWN, SIBLING, OUTSIDE, OWN_MORE, SIBLING_MORE, OUTSIDE_MORE, MOST = range(7)

    def __init__(self, nodes: Sequence[Branch], num_halves: int, *, follows: bool) -> None:
        number = {id(branch): place for place, branch in enumerate(nodes)}
        self.nodes = nodes
        self.num_ranks = len(nodes[0].ranks)
        self.children = [[number[id(child)] for child in branch.children] for branch in nodes]
        leaves = {branch.ranks[0]: place for place, branch in enumerate(nodes) if not branch.children}
        self.node_of_rank = dict(sorted(leaves.items()))
        self.ancestors: list[list[int]] = [[] for _ in range(self.num_ranks if follows else 0)]
        for place, branch in enumerate(nodes if follows else ()):
            for rank in branch.ranks:
                self.ancestors[rank].append(place)
        pairs = (
            (node, rank) for rank, path in enumerate(self.ancestors) for node in path if len(self.children[node]) > 1
        )
        self._pairs = {pair: place for place, pair in enumerate(pairs)}
        self._per_half = 7 * len(nodes) + len(self._pairs) + 1
        self._halves_begin = 2 * len(nodes)
        self.num_columns = self._halves_begin + num_halves * self._per_half
        self.num_halves = num_halves

    def count(self, node: int) -> float:
        return float(self.nodes[node].count)

    def shares(self, node: int) -> int:
        return node

    def most_owned(self, node: int) -> int:
        return len(self.nodes) + node

    def seconds(self, half: int) -> int:
        return self._halves_begin + (half + 1) * self._per_half - 1

    def messages(self, half: int, kind: int, node: int) -> int:
        return self._halves_begin + half * self._per_half + kind * len(self.nodes) + node

    def detour(self, half: int, node: int, owner: int) -> int:
        return self.messages(half, 7, 0) + self._pairs[node, owner]

    def flow(self, values: Floats, half: int, unit: float) -> Flow:
        """Return what the solution says of one half."""
        sibling, outside = (
            tuple(values[self.messages(half, kind, 0) : self.messages(half, kind + 1, 0)].tolist())
            for kind in (self.SIBLING, self.OUTSIDE)
        )
        detours = {pair: float(values[self.detour(half, *pair)]) for pair in self._pairs}
        seconds = float(values[self.seconds(half)]) * unit
        return Flow(seconds=seconds, sibling=sibling, outside=outside, detours=detours)


@dataclass(slots=True)
class _Program:
    """A linear programme, row by row: minimise ``costs``, all variables at least 0 and within their bounds."""

    num_columns: int
    costs: Floats = field(init=False)
    highest: Floats = field(init=False)
    lowest: Floats = field(init=False)
    _columns: list[int] = field(default_factory=list)
    _factors: list[float] = field(default_factory=list)
    _starts: list[int] = field(default_factory=lambda: [0])
    _least: list[float] = field(default_factory=list)
    _most: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.costs, self.lowest = np.zeros(self.num_columns), np.zeros(self.num_columns)
        self.highest = np.full(self.num_columns, np.inf)

    def add(self, terms: Sequence[tuple[int, float]], value: float = 0.0, *, is_equal: bool = False) -> None:
        """Add a row: the sum of column times factor is at most, or is equal to, the value."""
        self._columns += [column for column, _ in terms]
        self._factors += [factor for _, factor in terms]
        self._starts.append(len(self._columns))
        self._least.append(value if is_equal else -np.inf)
        self._most.append(value)

    def solve(self) -> Floats:
        """Return the values of all variables."""
        import highspy  # most programs never plan

        lp = highspy.HighsLp()
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
        lp.num_col_, lp.num_row_ = self.num_columns, len(self._most)
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = self.costs, self.lowest, self.highest
        lp.row_lower_, lp.row_upper_ = np.array(self._least), np.array(self._most)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_, lp.a_matrix_.index_ = np.array(self._starts), np.array(self._columns)
        lp.a_matrix_.value_ = np.array(self._factors)
        # One thread and one method: every rank solves it for itself, and all must find the same.
        for option, value in (("output_flag", False), ("threads", 1), ("parallel", "off"), ("solver", "simplex")):
            solver.setOptionValue(option, value)
        solver.passModel(lp)
        solver.run()
        status = solver.getModelStatus()
        if status != highspy.HighsModelStatus.kOptimal:
            raise ScheduleError(
                f"no shares of a sharded step are within the limits ({solver.modelStatusToString(status)}); let ranks "
                "own more"
            )
        return np.array(solver.getSolution().col_value)


def _divide(program: _Program, layout: _Columns, limits: Limits) -> None:
    """Shares add up along the tree, to 1 at the root, and are within their limits."""
    program.lowest[layout.shares(0)] = program.highest[layout.shares(0)] = 1.0
    for node, children in enumerate(layout.children):
        if children:
            parts = [(layout.shares(child), layout.count(child)) for child in children]
            program.add([*parts, (layout.shares(node), -1.0)], is_equal=True)
    for rank, node in layout.node_of_rank.items():
        if layout.num_ranks > 1:
            least, most = limits[rank]
            program.lowest[layout.shares(node)], program.highest[layout.shares(node)] = least, most


def _set_prices(program: _Program, layout: _Columns, *, is_direct: bool) -> None:
    """Prefer children of equal load, and no detours, where it does not matter for the time."""
    num_ranks = layout.num_ranks
    parents = [node for node, children in enumerate(layout.children) if len(children) > 1]
    for node in parents:
        peak = layout.most_owned(node)
        program.costs[peak] = _PRICE * num_ranks / len(parents)
        for child in layout.children[node]:
            program.add([(layout.shares(child), 1 / len(layout.nodes[child].ranks)), (peak, -1.0)])
    for half, node in product(range(layout.num_halves), parents):
        peak = layout.messages(half, layout.MOST, node)
        program.costs[peak] = _PRICE / len(parents)
        for child in layout.children[node]:
            coming = [(layout.messages(half, kind, child), 1.0) for kind in range(3)]
            program.add([*coming, (peak, -1.0)])
            program.costs[layout.messages(half, layout.SIBLING, child)] = (
                _DIRECT_PRICE if is_direct else _PRICE / num_ranks
            )


def _share_links(program: _Program, layout: _Columns, unit: float, *, least: float) -> None:
    """Bound what links carry of a reduce-scatter and an all-gather at once: what comes of the one, 1 - x of the other.

    ``least``: as much time as it takes in any case.
    """
    seconds = layout.seconds(0)
    program.lowest[seconds] = least
    for node, branch in enumerate(layout.nodes):
        for half, rate in enumerate((branch.down, branch.up)):
            if not branch.is_whole and rate * unit * least < layout.num_ranks + 1:
                coming = [(layout.messages(half, kind, node), 1.0) for kind in range(3)]
                program.add([*coming, (layout.shares(node), -1.0), (seconds, -rate * unit)], -1.0)


class _Half:
    """The rows of one half; ``nodes`` have its rates, and what is owned loads links by ``through`` besides."""

    def __init__(
        self, program: _Program, layout: _Columns, half: int, nodes: Sequence[Branch], through: tuple[float, float]
    ) -> None:
        self._through = through
        self._program = program
        self._layout = layout
        self._half = half
        self._nodes = nodes

    def build(self, unit: float, *, least: float, merges: bool, is_alone: bool) -> None:
        """Add all rows; ``unit`` are the seconds that count as one, ``least`` as many as it takes in any case."""
        layout = self._layout
        for node, children in enumerate(layout.children):
            if self._nodes[node].is_whole:
                self._limit_to_zero(node, range(6))
            for child in children:
                self._limit(node, child, merges=merges)
                if is_alone and not self._nodes[child].is_whole:
                    self._keep_to_rates(child, unit, least)
            if children:
                self._conserve(node, children)
        if merges:
            self._follow_owners()

    def _column(self, kind: int, node: int) -> int:
        return self._layout.messages(self._half, kind, node)

    def _limit_to_zero(self, node: int, kinds: Sequence[int]) -> None:
        for kind in kinds:
            self._program.highest[self._column(kind, node)] = 0.0

    def _limit(self, node: int, child: int, *, merges: bool) -> None:
        """Keep messages of elements that a child's class does not have from coming or going; an owner hears of all."""
        layout, add = self._layout, self._program.add
        here, below = layout.shares(node), layout.shares(child)
        most = float(layout.num_ranks - 1)
        if not self._nodes[child].is_whole:
            add([(below, 1.0), (self._column(layout.OWN, child), -1.0)])
        add([(self._column(layout.OWN, child), 1.0), (below, -most)])
        add([(self._column(layout.SIBLING, child), 1.0), (here, -most), (below, most)])
        add([(self._column(layout.OUTSIDE, child), 1.0), (here, most)], most)
        others = float(len(self._nodes[child].ranks) - 1)
        if merges or others == 0:
            self._limit_to_zero(child, (layout.OWN_MORE, layout.SIBLING_MORE, layout.OUTSIDE_MORE))
            return
        add([(self._column(layout.OWN_MORE, child), 1.0), (below, -others)])
        add([(self._column(layout.SIBLING_MORE, child), 1.0), (here, -others), (below, others)])
        add([(self._column(layout.OUTSIDE_MORE, child), 1.0), (here, others)], others)

    def _conserve(self, node: int, children: Sequence[int]) -> None:
        """Let what comes to children be what comes from above or leaves another child, for each class of elements."""
        layout, column, share = self._layout, self._column, self._layout.shares(node)
        each = [(child, layout.count(child)) for child in children]
        more = sum(count for _, count in each) - 1
        coming = [(column(kind, child), count) for child, count in each for kind in (layout.OWN, layout.SIBLING)]
        going = [
            (column(kind, child), -count) for child, count in each for kind in (layout.OWN_MORE, layout.SIBLING_MORE)
        ]
        above = [(column(layout.OWN, node), -1.0), (column(layout.OWN_MORE, node), 1.0), (share, -more)]
        self._program.add([*coming, *going, *above], is_equal=True)
        coming = [(column(layout.OUTSIDE, child), count) for child, count in each]
        going = [(column(layout.OUTSIDE_MORE, child), -count) for child, count in each]
        above = [(column(kind, node), -1.0) for kind in (layout.SIBLING, layout.OUTSIDE)]
        above += [(column(kind, node), 1.0) for kind in (layout.SIBLING_MORE, layout.OUTSIDE_MORE)]
        self._program.add([*coming, *going, *above, (share, more)], more, is_equal=True)

    def _follow_owners(self) -> None:
        """Say what comes down to the branches that each owner is in: all that there is at a parent, but for detours."""
        layout = self._layout
        seen: dict[int, list[tuple[int, float]]] = {node: [] for node in range(len(self._nodes))}
        for owner, path in enumerate(layout.ancestors):
            share, num_coming, detours = layout.shares(path[-1]), 0.0, []
            for node, child in pairwise(path):
                if len(layout.children[node]) > 1:
                    num_coming += len(layout.children[node]) - 1
                    detours.append((layout.detour(self._half, node, owner), 1.0))
                    self._program.add([*detours, (share, 1.0 - num_coming)])
                seen[child] += [(column, -1.0) for column, _ in detours] + [(share, num_coming)]
        for child, terms in seen.items():
            self._program.add([*terms, (self._column(layout.OWN, child), -1.0)], is_equal=True)
        for node, children in enumerate(layout.children):
            for child in children if len(children) > 1 else ():
                others = set(self._nodes[node].ranks) - set(self._nodes[child].ranks)
                from_others = [(layout.detour(self._half, node, owner), -1.0) for owner in sorted(others)]
                self._program.add([*from_others, (self._column(layout.SIBLING, child), 1.0)])

    def _keep_to_rates(self, node: int, unit: float, least: float) -> None:
        """Bound what a link carries, unless it can carry anything in the least time."""
        layout, branch = self._layout, self._nodes[node]
        seconds = layout.seconds(self._half)
        self._program.lowest[seconds] = least
        most, (sent, received) = layout.num_ranks, self._through
        if branch.down * unit * least < most + received:
            coming = [(self._column(kind, node), 1.0) for kind in (layout.OWN, layout.SIBLING, layout.OUTSIDE)]
            coming += [(layout.shares(node), received)] if received else []
            self._program.add([*coming, (seconds, -branch.down * unit)])
        if branch.up * unit * least < most + sent:
            kinds = (layout.OWN_MORE, layout.SIBLING_MORE, layout.OUTSIDE_MORE)
            going = [(self._column(kind, node), 1.0) for kind in kinds]
            self._program.add([*going, (layout.shares(node), sent - 1.0), (seconds, -branch.up * unit)], -1.0)
