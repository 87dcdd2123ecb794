"""The planner of a sharded step with replicas: each range has an owner in each of them.

Gradients are summed to one owner in each replica, those owners sum among themselves, and after the step each replica
gathers inside itself. Candidates are the all-reduces of all planners, cut at the replicas
(:mod:`syncline.schedule.replicas`), and steps whose owners in each replica come from the linear programme of a sharded
step (:mod:`syncline.schedule.step_flow`), where what an owner exchanges with other replicas loads its links as well:

    inside each replica     in-trees to its owners                              (first part, under the backward pass)
    between replicas        an all-reduce of the tree whose leaves they are     (first part)
    inside each replica     trees from its owners                               (second part, after the step)

Each replica is solved by itself, and once more with the times of the slowest, which all have. The least predicted sum
of both parts wins. Nothing is proved here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from syncline.errors import ScheduleError
from syncline.schedule.cost import ABOUT_EQUAL, DEFAULT_SLICE_BYTES, Pair, Prediction, drawn, predict, supposed_network
from syncline.schedule.draft import Collective, Draft, check_plannable, cut_further, lowest_terms, shares_in
from syncline.schedule.in_trees import draft_with_owners, weights_of_shares
from syncline.schedule.ownership import speaking
from syncline.schedule.planners import draft_all
from syncline.schedule.replicas import Replicas, draft_in_replicas, levels_of
from syncline.schedule.step_candidates import BALANCED, Cap, draft_sharded_steps, fits
from syncline.schedule.step_flow import STEP, StepFlow, solve_step_flow
from syncline.schedule.traffic import shares
from syncline.schedule.transfers import IntArray, Transfers
from syncline.topology import Host, Link, Node, Rank, Switch, Topology
from syncline.topology.tree import walk

_ATOMS_PER_RANK = (1, 2, 4)
_MOST_TRANSFERS = 1 << 17
_MAY_LOSE = 1.01
"""How much longer than the plain step a choice may take in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStep:
    """The drafts of a step with replicas, and how long they take: under the backward pass, and after the step."""

    replicas: Replicas
    pair: Pair
    within: Prediction
    after: Prediction

    @property
    def time_s(self) -> float:
        """Both parts, where nothing hides the first."""
        return self.within.time_s + self.after.time_s

    @property
    def shares(self) -> tuple[float, ...]:
        """The part of the data that each rank owns; they sum to the number of replicas."""
        return shares_in(self.pair[0], slice(None))


def draft_replicas(
    topology: Topology,
    num_bytes: int,
    replicas: Replicas,
    *,
    most: Sequence[float] | None = None,
    portions: Literal["balanced", "fastest"] | Cap = "balanced",
    slice_bytes: int = DEFAULT_SLICE_BYTES,
) -> ReplicaStep:
    """Return the fastest step with these replicas; with one, the plain step.

    No rank owns more than 1.25 times its equal share of its replica ("balanced"), or ``portions`` times that; "fastest"
    has no cap. The rest is as with :func:`plan_sharded_step`.
    """
    check_plannable(topology)
    if len(replicas) == 1:
        pair, plain = draft_sharded_steps(topology, num_bytes, most=most, portions=portions, slice_bytes=slice_bytes)[0]
        return ReplicaStep(replicas=replicas, pair=drawn(pair), within=plain.reduce_scatter, after=plain.all_gather)
    cap = BALANCED if portions == "balanced" else math.inf if portions == "fastest" else portions
    limits = _limits(topology, replicas, most, cap)
    supposed = supposed_network(topology)
    found = [
        ReplicaStep(replicas=replicas, pair=pair, within=times[0], after=times[1])
        for pair in (*_cut(topology, replicas), *_drawn(topology, num_bytes, replicas, limits))
        for times in [[predict(half, supposed, num_bytes, slice_bytes, in_windows=False) for half in pair]]
    ]
    fitting = [one for one in found if fits(one.shares, limits)]
    return min(fitting or found, key=lambda one: one.time_s)


def choose_replicas(
    topology: Topology,
    num_bytes: int,
    *,
    most: Sequence[float] | None = None,
    portions: Literal["balanced", "fastest"] | Cap = "balanced",
    slice_bytes: int = DEFAULT_SLICE_BYTES,
) -> ReplicaStep:
    """Return the step of the level whose replicas leave least time to the part after the backward pass.

    None takes over 1 % longer in all than the plain step, which is taken where no other is better; so what the backward
    pass does not hide costs nothing. Of levels within 2 % of the least time after the step the one with the fewest
    replicas is taken, since it needs the least memory. Levels with a replica of one rank are left out: it would keep
    everything.

    >>> len(choose_replicas(Topology.load("two-racks-5-3"), 64 << 20).replicas)
    2
    """
    plain, *several = [
        draft_replicas(topology, num_bytes, replicas, most=most, portions=portions, slice_bytes=slice_bytes)
        for replicas in levels_of(topology)
        if len(replicas) == 1 or min(map(len, replicas)) > 1
    ]
    able = [plain, *(one for one in several if one.time_s <= _MAY_LOSE * plain.time_s)]
    limit_s = min(one.after.time_s for one in able) * (1 + ABOUT_EQUAL)
    return next(one for one in able if one.after.time_s <= limit_s)


def _limits(topology: Topology, replicas: Replicas, most: Sequence[float] | None, cap: Cap) -> list[float]:
    """Return the most that each rank may own; without what memory allows, where that is too little for a replica."""
    room = [1.0] * topology.num_ranks if most is None else list(most)
    speakers, limits = set(topology.speakers), [0.0] * topology.num_ranks
    for ranks in replicas:
        owners = [rank for rank in ranks if rank in speakers]
        within = [min(1.0, cap / max(1, len(owners)), room[rank]) for rank in owners]
        if sum(within) < 1:
            within = [min(1.0, cap / max(1, len(owners)))] * len(owners)
        for rank, limit in zip(owners, within, strict=True):
            limits[rank] = limit
    return limits


def _cut(topology: Topology, replicas: Replicas) -> Iterator[Pair]:
    for draft in draft_all(topology, Collective.ALL_REDUCE, target="balanced", root=0):
        with suppress(ScheduleError):  # some cannot be cut there, or anywhere
            yield draft_in_replicas(draft, replicas)


def _drawn(topology: Topology, num_bytes: int, replicas: Replicas, limits: Sequence[float]) -> Iterator[Pair]:
    """Yield steps with the best owners in each replica, of more and more atoms."""
    owners = [[rank for rank in ranks if rank not in topology.gateways] for ranks in replicas]
    if not topology.has_rates or not all(owners) or len(replicas) > 64 or max(map(len, replicas)) > 64:
        return
    between = _all_reduce_of(_collapsed(topology, replicas), num_bytes)
    moved = shares(between)
    through = [
        (float(moved[between.transfers.src == number].sum()), float(moved[between.transfers.dst == number].sum()))
        for number in range(len(replicas))
    ]
    inside = [topology.restricted(ranks) for ranks in replicas]
    own = [[limits[rank] for rank in ranks] for ranks in owners]
    least_s: list[float] = []
    for _ in range(2):
        flows = [
            solve_step_flow(
                speaking(tree), [(0.0, limit) for limit in each], through=(loads, (0.0, 0.0)), least_s=least_s
            )
            for tree, each, loads in zip(inside, own, through, strict=True)
        ]
        least_s = [max(flow.halves[half].seconds for flow in flows) for half in range(len(STEP))]
    for per_rank in _ATOMS_PER_RANK:
        drafts = [_inside(tree, flow, each, per_rank) for tree, flow, each in zip(inside, flows, own, strict=True)]
        pair = _composed(topology.num_ranks, replicas, drafts, between)
        if pair is None:
            return
        yield pair


def _inside(tree: Topology, flow: StepFlow, limits: Sequence[float], per_rank: int) -> list[Draft]:
    """Draw both halves of one replica."""
    speakers = tree.speakers
    weights = weights_of_shares(flow.shares, limits)
    return [
        draft_with_owners(
            tree, half, tuple(zip(speakers, weights, strict=True)), num_atoms=per_rank * len(speakers), flow=part
        )
        for half, part in zip(STEP, flow.halves, strict=True)
    ]


def _collapsed(topology: Topology, replicas: Replicas) -> Topology:
    """Return the tree whose leaves are the replicas."""
    number, count = {ranks: place for place, ranks in enumerate(replicas)}, itertools.count()

    def build(node: Node) -> Switch | Host:
        ranks = tuple(sorted(leaf.rank for leaf in walk(node) if isinstance(leaf, Rank)))
        if ranks in number:
            return Host(
                name=f"replica{number[ranks]}", link=node.link, ranks=(Rank(rank=number[ranks], link=Link.unlimited()),)
            )
        return Switch(
            name=f"above{next(count)}", link=node.link, children=tuple(build(child) for child in node.children)
        )

    return Topology(name=topology.name, root=build(topology.root))


def _all_reduce_of(topology: Topology, num_bytes: int) -> Draft:
    drafts = draft_all(topology, Collective.ALL_REDUCE, target="balanced", root=0)
    owned = [draft for draft in drafts if draft.has_owners]
    return min(owned, key=lambda draft: predict(draft, topology, num_bytes).time_s)


def _composed(num_ranks: int, replicas: Replicas, drafts: Sequence[Sequence[Draft]], between: Draft) -> Pair | None:
    """Put the drafts of replicas, and one between them, together over common cuts.

    Each range with the same owners in all replicas is cut as the draft between them is. None where that is too many
    transfers.
    """
    whole = math.lcm(*(scatter.denominator for scatter, _ in drafts)) * between.denominator
    cuts = sorted({cut * (whole // scatter.denominator) for scatter, _ in drafts for cut in scatter.cuts})
    placed = [
        [replace(half, owners=own[half.owners], transfers=_moved(half.transfers, own)) for half in pair]
        for pair, own in zip(drafts, (np.array(ranks, dtype=np.int32) for ranks in replicas), strict=True)
    ]
    owners = np.concatenate([cut_further(scatter, cuts).owners for scatter, _ in placed])
    starts = [0, *(np.flatnonzero(np.diff(owners).any(axis=0)) + 1).tolist()]
    if len(starts) * len(between.transfers) > _MOST_TRANSFERS:
        return None
    parts = [
        [start + (stop - start) // between.denominator * cut for cut in between.cuts]
        for start, stop in itertools.pairwise([*(cuts[start] for start in starts), whole])
    ]
    cuts = sorted({*cuts, *itertools.chain.from_iterable(parts)})
    place = {cut: number for number, cut in enumerate(cuts)}
    scatters, gathers = zip(*([cut_further(half, cuts) for half in pair] for pair in placed), strict=True)
    rows = [scatter.transfers for scatter in scatters]
    first = between.transfers.shifted(max(scatter.num_steps for scatter in scatters))
    for start, part in zip(starts, parts, strict=True):
        places = np.array([place[cut] for cut in part])
        rows.append(replace(_moved(first, owners[:, start]), first=places[first.first], last=places[first.last]))
    draft = Draft(
        collective=Collective.REDUCE_SCATTER,
        num_ranks=num_ranks,
        cuts=lowest_terms(cuts),
        transfers=Transfers.concatenate(rows).in_order().merged(),
        owners=np.concatenate([scatter.owners for scatter in scatters]),
        planner="flow",
    )
    gather = Transfers.concatenate([gather.transfers for gather in gathers]).in_order().merged()
    return draft, replace(draft, collective=Collective.ALL_GATHER, transfers=gather)


def _moved(rows: Transfers, ranks: IntArray) -> Transfers:
    """Return transfers between other ranks."""
    return replace(rows, src=ranks[rows.src], dst=ranks[rows.dst])
