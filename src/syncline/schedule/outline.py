"""Plans of many ranks in outline: what links and ranks carry, without a list of transfers.

A collective along a tree is one *exchange* at each parent: its children, each of which holds the whole range among its
ranks, combine what they hold, atom by atom, and whoever holds a range below a child exchanges it for that child. So
nothing depends on more than what is below the parent, and what is asked of it from above. Subtrees that are alike in
both are one :class:`Part`, which is planned, priced and proved once, however many there are. 100,000 ranks in racks and
pods are a dozen parts, and of their millions of transfers none is written down.

What is predicted is what would be predicted of the transfers, to rounding. Ranks are counted in the order of the tree's
leaves. Places in the data are floats; two that differ by less than 1e-13 are one.

*Proof.* The verifier follows pieces of the data on their way among all ranks, as it follows the atoms of a draft. What
happens to a piece at a parent happens to all pieces of its kind at all parents that are alike. So some pieces stand for
all data, if at each parent they are of every kind, and if every class of ranks owns one of them; ranks are of one class
if they are in the same part at each level. Where that takes too many, the tree has little symmetry, and some are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from syncline.schedule.draft import Collective, Draft, lowest_terms
from syncline.schedule.replay import draw_words
from syncline.schedule.traffic import Floats, LinkTable, StepTraffic, sums
from syncline.schedule.transfers import BoolArray, IntArray, Transfers
from syncline.topology import DirectedLink, Node, Topology

Positions = npt.NDArray[np.int64]
Windows = tuple[int, int]
"""Into how many parts of owners the data falls, and how many windows each has."""

SCATTER, GATHER = 0, 1
_HALVES = {
    Collective.REDUCE_SCATTER: (SCATTER,),
    Collective.ALL_GATHER: (GATHER,),
    Collective.ALL_REDUCE: (SCATTER, GATHER),
}
MOST_PIECES = 128
"""That stand for all data; each is followed among all ranks."""
NUM_DRAWN = 16
_SAME_CUT = 1e-13
_FINEST = 1 << 53
"""Cuts are whole numbers of the exact denominator, or of this one where that is larger."""
_WITHIN = 0.381966
"""Where in its range a piece lies: where no other range ends."""
_SEED = 0xD4A0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Shape:
    """All subtrees that are alike: the link above them, what is below, and a mark of what else is the same."""

    up: float
    down: float
    latency_s: float
    mark: tuple[int, ...]
    children: tuple[Shape, ...]
    num_ranks: int


def shape_of(topology: Topology, mark: Callable[[Node], tuple[int, ...]]) -> Shape:
    """Return the tree of a topology, in which what is alike is the same; whoever has one child is one with it."""
    made = dict[Hashable, Shape]()

    def build(node: Node) -> Shape:
        link, children = node.link, tuple(map(build, node.children))
        rates = (link.up_bytes_per_s, link.down_bytes_per_s, link.latency_s) if link else (math.inf, math.inf, 0.0)
        own = mark(node)
        key = (rates, own, *map(id, children))
        if key not in made:
            made[key] = behind(*rates, children[0]) if len(children) == 1 else joined(children, *rates, mark=own)
        return made[key]

    return build(topology.root)


def behind(up: float, down: float, latency_s: float, shape: Shape) -> Shape:
    """Return a shape behind another link."""
    return replace(shape, up=min(up, shape.up), down=min(down, shape.down), latency_s=latency_s + shape.latency_s)


def joined(
    children: tuple[Shape, ...],
    up: float = math.inf,
    down: float = math.inf,
    latency_s: float = 0.0,
    *,
    mark: tuple[int, ...] = (),
) -> Shape:
    """Return what has these children, or is a rank if there are none."""
    num_ranks = sum(child.num_ranks for child in children) or 1
    return Shape(up=up, down=down, latency_s=latency_s, mark=mark, children=children, num_ranks=num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What each child of a parent sends and receives in each step: how many rows there are of each size."""

    sizes: Floats
    """As parts of the range that is exchanged."""
    sent: Floats
    """[steps, children, sizes], as are those that are received."""
    received: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Rows of a step between two children, at the end of a range and at the beginning of the next: they may be one."""

    step: int
    children: tuple[int, int]
    last: float
    first: float
    is_whole: bool
    """Whether both are one row, of the whole range."""


class _Exchange:
    """What the children of a parent do with a range that each of them holds, in either half, as a reduce-scatter.

    The range is cut into atoms of these ``sizes``, and each goes to the child that is its owner.
    """

    def __init__(self, num_children: int, sizes: Sequence[int], owners: Sequence[int]) -> None:
        self.num_children = num_children
        self.sizes = sizes
        self.owners: IntArray = np.array(owners, dtype=np.int32)
        self.upto: Floats = np.array([0, *accumulate(sizes)]) / sum(sizes)
        self.parts: Floats = np.bincount(self.owners, sizes, num_children) / sum(sizes)


class DirectExchange(_Exchange):
    """All children send to the owner, in one step: child k owns part k, of this weight."""

    def __init__(self, weights: Sequence[int]) -> None:
        owners = [child for child, weight in enumerate(weights) if weight]
        super().__init__(len(weights), [weights[child] for child in owners], owners)

    def profile(self, half: int) -> Profile:  # noqa: ARG002
        """Each child sends the others' parts, and receives its own of each of them."""
        sizes, which, counts = np.unique(self.sizes, return_inverse=True, return_counts=True)
        own = np.zeros((self.num_children, len(sizes)))
        own[self.owners, which] = 1.0
        sent, received = (counts - own)[None], (own * (self.num_children - 1))[None]
        return Profile(sizes=sizes / sum(self.sizes), sent=sent, received=received)

    def joins(self, half: int) -> Iterator[Join]:  # noqa: ARG002
        """With one owner, ranges that follow each other go the same way."""
        if len(self.owners) == 1:
            owner = int(self.owners[0])
            pairs = ((child, owner) for child in range(self.num_children) if child != owner)
            yield from (Join(step=0, children=pair, last=1.0, first=1.0, is_whole=True) for pair in pairs)

    def way(self, half: int, atom: int) -> tuple[Positions, Positions, Positions]:  # noqa: ARG002
        """Straight to the owner."""
        owner = self.owners[atom]
        sources = np.delete(np.arange(self.num_children), owner)
        return np.zeros_like(sources), sources, np.full_like(sources, owner)

    def longest_s(self, half: int, step: int, latencies: Floats) -> float:  # noqa: ARG002
        """Between an owner and the child that is furthest away."""
        second, first = np.partition(latencies, -2, axis=1)[:, -2:, None].swapaxes(0, 1)
        own = latencies[:, self.owners]
        furthest = latencies.argmax(axis=1)[:, None] == self.owners
        return float((own + np.where(furthest, second, first)).max())

    def kind(self, atom: int) -> Hashable:  # noqa: ARG002
        """All alike."""
        return "straight"


class DrawnExchange(_Exchange):
    """An exchange whose rows are drawn: those of each half among the children, each half as a reduce-scatter."""

    def __init__(
        self, num_children: int, sizes: Sequence[int], owners: Sequence[int], halves: tuple[Transfers, Transfers]
    ) -> None:
        super().__init__(num_children, sizes, owners)
        self.halves = halves

    @cached_property
    def _is_straight(self) -> BoolArray:
        """Whether all other children send an atom once, and to its owner, in both halves."""
        atoms, is_straight = np.arange(len(self.sizes)), np.ones(len(self.sizes), dtype=np.bool_)
        for rows in self.halves:
            sent, received = (np.zeros((self.num_children, len(self.sizes) + 1), dtype=np.int32) for _ in range(2))
            for counts, child in ((sent, rows.src), (received, rows.dst)):
                np.add.at(counts, (child, rows.first), 1)
                np.add.at(counts, (child, rows.last), -1)
                counts.cumsum(axis=1, out=counts)
            is_straight &= received[self.owners, atoms] == self.num_children - 1
            is_straight &= (sent[:, :-1] == (np.arange(self.num_children)[:, None] != self.owners)).all(axis=0)
        return is_straight

    def profile(self, half: int) -> Profile:
        """Count the rows."""
        rows = self.halves[half]
        sizes, which = np.unique(self._moved(half).round(15), return_inverse=True)
        num_steps = int(rows.step[-1]) + 1 if len(rows) else 0
        sent, received = (np.zeros((num_steps, self.num_children, len(sizes))) for _ in range(2))
        for counts, child in ((sent, rows.src), (received, rows.dst)):
            np.add.at(counts, (rows.step, child, which), 1.0)
        return Profile(sizes=sizes, sent=sent, received=received)

    @cached_property
    def moved(self) -> list[tuple[Floats, Floats]]:
        """What each child sends and receives in each half."""
        halves = [(rows, self._moved(half)) for half, rows in enumerate(self.halves)]
        return [
            (sums(rows.src, moved, self.num_children), sums(rows.dst, moved, self.num_children))
            for rows, moved in halves
        ]

    def _moved(self, half: int) -> Floats:
        rows = self.halves[half]
        moved: Floats = self.upto[rows.last] - self.upto[rows.first]
        return moved

    def joins(self, half: int) -> Iterator[Join]:
        """Find rows of the first and of the last atom between the same children."""
        rows, moved = self.halves[half], self._moved(half)
        ways = list(zip(rows.step.tolist(), rows.src.tolist(), rows.dst.tolist(), strict=True))
        at_end = {ways[row]: row for row in np.flatnonzero(rows.last == len(self.sizes)).tolist()}
        for row in np.flatnonzero(rows.first == 0).tolist():
            step, src, dst = ways[row]
            if ways[row] in at_end:
                end = at_end[ways[row]]
                last, first = float(moved[end]), float(moved[row])
                yield Join(step=step, children=(src, dst), last=last, first=first, is_whole=end == row)

    def way(self, half: int, atom: int) -> tuple[Positions, Positions, Positions]:
        """Pick the rows that the atom is in."""
        rows = self.halves[half]
        rows = rows.take((rows.first <= atom) & (rows.last > atom))
        return rows.step.astype(np.int64), rows.src.astype(np.int64), rows.dst.astype(np.int64)

    def longest_s(self, half: int, step: int, latencies: Floats) -> float:
        """Between children of which one sends to the other."""
        rows = self.halves[half].take(self.halves[half].step == step)
        pairs = set(zip(rows.src.tolist(), rows.dst.tolist(), strict=True))
        return max((float((latencies[:, src] + latencies[:, dst]).max()) for src, dst in pairs), default=0.0)

    def kind(self, atom: int) -> Hashable:
        """Those are alike that go straight to their owners."""
        return "straight" if self._is_straight[atom] else atom


LevelExchange = DirectExchange | DrawnExchange


class Part:
    """All subtrees of one shape at places that are alike, with the exchange at their top; a rank has none."""

    def __init__(
        self, latency_s: float, children: Sequence[Part] = (), draw: Callable[[], LevelExchange] | None = None
    ) -> None:
        self.latency_s = latency_s
        self.children = tuple(children)
        self.num_ranks: int = sum(child.num_ranks for child in children) or 1
        self.height: int = 1 + max(child.height for child in children) if children else 0
        self.begins: Positions = np.cumsum([0, *(child.num_ranks for child in children)])[:-1]
        self._draw = draw

    @cached_property
    def exchange(self) -> LevelExchange:
        """What is exchanged here."""
        assert self._draw is not None, "ranks exchange nothing"
        return self._draw()

    @cached_property
    def child_of(self) -> Positions:
        """The child that each rank is below."""
        return np.repeat(np.arange(len(self.children)), [child.num_ranks for child in self.children])

    @cached_property
    def held(self) -> Floats:
        """What each rank holds after the exchange, as a part of the data."""
        return self.held_below * self.exchange.parts[self.child_of] if self.children else np.ones(1)

    @cached_property
    def held_below(self) -> Floats:
        """What each rank holds before it."""
        return np.concatenate([child.held for child in self.children])

    @cached_property
    def latencies(self) -> Floats:
        """From each rank to the top."""
        return np.concatenate([child.latencies + child.latency_s for child in self.children] or [np.zeros(1)])

    @cached_property
    def starts(self) -> Floats:
        """Where the ranges begin that are exchanged: of each, one rank below each child holds all."""
        return _distinct([child.owned[0] for child in set(self.children)])

    @cached_property
    def widths(self) -> Floats:
        """How large they are."""
        return np.diff(self.starts, append=1.0)

    @cached_property
    def holders(self) -> IntArray:
        """Who holds them, [ranges, children]."""
        found = dict[Part, IntArray]()
        for child in dict.fromkeys(self.children):
            starts, holders = child.owned
            found[child] = holders[_places(starts, self.starts)]
        below: IntArray = np.stack([found[child] for child in self.children], axis=1)
        return (below + self.begins).astype(np.int32)

    @cached_property
    def bounds(self) -> Floats:
        """Where the atoms of each range begin, and the last ends, [ranges, atoms + 1]."""
        bounds: Floats = self.starts[:, None] + self.widths[:, None] * self.exchange.upto
        return bounds

    @cached_property
    def owned(self) -> tuple[Floats, IntArray]:
        """Where what the ranks hold after the exchange begins, and who holds it."""
        if not self.children:
            return np.zeros(1), np.zeros(1, dtype=np.int32)
        owners = self.holders[:, self.exchange.owners].reshape(-1)
        changes = np.flatnonzero(np.diff(owners, prepend=-1))
        return self.bounds[:, :-1].reshape(-1)[changes], owners[changes]

    @cached_property
    def denominator(self) -> int:
        """The least over which every cut is a whole number."""
        return math.lcm(*{child.denominator for child in self.children}) * sum(
            self.exchange.sizes if self.children else (1,)
        )

    def locate(self, place: float) -> tuple[int, int]:
        """Return the range, and the atom of the exchange, that a place in the data is in."""
        row = int(np.searchsorted(self.starts, place, "right")) - 1
        within = (place - self.starts[row]) / self.widths[row]
        atom = int(np.searchsorted(self.exchange.upto, within, "right")) - 1
        return row, min(max(atom, 0), len(self.exchange.sizes) - 1)

    def loads(self, half: int, windows: Windows | None) -> list[Floats]:
        """Return for each step what each rank sends and receives, and in how many messages: [3, ranks]."""
        profile, child = self.exchange.profile(half), self.child_of
        rows = profile.sent + profile.received
        sent, received = (
            self.held_below * (each @ profile.sizes)[:, child] for each in (profile.sent, profile.received)
        )
        if windows is None:
            counts = np.bincount(self.holders.reshape(-1), minlength=self.num_ranks)
            messages = counts * rows.sum(axis=2)[:, child]
        else:
            few = self._in_few_windows(profile.sizes, windows)
            messages = windows[0] * (sent + received) + (few * rows[:, child]).sum(axis=2) / windows[1]
        for join in self.exchange.joins(half):
            messages[join.step] -= self._joined(join, windows)
        return list(np.stack([sent, received, messages], axis=1))

    def _in_few_windows(self, sizes: Floats, windows: Windows) -> Floats:
        """Return of the ranges that each rank holds, for each size, how far rows are from having a part in a window."""
        ranks = self.holders.reshape(-1)
        of_size = []
        for size in sizes.tolist():
            few = np.maximum(0.0, 1 - windows[0] * size * self.widths)
            of_size.append(sums(ranks, np.repeat(few, len(self.children)), self.num_ranks))
        return np.stack(of_size, axis=1)

    def _joined(self, join: Join, windows: Windows | None) -> Floats:
        """Return how many messages of each rank are spared where rows of ranges that follow each other are one."""
        held = self.holders[:, join.children]
        joins = (held[1:] == held[:-1]).all(axis=1)
        spared = joins.astype(np.float64)
        if windows is not None:
            last, first = (self.widths * windows[0] * size for size in (join.last, join.first))
            if join.is_whole:  # so that a row goes on for as long as its ends are the same
                upto = np.cumsum(last)
                begun = np.maximum.accumulate(np.where(joins, 0.0, upto[:-1]))
                last = np.append(upto[:-1] - np.append(0.0, begun[:-1]), 0.0)
            few, others, together = (
                np.maximum(0.0, 1 - each) for each in (last[:-1], first[1:], last[:-1] + first[1:])
            )
            spared = joins * (few + others - together) / windows[1]
        return sums(held[1:].reshape(-1), np.repeat(spared, 2), self.num_ranks)

    def longest_s(self, half: int, step: int) -> float:
        """Return the longest way of a step."""
        return self.exchange.longest_s(half, step, self.latencies[self.holders]) if self.latencies.any() else 0.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Outline:
    """A draft of a collective along a tree that is not drawn: of each class of subtrees what one does.

    ``order`` are the ranks in the order of the tree's leaves.
    """

    collective: Collective
    planner: str
    order: IntArray
    root: Part

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.root.num_ranks

    @property
    def num_atoms(self) -> int:
        """Number of the atoms that the children of the root exchange; no cut lies within one."""
        return len(self.root.starts) * len(self.root.exchange.sizes)

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return sum(sum(self._lengths(half)) for half in _HALVES[self.collective])

    @cached_property
    def num_messages(self) -> int:
        """Number of transfers."""
        return round(self.count_messages(None))

    @property
    def shares(self) -> tuple[float, ...]:
        """The part of the data that each rank owns."""
        shares = np.zeros(self.num_ranks)
        shares[self.order] = self.root.held
        return tuple(shares.tolist())

    @cached_property
    def num_owned(self) -> int:
        """In how many parts the data is owned."""
        return len(self.root.owned[0])

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """All parts that have exchanges, parents before children."""
        found = dict[Part, None]()

        def visit(part: Part) -> None:
            if part.children and part not in found:
                found[part] = None
                for child in dict.fromkeys(part.children):
                    visit(child)

        visit(self.root)
        return tuple(sorted(found, key=lambda part: -part.height))

    @cached_property
    def bases(self) -> Mapping[Part, Positions]:
        """Where the ranks of all subtrees that are a part begin."""
        begins: dict[Part, list[Positions]] = {part: [] for part in self.parts}
        begins[self.root] = [np.zeros(1, dtype=np.int64)]
        found = dict[Part, Positions]()
        for part in self.parts:
            found[part] = np.concatenate(begins[part])
            for child, begin in zip(part.children, part.begins, strict=True):
                if child.children:
                    begins[child].append(found[part] + begin)
        return found

    def _lengths(self, half: int) -> list[int]:
        """Return how many steps the exchanges of each height take."""
        longest = [0] * self.root.height
        for part in self.parts:
            longest[part.height - 1] = max(longest[part.height - 1], len(part.exchange.profile(half).sent))
        return longest

    def count_messages(self, num_windows: int | None) -> float:
        """Return how many messages there are in a slice, or in a round of windows."""
        windows = None if num_windows is None else (self.num_owned, num_windows)
        return sum(
            len(self.bases[part]) * float(load[2].sum()) / 2
            for half in _HALVES[self.collective]
            for part in self.parts
            for load in part.loads(half, windows)
        )

    def link_bytes(self, topology: Topology, num_bytes: int) -> Mapping[DirectedLink, int]:
        """Return the bytes that cross each directed link when ``num_bytes`` go through."""
        table = LinkTable.of(topology)
        loads = sum(step.links for step in self.traffic(table, None)) * num_bytes
        return dict(zip(table.links, np.rint(loads).astype(np.int64).tolist(), strict=True))

    def traffic(self, table: LinkTable, num_windows: int | None) -> Iterator[StepTraffic]:
        """Yield what each step moves; ``num_windows``: of each owner's part, where slices are windows."""
        windows = None if num_windows is None else (self.num_owned, num_windows)
        above = table.ancestors[self.order]
        num_below = np.bincount(above[above >= 0], minlength=table.num_pairs)

        def across(moved: Floats, reach: Floats) -> Floats:
            """Return what crosses the links from each rank up to what has so many ranks below."""
            crossed = (above >= 0) & (num_below[above] <= reach[:, None])
            amounts = np.broadcast_to(moved[:, None], above.shape)[crossed]
            return sums(above[crossed], amounts, table.num_pairs)

        for half in _HALVES[self.collective]:
            loads = self._loads(self.root, half, windows, {})
            longest_s = self._longest_s(half)
            for step in sorted(loads, reverse=half == GATHER):
                sent, received, messages, reach = loads[step]
                ways = (sent, received) if half == SCATTER else (received, sent)
                yield StepTraffic(
                    links=np.concatenate([across(way, reach) for way in ways]),
                    messages=messages,
                    handled=sent + received + (received if half == SCATTER else 0.0),
                    latency_s=longest_s[step],
                )

    def _loads(
        self, part: Part, half: int, windows: Windows | None, known: dict[Part, dict[tuple[int, int], Floats]]
    ) -> dict[tuple[int, int], Floats]:
        """Return the loads of a part and all below, by height and step, and how many ranks are below each child."""
        if part in known or not part.children:
            return known.get(part, {})
        below = [(self._loads(child, half, windows, known), np.zeros((4, child.num_ranks))) for child in part.children]
        steps = dict.fromkeys(step for loads, _ in below for step in loads)
        found = {step: np.concatenate([loads.get(step, none) for loads, none in below], axis=1) for step in steps}
        reach = np.array([child.num_ranks for child in part.children])[part.child_of]
        for step, load in enumerate(part.loads(half, windows)):
            if load[0].any():
                found[part.height, step] = np.concatenate([load, reach[None]])
        known[part] = found
        return found

    def _longest_s(self, half: int) -> Mapping[tuple[int, int], float]:
        """Return the longest way of each step."""
        longest = dict[tuple[int, int], float]()
        for part in self.parts:
            for step in range(len(part.exchange.profile(half).sent)):
                key = part.height, step
                longest[key] = max(longest.get(key, 0.0), part.longest_s(half, step))
        return longest

    def pieces(self, places: Sequence[float]) -> Draft:
        """Return the draft of the data at these places alone, each of which is one atom of it."""
        halves = [self._ways(half, places) for half in _HALVES[self.collective]]
        if self.collective is not Collective.REDUCE_SCATTER:
            halves[-1] = halves[-1].reversed()
        if len(halves) == 2:
            halves[1] = halves[1].shifted(sum(self._lengths(SCATTER)))
        at = [self.root.locate(place) for place in places]
        owners = [self.root.holders[row, self.root.exchange.owners[atom]] for row, atom in at]
        return Draft(
            collective=self.collective,
            num_ranks=self.num_ranks,
            cuts=tuple(range(len(places) + 1)),
            transfers=Transfers.concatenate(halves),
            owners=self.order[owners],
            planner=self.planner,
        )

    def _ways(self, half: int, places: Sequence[float]) -> Transfers:
        """Return the rows of a half, as a reduce-scatter, at these places."""
        begins = [0, *accumulate(self._lengths(half))]
        found = []
        for part in self.parts:
            ranks = self.order[self.bases[part][:, None] + np.arange(part.num_ranks)]
            for number, place in enumerate(places):
                row, atom = part.locate(place)
                steps, sources, destinations = part.exchange.way(half, atom)
                holders = part.holders[row]
                size = len(ranks) * len(steps)
                found.append(
                    Transfers(
                        step=np.tile(begins[part.height - 1] + steps, len(ranks)),
                        src=ranks[:, holders[sources]].reshape(-1),
                        dst=ranks[:, holders[destinations]].reshape(-1),
                        first=np.full(size, number),
                        last=np.full(size, number + 1),
                        add=np.ones(size, dtype=np.bool_),
                    )
                )
        return Transfers.concatenate(found).in_order()

    def drawn(self) -> Draft:
        """Return the draft, with all transfers; of exchanges that are drawn alone."""
        (half,) = _HALVES[self.collective]
        begins = [0, *accumulate(self._lengths(half))]
        cuts = _distinct([part.bounds.reshape(-1) for part in self.parts])
        rows = Transfers.concatenate(
            [
                _rows(
                    part.exchange.halves[half].shifted(begins[part.height - 1]),
                    self.order[self.bases[part][:, None, None] + part.holders].reshape(-1, len(part.children)),
                    np.tile(_places(cuts, part.bounds), (len(self.bases[part]), 1)),
                )
                for part in self.parts
                if isinstance(part.exchange, DrawnExchange)
            ]
        )
        rows = rows.in_order().merged()
        starts, owners = self.root.owned
        sizes = np.diff(_places(cuts, starts), append=len(cuts) - 1)
        return Draft(
            collective=self.collective,
            num_ranks=self.num_ranks,
            cuts=lowest_terms(np.rint(cuts * min(self.root.denominator, _FINEST)).astype(np.int64).tolist()),
            transfers=rows.reversed() if half == GATHER else rows,
            owners=self.order[np.repeat(owners, sizes)],
            planner=self.planner,
        )

    @cached_property
    def standing(self) -> tuple[tuple[float, ...], bool]:
        """Places in the data, and whether they stand for all of it, as the module says; else they are drawn."""
        drawn = (draw_words(NUM_DRAWN, seed=_SEED) >> np.uint64(11)) / 2.0**53
        ranks = _one_of_each_class(self.root)
        if len(ranks) > MOST_PIECES:
            return tuple(drawn.tolist()), False
        starts, owners = self.root.owned
        owned = [int(np.argmax(owners == rank)) for rank in ranks if (owners == rank).any()]
        ends = np.append(starts, 1.0)
        places = [float(ends[number] + _WITHIN * (ends[number + 1] - ends[number])) for number in owned]
        seen = {part.exchange: set[Hashable]() for part in self.parts}

        def see(place: float) -> None:
            for part in self.parts:
                seen[part.exchange].add(part.exchange.kind(part.locate(place)[1]))

        for place in places:
            see(place)
        for part in self.parts:
            for atom in range(len(part.exchange.sizes)):
                if part.exchange.kind(atom) not in seen[part.exchange]:
                    begin, end = part.starts[0] + part.widths[0] * part.exchange.upto[atom : atom + 2]
                    places.append(float(begin + _WITHIN * (end - begin)))
                    see(places[-1])
        return (tuple(places), True) if len(places) <= MOST_PIECES else (tuple(drawn.tolist()), False)


def _one_of_each_class(part: Part) -> list[int]:
    """Return a rank of each class that owns anything: of children that are alike the one that owns the most."""
    if not part.children:
        return [0]
    chosen = dict[Part, int]()
    for number, child in enumerate(part.children):
        if child not in chosen or part.exchange.parts[number] > part.exchange.parts[chosen[child]]:
            chosen[child] = number
    return [int(part.begins[number]) + rank for child, number in chosen.items() for rank in _one_of_each_class(child)]


def _distinct(cuts: Sequence[Floats]) -> Floats:
    """Return all cuts in order; of those that are one the first."""
    every = np.unique(np.concatenate(cuts))
    return every[np.diff(every, prepend=-1.0) > _SAME_CUT]


def _places(cuts: Floats, wanted: Floats) -> IntArray:
    """Return the number of the cut that each is, or is behind."""
    return (np.searchsorted(cuts, wanted + _SAME_CUT, "right") - 1).astype(np.int32)


def _rows(rows: Transfers, holders: IntArray, places: IntArray) -> Transfers:
    """Return the rows of an exchange for each of its ranges."""
    return Transfers(
        step=np.broadcast_to(rows.step, (len(holders), len(rows))).reshape(-1),
        src=holders[:, rows.src].reshape(-1),
        dst=holders[:, rows.dst].reshape(-1),
        first=places[:, rows.first].reshape(-1),
        last=places[:, rows.last].reshape(-1),
        add=np.ones(len(holders) * len(rows), dtype=np.bool_),
    )
