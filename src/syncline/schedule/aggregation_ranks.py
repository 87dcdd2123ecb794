"""Reduce-scatter in rank order by way of other ranks: sums meet on their way to an owner, where links have room.

Direct exchange (:mod:`syncline.schedule.ownership`) sends what every branch has straight to the branch of the owner, at
each of its ancestors: with L ancestors of k branches, L (k - 1) messages for an element come down the owner's link,
where one would do. Here the branches' sums may *meet* below one ancestor on a rank of a sibling branch, the
*aggregation rank*, with all that came from above, and go on towards the owner as one. Each rank still sends an element
once, so that nothing changes upward; downward, an aggregation rank's links carry what the owner's are spared.

Where the elements of an owner meet is searched for piece by piece: beginning with direct exchange, for one piece and
one ancestor at a time, whatever most reduces the sum of squares of what links carry beyond three quarters of the bound.
What a branch has for owners outside is divided below it in proportion to the room that links have within the bound. An
all-gather is the reverse, with up and down exchanged. Complexity: O(passes x pieces x levels^2 x branches), so for some
dozen ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile, pairwise

import numpy as np

from syncline.schedule.bound import Branch, branch_of, lower_bound, with_finite_rates
from syncline.schedule.draft import Collective, Draft, lowest_terms
from syncline.schedule.ownership import Exchange, TreeDivision, denominator_of, draw_exchanges
from syncline.schedule.portions import limited_by_the_next
from syncline.schedule.transfers import Transfer, Transfers
from syncline.topology import Topology

MOST_RANKS = 64
"""Beyond it the search takes longer than planning may."""
_NUM_PIECES = 8
"""Of each owner's part; a piece has one way to its owner."""
_WEIGHTS_PER_CHILD = 4
_MOST_PASSES = 6
_EASY = 0.75
"""Links that are busy for no longer than this part of the bound need no relief."""
_LEAST_GAIN = 1e-9


def draft_with_aggregation_ranks(topology: Topology, collective: Collective, *, planner: str) -> Draft:
    """Draw a reduce-scatter or an all-gather in which rank k owns exactly [k/N, (k+1)/N)."""
    tree = with_finite_rates(branch_of(topology, swapped=collective is Collective.ALL_GATHER))
    bound = lower_bound(topology, collective, 1, target="rank_order")
    pieces = _Pieces(topology, tree, bound)
    meetings = _Search(pieces, _EASY * bound).run()
    rows = [row for piece, places in enumerate(meetings) for row in pieces.way(piece, places)]
    moves = Transfers.concatenate([pieces.collected(), _in_rotation(rows, topology.num_ranks)]).in_order().merged()
    return Draft(
        collective=collective,
        num_ranks=topology.num_ranks,
        cuts=lowest_terms(pieces.cuts),
        transfers=moves.reversed() if collective is Collective.ALL_GATHER else moves,
        owners=np.array(pieces.owners, dtype=np.int32),
        planner=planner,
    )


Places = tuple[int | None, ...]
"""For each of the owner's ancestors, from the root down: the sibling branch where the sums meet, or None: below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """One ancestor of an owner: the branch that the owner is in, and the others."""

    entry: Branch
    siblings: tuple[Branch, ...]


class _Pieces:
    """All pieces with their owners, and which rank of a branch has the branch's sum of a piece for an owner outside."""

    def __init__(self, topology: Topology, tree: Branch, bound: float) -> None:
        num_ranks, root = topology.num_ranks, topology.root
        fractions = {
            branch.name: _weights(branch, bound, num_ranks) for branch in tree.parents() if len(branch.children) > 1
        }
        denominator = denominator_of(root, fractions, num_ranks * _NUM_PIECES)
        division = TreeDivision(
            root, num_ranks=num_ranks, fractions=fractions, target="rank_order", denominator=denominator
        )
        self._part = denominator // num_ranks
        step = self._part // _NUM_PIECES
        self.cuts = sorted(division.cuts().union(range(0, denominator + 1, step)))
        self.owners = [cut // self._part for cut in self.cuts[:-1]]
        self.sizes = [(stop - start) / denominator for start, stop in pairwise(self.cuts)]
        self.levels = {rank: tuple(_levels(tree, rank)) for rank in tree.ranks}
        self._ranks = {branch.name: frozenset(branch.ranks) for branch in tree.walk()}
        self._exchanges = [self._for_others(exchange) for exchange in division.exchanges]
        self._heights = {exchange.parent: exchange.height for exchange in division.exchanges}
        self._holders = {exchange.parent: exchange.own.lookup(self.cuts).tolist() for exchange in division.exchanges}
        self._paths = {rank: _path(tree, rank) for rank in tree.ranks}

    def _for_others(self, exchange: Exchange) -> Exchange:
        """Return what is exchanged below a parent for the owners that are not below it."""
        ranks, width = self._ranks[exchange.parent], exchange.holders.shape[1] + 1
        rows = [row for row in range(len(exchange.holders)) if exchange.bounds[row * width] // self._part not in ranks]
        bounds = [bound for row in rows for bound in exchange.bounds[row * width : (row + 1) * width]]
        return replace(exchange, holders=exchange.holders[rows], bounds=bounds)

    def collected(self) -> Transfers:
        """Return how each branch adds up what it has for owners outside."""
        return draw_exchanges(self._exchanges, self.cuts)

    def collected_loads(self) -> Iterator[tuple[Branch, float]]:
        """Yield what that puts on links, as parts of the data."""
        for row in self.collected():
            moved = sum(self.sizes[row.first : row.last])
            for branch in _below(self._paths[row.dst], self._paths[row.src]):
                yield branch, moved

    def in_turn(self) -> list[int]:
        """Return all pieces, those at the same place of their owners' parts one after another."""
        return sorted(range(len(self.owners)), key=lambda piece: (self.cuts[piece] % self._part, self.owners[piece]))

    def holder(self, branch: Branch, piece: int) -> tuple[int, int]:
        """Return the rank that has the branch's sum, and how many exchanges come before it has."""
        while len(branch.children) == 1:
            branch = branch.children[0]
        if not branch.children:
            return branch.ranks[0], 0
        return self._holders[branch.name][piece], self._heights[branch.name]

    def loads(self, piece: int, places: Places) -> Iterator[tuple[Branch, int]]:
        """Yield how many messages of the piece come down on links, on the way from the siblings to the owner."""
        num_coming = 0
        for level, place in zip(self.levels[self.owners[piece]], places, strict=True):
            num_coming += len(level.siblings)
            if place is not None:
                meeting = level.siblings[place]
                rank, _ = self.holder(meeting, piece)
                yield from ((branch, num_coming - 1) for branch in _from(meeting, self._paths[rank]))
                num_coming = 1
            yield level.entry, num_coming

    def way(self, piece: int, places: Places) -> Iterator[Transfer]:
        """Yield the messages of the piece from the siblings to the owner."""
        owner = self.owners[piece]
        coming: list[tuple[int, int]] = []
        for level, place in zip(self.levels[owner], places, strict=True):
            coming += [self.holder(sibling, piece) for sibling in level.siblings]
            if place is None:
                continue
            meeting, _ = self.holder(level.siblings[place], piece)
            ready = max(step for _, step in coming) + 1
            yield from (Transfer(at, rank, meeting, piece, piece + 1, True) for rank, at in coming if rank != meeting)
            coming = [(meeting, ready)]
        yield from (Transfer(at, rank, owner, piece, piece + 1, True) for rank, at in coming)


class _Search:
    """Finds for every piece where its sums meet; ``goal`` is how long a link may be busy for a byte of the data."""

    def __init__(self, pieces: _Pieces, goal: float) -> None:
        self._pieces = pieces
        self._goal = goal
        self._places: list[Places] = [(None,) * len(pieces.levels[owner]) for owner in pieces.owners]
        self._seconds: defaultdict[str, float] = defaultdict(float)
        for branch, amount in pieces.collected_loads():
            self._seconds[branch.name] += amount / branch.down
        for piece, places in enumerate(self._places):
            self._add(self._cost(piece, places))

    def run(self) -> list[Places]:
        """Improve one piece after another until none can be, or for a few passes."""
        order = self._pieces.in_turn()
        for _ in range(_MOST_PASSES):
            if not sum([self._improve(piece) for piece in order]):
                break
        return self._places

    def _cost(self, piece: int, places: Places) -> Mapping[str, float]:
        """Return how long the piece keeps links busy, on the way from the siblings to the owner."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for branch, count in self._pieces.loads(piece, places):
            seconds[branch.name] += count * self._pieces.sizes[piece] / branch.down
        return seconds

    def _add(self, seconds: Mapping[str, float], sign: int = 1) -> None:
        for name, more in seconds.items():
            self._seconds[name] += sign * more

    def _improve(self, piece: int) -> bool:
        """Take the best way for a piece that differs in one place, if it is better; whether it was."""
        places = self._places[piece]
        now = self._cost(piece, places)
        if all(self._seconds[name] <= self._goal for name in now):
            return False
        self._add(now, -1)
        costs = {other: self._cost(piece, other) for other in (places, *self._neighbours(piece, places))}
        best = min(costs, key=lambda other: self._excess(costs[other]))
        if self._excess(costs[best]) >= self._excess(now) - _LEAST_GAIN * self._goal**2:
            best = places
        self._add(costs[best])
        self._places[piece] = best
        return best != places

    def _neighbours(self, piece: int, places: Places) -> Iterator[Places]:
        for number, level in enumerate(self._pieces.levels[self._pieces.owners[piece]]):
            for place in (None, *range(len(level.siblings))):
                if place != places[number]:
                    yield (*places[:number], place, *places[number + 1 :])

    def _excess(self, added: Mapping[str, float]) -> float:
        """Return by how much the sum of squares beyond the goal grows."""
        seconds, goal = self._seconds, self._goal
        return sum(
            max(0.0, seconds[name] + more - goal) ** 2 - max(0.0, seconds[name] - goal) ** 2
            for name, more in added.items()
        )


def _weights(parent: Branch, bound: float, num_ranks: int) -> list[int]:
    """Return as small integers what may come down to the children within the bound beyond what their ranks own.

    None counts for much more than the next.
    """
    rooms = limited_by_the_next(
        [max(0.0, bound * child.down - len(child.ranks) / num_ranks) for child in parent.children]
    )
    if len(set(rooms)) == 1:
        return [1] * len(rooms)
    return [round(_WEIGHTS_PER_CHILD * len(rooms) * room / sum(rooms)) for room in rooms]


def _path(tree: Branch, rank: int) -> tuple[Branch, ...]:
    """Return the branches that the rank is in, the root first."""
    path = [tree]
    while path[-1].children:
        path.append(next(child for child in path[-1].children if rank in child.ranks))
    return tuple(path)


def _levels(tree: Branch, rank: int) -> Iterator[_Level]:
    path = _path(tree, rank)
    for parent, entry in pairwise(path):
        yield _Level(entry=entry, siblings=tuple(child for child in parent.children if child is not entry))


def _from(branch: Branch, path: Sequence[Branch]) -> Iterator[Branch]:
    return dropwhile(lambda other: other is not branch, path)


def _below(path: Sequence[Branch], other: Iterable[Branch]) -> Iterator[Branch]:
    names = {branch.name for branch in other}
    return (branch for branch in path if branch.name not in names)


def _in_rotation(rows: Sequence[Transfer], num_ranks: int) -> Transfers:
    """Let each rank send first to the next one, so that no receiver is hit by all at once."""
    return Transfers.of(sorted(rows, key=lambda row: (row.step, (row.dst - row.src) % num_ranks)))
