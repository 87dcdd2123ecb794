"""Spares: a second owner of each range, on another host or in another rack, that is sent the finished sum too.

A sharded step with one owner for each range loses the state of a rank with the rank. A *spare* keeps the same state and
makes the same steps. What that moves more is nothing: the all-gather takes new parameters from the owner to the spare
sooner or later, and the reduce-scatter takes the sum there instead. Of each atom the all-gather is a tree that grows
from the owner; the way from the owner to the spare is

    owner -> a -> b -> spare    and becomes    spare -> b -> a    (and whatever a, b and the spare send on, as before)

while the reduce-scatter ends with owner -> spare. So each link carries what it carried in both halves together, but for
the links of a, b and the spare themselves, which change places. Sums are made once, so both owners have the same bits.

Who is the spare: the owners stand around a circle, those of one part of the topology side by side, each with an arc as
long as what it owns, and the spare of a point is the owner across the circle. So a rank is spare for as much as it
owns, and has the ranges of one or two others. Where one part owns more than half, its arc is laid over the others', and
theirs over its own. Complexity: O(ranks x atoms).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Literal, TypeVar

import numpy as np

from syncline.errors import ScheduleError
from syncline.schedule.cost import DEFAULT_SLICE_BYTES, CostModel, Pair, drawn, predict_pair
from syncline.schedule.draft import Draft, check_plannable, cut_further, shares_in
from syncline.schedule.in_trees import RESOLUTION, Owners
from syncline.schedule.levelled_step import Known
from syncline.schedule.step_candidates import MAY_TAKE, Candidate, Portions, draft_sharded_steps
from syncline.schedule.transfers import IntArray, Transfers
from syncline.topology import Node, Switch, Topology
from syncline.topology.tree import ranks_below

Apart = Literal["rack", "host", "rank"]
"""In what an owner and its spare differ: a machine that fails takes a rank or a host, a switch a rack."""
MOST_OF_ONE = 2 / 3
"""What one rack may own of everything where spares are in other racks: ranks elsewhere hold three times their own."""
_ABOUT_HALF = 0.55
"""What one host may own of a group of near ones, whose ranks then hold about twice their own."""
_Owned = TypeVar("_Owned", int, float)
Parts = dict[str, dict[int, int]]
"""Of each part of the topology what each of its owners owns, in the topology's order."""


def ways_apart(topology: Topology, shares: Sequence[float]) -> tuple[Apart, ...]:
    """Return what spares can be apart by, the best first; nothing if one rank owns everything.

    In other racks where there are several and none owns more than two thirds; on other hosts where there are several.

    >>> ways_apart(Topology.load("two-racks-5-3"), [1 / 8] * 8)
    ('rack', 'host')
    >>> ways_apart(Topology.parse("{host: a, ranks: 2}"), [0.5, 0.5])
    ('rank',)
    """
    owned = dict(enumerate(shares))
    parts = {apart: _parts_of(topology, owned, apart) for apart in ("rack", "host", "rank")}
    most = max((sum(part.values()) for part in parts["rack"].values()), default=0.0)
    ways: list[Apart] = []
    if 1 < len(parts["rack"]) < len(parts["host"]) and most <= MOST_OF_ONE * sum(shares):
        ways.append("rack")
    if len(parts["host"]) > 1:
        ways.append("host")
    elif len(parts["rank"]) > 1:
        ways.append("rank")
    return tuple(ways)


def spares_of(topology: Topology, owners: Owners, apart: Apart) -> Owners:
    """Return who is the spare of the data from its beginning to its end, in the form of ``owners``.

    Raises :class:`ScheduleError` where all owners are in one part.

    >>> spares_of(Topology.flat(4), [(0, 1), (1, 1), (2, 1), (3, 1)], "host")
    ((2, 4096), (3, 4096), (0, 4096), (1, 4096))
    """
    fineness = -(-RESOLUTION // sum(weight for _, weight in owners))
    runs = [(rank, weight * fineness) for rank, weight in owners if weight]
    circles = _Circles(topology, runs, apart)
    found = [run for circle, start, stop in circles.places(runs) for run in circle.across(start, stop)]
    joined = groupby(found, key=lambda run: run[0])
    return tuple((rank, sum(weight for _, weight in same)) for rank, same in joined)


def spare_of_each(topology: Topology, owners: Owners, shares: Sequence[float], apart: Apart) -> tuple[int, ...]:
    """Return one spare for each range, where ranges are not divided; ``shares`` say who is to have how much.

    >>> spare_of_each(Topology.flat(4), [(0, 5), (3, 7), (1, 6), (0, 8)], [0.25] * 4, "host")
    (2, 1, 3, 2)
    """
    circles = _Circles(topology, [(rank, round(share * RESOLUTION**2)) for rank, share in enumerate(shares)], apart)
    total, had, found = Counter[int](), Counter[int](), []
    for rank, weight in owners:
        total[rank] += weight
    for rank, weight in owners:
        circle, start, stop = circles.arc_of(rank)
        middle = start + (stop - start) * (2 * had[rank] + weight) // (2 * max(1, total[rank]))
        found.append(circle.across(min(middle, stop - 1), stop)[0][0])
        had[rank] += weight
    return tuple(found)


def add_spares(pair: Pair, spares: Owners) -> Pair:
    """Return a reduce-scatter that ends at owners and spares, and the all-gather from both.

    ``spares`` say who is the spare of the data from its beginning to its end, as :func:`spares_of` does; both drafts
    have one row of owners, and each rank receives each atom of the all-gather once. Cuts are added where spares change.
    """
    cuts, spare = _cut_at_spares(pair[0], spares)
    scatter, gather = (cut_further(half, cuts) for half in pair)
    owners = np.stack([scatter.owners[0], spare])
    return (
        replace(scatter, owners=owners, transfers=_hand_on(scatter, spare)),
        replace(gather, owners=owners, transfers=_gather_from_both(gather, spare)),
    )


def spare_shares(draft: Draft) -> tuple[float, ...]:
    """Return the part of the data that each rank is the spare of."""
    return shares_in(draft, slice(1, None))


def owners_of(draft: Draft) -> Owners:
    """Return the owners of a draft's data from its beginning to its end, with integer weights."""
    sizes = [last - first for first, last in pairwise(draft.cuts)]
    return tuple(zip(draft.owners[0].tolist(), sizes, strict=True))


def part_of(topology: Topology, rank: int, apart: Apart) -> str:
    """Return the name of the rack, the host or the rank itself; a host that hangs on no rack is one by itself."""
    host = topology.host_of(rank)
    if apart == "rank":
        return f"rank {rank}"
    rack = topology.parent_of(host.name) if apart == "rack" else None
    return rack.name if rack is not None and rack is not topology.root else host.name


def _parts_of(topology: Topology, owned: Mapping[int, _Owned], apart: Apart) -> dict[str, dict[int, _Owned]]:
    """Return what each owner owns, by the part that it is in, in the topology's order."""
    parts: dict[str, dict[int, _Owned]] = {}
    for rank in filter(owned.get, ranks_below(topology.root)):
        parts.setdefault(part_of(topology, rank, apart), {})[rank] = owned[rank]
    return parts


class _Circles:
    """Owners around circles; spares in other racks need one for all, others are as near as can be."""

    def __init__(self, topology: Topology, owners: Owners, apart: Apart) -> None:
        owned = Counter[int]()
        for rank, weight in owners:
            owned[rank] += weight
        parts = _parts_of(topology, owned, apart)
        if len(parts) < 2:
            raise ScheduleError(
                f"a spare is in another {apart} than the owner, and all owners are in {next(iter(parts), 'none')!r}; "
                "take more hosts, or no spares"
            )
        groups = _near_groups(topology, parts) if apart == "host" else [parts]
        self._owned = owned
        self._circle_of = {
            rank: circle
            for group in groups
            for circle in [_Circle.of(group)]
            for part in group.values()
            for rank in part
        }

    def arc_of(self, rank: int) -> tuple[_Circle, int, int]:
        """Return the circle that an owner stands around, and where its arc begins and ends."""
        circle = self._circle_of[rank]
        return circle, circle.starts[rank], circle.starts[rank] + self._owned[rank]

    def places(self, owners: Owners) -> Iterator[tuple[_Circle, int, int]]:
        """Yield where the ranges of ``owners`` lie, in their order."""
        ends = Counter({rank: circle.starts[rank] for rank, circle in self._circle_of.items()})
        for rank, weight in owners:
            ends[rank] += weight
            yield self._circle_of[rank], ends[rank] - weight, ends[rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Circle:
    """Where the arc of each owner begins, and all of the circle in pieces: start, stop, and the spare of that."""

    starts: dict[int, int]
    pieces: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, parts: Parts) -> _Circle:
        """Put the owners around it, the part that owns most first."""
        in_order = sorted(parts.values(), key=lambda part: -sum(part.values()))  # stable: else as in the topology
        largest = sum(in_order[0].values())
        order = [rank for part in in_order for rank in part]
        bounds = [0, *accumulate(weight for part in in_order for weight in part.values())]
        spans = (_turned if 2 * largest <= bounds[-1] else _laid_over)(bounds, largest)
        pieces = sorted((start, stop, order[place]) for place, start, stop in spans if start < stop)
        return cls(starts=dict(zip(order, bounds, strict=False)), pieces=tuple(pieces))

    def across(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return who is across [start, stop), and how much of it each."""
        return [
            (spare, min(stop, last) - max(start, first))
            for first, last, spare in self.pieces
            if max(start, first) < min(stop, last)
        ]


def _near_groups(topology: Topology, hosts: Parts) -> list[Parts]:
    """Divide hosts into groups, below one switch each if it can be, of which none owns much more than half."""
    groups: list[Parts] = []

    def visit(node: Node) -> Parts:
        """Return the hosts below that are in no group yet."""
        if not isinstance(node, Switch):
            return {node.name: hosts[node.name]} if node.name in hosts else {}
        left = {name: part for child in node.children for name, part in visit(child).items()}
        if not _is_even(left):
            return left
        groups.append(left)
        return {}

    left = visit(topology.root)
    while left and groups and not _is_even(left):
        left |= groups.pop()
    return [*groups, left] if left else groups


def _is_even(parts: Parts) -> bool:
    sizes = [sum(part.values()) for part in parts.values()]
    return len(sizes) > 1 and max(sizes) <= _ABOUT_HALF * sum(sizes)


def _turned(bounds: Sequence[int], largest: int) -> Iterator[tuple[int, int, int]]:
    """Yield for each arc what it is across: the circle turned by about a half, from one owner to another if it can."""
    total = bounds[-1]
    fitting = [bound for bound in bounds if largest <= bound <= total - largest]
    turn = min(fitting, key=lambda bound: (abs(2 * bound - total), bound), default=total // 2)
    for place, (first, last) in enumerate(pairwise(bounds)):
        for lap in (0, total):
            yield place, max(0, first - turn + lap), min(total, last - turn + lap)


def _laid_over(bounds: Sequence[int], largest: int) -> Iterator[tuple[int, int, int]]:
    """Yield the same where the first part owns more than all others: it is stretched over them, and they over it."""
    rest = bounds[-1] - largest
    for place, (first, last) in enumerate(pairwise(bounds)):
        if first < largest:
            yield place, largest + first * rest // largest, largest + last * rest // largest
        else:
            yield place, (first - largest) * largest // rest, (last - largest) * largest // rest


def _cut_at_spares(draft: Draft, spares: Owners) -> tuple[list[int], IntArray]:
    """Return a draft's cuts with those where spares change, and the spare of each atom between them."""
    runs = [(rank, weight) for rank, weight in spares if weight]
    ends = [0, *accumulate(weight for _, weight in runs)]
    whole = math.lcm(ends[-1], draft.denominator)
    borders = [end * (whole // ends[-1]) for end in ends]
    cuts = sorted({*borders, *(cut * (whole // draft.denominator) for cut in draft.cuts)})
    number = {cut: place for place, cut in enumerate(cuts)}
    of_run = np.repeat([rank for rank, _ in runs], np.diff([number[border] for border in borders]))
    return cuts, of_run.astype(np.int32)


def _hand_on(scatter: Draft, spare: IntArray) -> Transfers:
    """Let each owner send its sum on to the spare, as soon as it has it."""
    rows, owner = _by_atom(scatter.transfers), scatter.owners[0]
    ready = np.zeros(scatter.num_atoms, dtype=np.int32)
    comes = rows.dst == owner[rows.first]
    np.maximum.at(ready, rows.first[comes], rows.step[comes] + np.int32(1))
    atoms = np.arange(scatter.num_atoms, dtype=np.int32)
    is_copy = np.zeros(scatter.num_atoms, dtype=np.bool_)
    handed = Transfers(step=ready, src=owner, dst=spare, first=atoms, last=atoms + np.int32(1), add=is_copy)
    return Transfers.concatenate([scatter.transfers, handed.in_order().merged()]).in_order()


def _gather_from_both(gather: Draft, spare: IntArray) -> Transfers:
    """Let the tree of each atom grow from the owner and the spare: the way between them is turned round, or ends."""
    rows, owner = _by_atom(gather.transfers), gather.owners[0]
    atoms = np.arange(gather.num_atoms)
    row_of = np.full((gather.num_ranks, gather.num_atoms), -1, dtype=np.int64)
    row_of[rows.dst, rows.first] = np.arange(len(rows))
    if len(rows) != (gather.num_ranks - 1) * gather.num_atoms or np.count_nonzero(row_of < 0) != gather.num_atoms:
        raise ScheduleError(
            f"each rank is to be sent each atom once, but the {gather.planner}'s all-gather has {len(rows)} transfers "
            f"of {gather.num_atoms} atoms among {gather.num_ranks} ranks; plan spares for another one"
        )
    step, src, dst = rows.step.copy(), rows.src.copy(), rows.dst.copy()
    way, at, length = [], spare, np.zeros(gather.num_atoms, dtype=np.int32)
    while (on_way := at != owner).any():
        way.append(np.where(on_way, row_of[at, atoms], -1))
        length += on_way
        at = np.where(on_way, rows.src[way[-1]], at)
    from_owner = np.stack(way)[length - 1, atoms]
    for place, of_atoms in enumerate(way):
        is_turned = length - 1 > place
        turned, left = of_atoms[is_turned], length[is_turned] - 2 - place
        step[turned] = step[from_owner[is_turned]] - left
        src[turned], dst[turned] = dst[turned], src[turned]
    kept = np.ones(len(rows), dtype=np.bool_)
    kept[from_owner] = False
    left_over = replace(rows, step=step, src=src, dst=dst).take(kept)
    numbers = np.unique(left_over.step, return_inverse=True)[1].astype(np.int32)
    return replace(left_over, step=numbers).in_order().merged()


def _by_atom(rows: Transfers) -> Transfers:
    """Return a row for each atom of each transfer, in the same order."""
    lengths = rows.last - rows.first
    wide = rows.take(np.repeat(np.arange(len(rows)), lengths))
    starts = np.cumsum(lengths) - lengths
    first = wide.first + (np.arange(len(wide)) - np.repeat(starts, lengths)).astype(np.int32)
    return replace(wide, first=first, last=first + np.int32(1))


# Which spares a step has: in another rack where that costs little, else on another host as near as can be.


_MOST_TRIED = 4
"""Of the candidates for a step without spares, the fastest first."""


def draft_with_spares(
    topology: Topology,
    num_bytes: int,
    *,
    most: Sequence[float] | None = None,
    portions: Portions = "balanced",
    spares: int = 0,
    apart: Apart | None = None,
    slice_bytes: int = DEFAULT_SLICE_BYTES,
    cost: CostModel | None = None,
    known: Known | None = None,
) -> tuple[Candidate, Apart | None, list[Candidate]]:
    """Return the drafts of a step, what owners and spares are apart by, and all that were compared without spares.

    Arguments and errors are those of :func:`plan_sharded_step`, and ``known`` of :func:`draft_sharded_steps`.
    """
    if spares not in (0, 1):
        raise ScheduleError(f"each range has one spare or none, not {spares}")
    has_spares = spares == 1 and len(topology.speakers) > 1
    if has_spares:
        check_plannable(topology)
    own = [limit / 2 for limit in most] if most is not None and has_spares else most
    candidates = draft_sharded_steps(
        topology, num_bytes, most=own, portions=portions, slice_bytes=slice_bytes, cost=cost, known=known
    )
    if not has_spares:
        return candidates[0], None, candidates
    chosen, way = choose_spares(
        candidates, topology, num_bytes, most=most, slice_bytes=slice_bytes, cost=cost, apart=apart
    )
    return chosen, way, candidates


def choose_spares(
    candidates: Sequence[Candidate],
    topology: Topology,
    num_bytes: int,
    *,
    most: Sequence[float] | None = None,
    slice_bytes: int = DEFAULT_SLICE_BYTES,
    cost: CostModel | None = None,
    apart: Apart | None = None,
) -> tuple[Candidate, Apart]:
    """Return the fastest of some candidates with spares, and what owners and spares are apart by.

    That is other racks, where there are any and the step takes at most a tenth longer than with spares on the nearest
    other hosts; other hosts; and where there is one host, other ranks. ``apart`` asks for one of these
    where the owners allow it. ``most``: what
    each rank may hold, spares included. Raises :class:`ScheduleError` where nothing fits.
    """
    found: dict[Apart, Candidate] = {}
    fullest = ""
    for (pair, _), way in _tried(candidates, topology, apart):
        both = drawn(pair)
        with_spares = add_spares(both, spares_of(topology, owners_of(both[0]), way))
        full = _full_rank(both[0].shares, spare_shares(with_spares[0]), most)
        if full is not None:
            fullest = fullest or full
            continue
        prediction = predict_pair(with_spares, topology, num_bytes, slice_bytes, cost)
        if way not in found or prediction.time_s < found[way][1].time_s:
            found[way] = with_spares, prediction
    if not found:
        raise ScheduleError(f"there are no spares of these ranges: {fullest or 'one rank owns everything'}")
    nearest: Apart = next(way for way in ("host", "rank", "rack") if way in found)
    if "rack" in found and found["rack"][1].time_s <= MAY_TAKE * found[nearest][1].time_s:
        return found["rack"], "rack"
    return found[nearest], nearest


def _tried(
    candidates: Sequence[Candidate], topology: Topology, apart: Apart | None
) -> Iterator[tuple[Candidate, Apart]]:
    for candidate in candidates[:_MOST_TRIED]:
        ways = ways_apart(topology, candidate[0][0].shares)
        for way in (apart,) if apart in ways else ways:
            yield candidate, way


def _full_rank(owned: Sequence[float], spared: Sequence[float], most: Sequence[float] | None) -> str | None:
    """Say which rank would hold more than it has memory for; None if all have room."""
    for rank, (own, spare, limit) in enumerate(zip(owned, spared, most or [2.0] * len(owned), strict=True)):
        if own + spare > limit + 2 / RESOLUTION:
            return (
                f"rank {rank} would hold {own:.4g} of everything and be the spare of {spare:.4g}, but may hold "
                f"{limit:.4g}; give its host more memory, take more hosts, or no spares"
            )
    return None
