"""The candidates for a sharded step: halves of all-reduces, and in-trees for the owners that suit both halves best.

Owners that suit slow links may be few, and hold much memory each. So *balanced* portions give no rank more than 1.25
times its equal share, unless that takes over a tenth longer than *fastest* ones; then it is the least of a row of
multiples, each 1.15 times the one before, that does not. A number is such a multiple that holds in any case. More and
more atoms are tried until links carry, within 1 %, no more than they must. Nothing is proved here.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Literal

from syncline.arguments import Bounds
from syncline.errors import ScheduleError
from syncline.schedule.bound import lower_bound
from syncline.schedule.cost import (
    DEFAULT_SLICE_BYTES,
    CostModel,
    Halves,
    StepPrediction,
    drawn,
    fastest,
    predict_pair,
    safest,
    supposed_network,
)
from syncline.schedule.draft import MAX_PLANNED_RANKS, Collective
from syncline.schedule.in_trees import RESOLUTION, draft_with_owners, weights_of_shares
from syncline.schedule.levelled_step import Known, LevelledStep
from syncline.schedule.ownership import speaking
from syncline.schedule.planners import planners_for
from syncline.schedule.step_flow import STEP, Limits, StepFlow, solve_step_flow
from syncline.schedule.verifier import split_at_owners
from syncline.schedule.weighted_tree import draft_portions, draft_weighted_tree
from syncline.topology import Topology

Cap = Annotated[float, Bounds(1, below=math.inf)]
"""How many times its equal share a rank may own at most."""
Portions = Literal["balanced", "fastest"] | Cap | Sequence[float]

MANY_RANKS, MOST_RANKS = 64, 128
"""Beyond the first, steps are drawn level by level, and an in-tree is drawn for each owner only where these do not
reach what links allow; beyond the second that takes too long."""
_MOST_TRANSFERS = 1 << 14
"""Of each half; only the least number of atoms, one for each rank, may take more."""
_ATOMS_PER_RANK = (1, 2, 4, 8)
BALANCED, MAY_TAKE = 1.25, 1.1
"""How many times its equal share a rank may own where portions are balanced, and how much longer a step may be so."""
_ATOMS_PER_CHILD = (1, 4)
_CAP_GROWTH = 1.15
_CLOSE_ENOUGH = 1.01
_ROUNDING = 1e-6
Candidate = tuple[Halves, StepPrediction]


def draft_sharded_steps(
    topology: Topology,
    num_bytes: int,
    *,
    most: Sequence[float] | None = None,
    portions: Portions = "balanced",
    slice_bytes: int = DEFAULT_SLICE_BYTES,
    cost: CostModel | None = None,
    known: Known | None = None,
) -> list[Candidate]:
    """Return the drafts that :func:`plan_sharded_step` compares, with predictions, its choice first.

    Arguments and errors are those of :func:`plan_sharded_step`. ``known``: what several searches may share.
    """
    limits = limits_of(topology, most)
    search = _Search(topology, num_bytes, slice_bytes, cost, known)
    if isinstance(portions, Sequence) and not isinstance(portions, str):
        return search.exact(_exact(topology, portions, limits))
    if portions == "balanced":
        return search.balanced(limits)
    return search.fastest(limits if portions == "fastest" else capped(topology, limits, portions))


def compare_caps(
    topology: Topology,
    num_bytes: int,
    caps: Sequence[Cap | None],
    slice_bytes: int = DEFAULT_SLICE_BYTES,
    *,
    known: Known | None = None,
) -> list[tuple[Cap | None, Candidate]]:
    """Return the fastest step under each cap; None is no cap."""
    limits = limits_of(topology, None)
    search = _Search(topology, num_bytes, slice_bytes, None, known)
    return [(cap, search.fastest(limits if cap is None else capped(topology, limits, cap))[0]) for cap in caps]


def limits_of(topology: Topology, most: Sequence[float] | None) -> tuple[float, ...]:
    """Return the most that each rank may own."""
    given = tuple(min(1.0, float(part)) for part in most) if most is not None else (1.0,) * topology.num_ranks
    if len(given) != topology.num_ranks or not all(part >= 0 for part in given):
        raise ScheduleError(
            f"each of {topology.num_ranks} ranks may own some part of at least 0, not {list(given)[:8]}"
        )
    given = tuple(0.0 if rank in topology.gateways else part for rank, part in enumerate(given))
    if sum(given) < 1 - _ROUNDING:
        raise ScheduleError(
            f"all ranks together own everything, but may own {sum(given):.4g} of it at most; give ranks more memory, "
            "take more ranks, or shard less"
        )
    return given


def capped(topology: Topology, limits: Sequence[float], cap: Cap) -> tuple[float, ...]:
    """Return the most that each rank may own where none owns more than ``cap`` times an equal share."""
    num_owners = len(topology.speakers)
    within = tuple(min(limit, cap / num_owners) for limit in limits)
    if sum(within) < 1 - _ROUNDING:
        raise ScheduleError(
            f"with portions={cap:g} no rank owns more than {cap / num_owners:.4g} of everything, and some have memory "
            f"for less, so that all own {sum(within):.4g} of it at most; take larger portions, or more ranks"
        )
    return within


def _exact(topology: Topology, portions: Sequence[float], limits: Sequence[float]) -> tuple[float, ...]:
    """Return the portions, checked."""
    exact = tuple(float(part) for part in portions)
    is_whole = len(exact) == topology.num_ranks and all(part >= 0 for part in exact)
    if not is_whole or abs(sum(exact) - 1) > _ROUNDING:
        raise ScheduleError(
            f"portions are one for each of {topology.num_ranks} ranks, at least 0, with the sum 1; not {exact[:8]}"
        )
    over = [rank for rank, (part, limit) in enumerate(zip(exact, limits, strict=True)) if part > limit + _ROUNDING]
    if over:
        raise ScheduleError(
            f"rank {over[0]} is to own {exact[over[0]]:.4g} of everything, but may own {limits[over[0]]:.4g} at most; "
            "give it a smaller portion or more memory"
        )
    return exact


class _Search:
    """Draws candidates and takes the fastest.

    Flows are those of the ranks that speak to other hosts (:attr:`Topology.gateways`); no other owns anything.
    """

    def __init__(
        self, topology: Topology, num_bytes: int, slice_bytes: int, cost: CostModel | None, known: Known | None
    ) -> None:
        self._topology = topology
        self._num_bytes = num_bytes
        self._slice_bytes = slice_bytes
        self._cost = cost
        self._supposed = supposed_network(topology)
        self._speakers, self._among = topology.speakers, speaking(topology)
        has_rates = len(self._speakers) > 1 and _has_rates(topology)
        self._is_levelled = has_rates and len(self._speakers) > MANY_RANKS and not topology.gateways
        self._flows_may_gain = has_rates and len(self._speakers) <= MOST_RANKS
        is_alone = self._is_levelled and not self._flows_may_gain
        self._others = [] if is_alone else [self._predicted(pair) for pair in _halves_of_all_reduces(topology)]
        self._known: Known = {} if known is None else known

    def fastest(self, limits: Sequence[float]) -> list[Candidate]:
        """Return all candidates within limits, the fastest first."""
        return self._best_first(self._within(limits))

    def balanced(self, limits: Sequence[float]) -> list[Candidate]:
        """Return those in which no rank owns much more than others, if the fastest of them is nearly as fast as any."""
        best = self.fastest(limits)
        allowed_s = best[0][1].time_s * MAY_TAKE
        most = max(best[0][0][0].shares)
        caps = [cap for cap in _caps(len(self._speakers)) if cap < most]
        begin = 0

        def within(cap: float) -> list[float]:
            return [min(limit, cap) for limit in limits]

        if caps and self._least_s(within(caps[0])) > allowed_s:
            begin = bisect.bisect_left(caps, True, key=lambda cap: self._least_s(within(cap)) <= allowed_s)
        found = dict[int, list[Candidate]]()

        def is_allowed(place: int) -> bool:
            found[place] = self.fastest(within(caps[place]))
            return found[place][0][1].time_s <= allowed_s

        least = begin  # most often; else times fall with higher caps, but for some that do not matter
        if begin < len(caps) and not is_allowed(begin):
            least = bisect.bisect_left(range(len(caps)), True, lo=begin + 1, key=is_allowed)
        return found[least] if least < len(caps) else best

    def exact(self, portions: Sequence[float]) -> list[Candidate]:
        """Return all in which each rank owns just that, the fastest first."""
        if self._is_levelled and not self._flows_may_gain:
            return self._best_first(self._levelled(portions))
        return self._best_first(self._with_flows([(part, part) for part in portions]))

    def _least_s(self, limits: Sequence[float]) -> float:
        """Return how long links alone take; for ever where ranks may own too little."""
        if sum(limits) < 1:
            return math.inf
        if self._is_levelled and not self._flows_may_gain:
            return LevelledStep(self._topology, limits, known=self._known).seconds * self._num_bytes
        return self._solve(upto(limits)).seconds * self._num_bytes if self._flows_may_gain else 0.0

    def _solve(self, limits: Limits, *, is_direct: bool = False) -> StepFlow:
        return solve_step_flow(self._among, [limits[rank] for rank in self._speakers], is_direct=is_direct)

    def _within(self, limits: Sequence[float]) -> Iterator[Candidate]:
        fitting = [one for one in self._others if fits(one[0][0].shares, limits)]
        yield from fitting
        if self._is_levelled:
            levelled = list(self._levelled(limits))
            yield from levelled
            least_s = self._wire_s(self._solve(upto(limits))) if self._flows_may_gain else math.inf
            if min(_busy_s(one[1]) for one in levelled) <= least_s * _CLOSE_ENOUGH:
                return
        if self._flows_may_gain or not fitting:
            least_s = min((prediction.time_s for _, prediction in fitting), default=math.inf)
            yield from self._with_flows(upto(limits), least_s=least_s)

    def _levelled(self, limits: Sequence[float]) -> Iterator[Candidate]:
        """Yield steps planned level by level, in outline, of more atoms where links carry more than they must."""
        for atoms_per_child in _ATOMS_PER_CHILD:
            step = LevelledStep(self._topology, limits, atoms_per_child=atoms_per_child, known=self._known)
            candidate = self._predicted(step.outlines())
            yield candidate
            least_s = step.seconds * self._num_bytes / (self._cost or CostModel()).payload_share
            if _busy_s(candidate[1]) <= least_s * _CLOSE_ENOUGH:
                return

    def _with_flows(self, limits: Limits, *, least_s: float = math.inf) -> Iterator[Candidate]:
        """Yield schedules with the best owners within limits, with detours and without, of more and more atoms.

        None where ``least_s``, which is known to be possible, is about what they can reach.
        """
        num_ranks = len(self._speakers)
        flow = self._solve(limits)
        if least_s <= self._wire_s(flow) * _CLOSE_ENOUGH:
            return
        for each in [flow, self._solve(limits, is_direct=True)] if flow.has_detours else [flow]:
            weights = weights_of_shares(each.shares, [limits[rank][1] for rank in self._speakers])
            for per_rank in _ATOMS_PER_RANK:
                planner = "flow" if each is flow else "direct_flow"
                candidate = self._draw(each, weights, per_rank * num_ranks, planner)
                yield candidate
                is_full = 2 * per_rank * num_ranks**2 > _MOST_TRANSFERS
                if is_full or _busy_s(candidate[1]) <= self._wire_s(each) * _CLOSE_ENOUGH:
                    break

    def _draw(self, flow: StepFlow, weights: Sequence[int], num_atoms: int, planner: str) -> Candidate:
        owners = tuple(zip(self._speakers, weights, strict=True))
        scatter, gather = (
            draft_with_owners(self._topology, half, owners, num_atoms=num_atoms, flow=part, planner=planner)
            for half, part in zip(STEP, flow.halves, strict=True)
        )
        return self._predicted((scatter, gather))

    def _wire_s(self, flow: StepFlow) -> float:
        return flow.seconds * self._num_bytes / (self._cost or CostModel()).payload_share

    def _predicted(self, pair: Halves) -> Candidate:
        return pair, predict_pair(pair, self._supposed, self._num_bytes, self._slice_bytes, self._cost)

    def _best_first(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        given = list(candidates)
        may_be_safe = self._topology.is_unknown and self._topology.num_ranks <= MAX_PLANNED_RANKS
        if may_be_safe:
            first: Halves = safest([(drawn(pair), prediction) for pair, prediction in given], self._topology)
        else:
            first = fastest(given)
        return sorted(given, key=lambda one: one[0][0] is not first[0])


def _busy_s(prediction: StepPrediction) -> float:
    """Return how long the busiest link of each half is busy, both together."""
    return sum(max(half.link_s.values(), default=0.0) for half in (prediction.reduce_scatter, prediction.all_gather))


def _halves_of_all_reduces(topology: Topology) -> Iterator[Halves]:
    for planner in planners_for(topology):
        if not planner.serves(topology, Collective.ALL_REDUCE):
            continue
        if topology.num_ranks > MAX_PLANNED_RANKS and planner.outline is not None:
            outline = planner.outline(topology, Collective.ALL_REDUCE)
            yield replace(outline, collective=STEP[0]), replace(outline, collective=STEP[1])
            continue
        # an in-tree for each owner is a candidate of its own, with both halves one after the other
        draw = draft_portions if planner.draft is draft_weighted_tree else planner.draft
        halves = split_at_owners(draw(topology, Collective.ALL_REDUCE, target="balanced", root=0))
        if halves is not None:
            yield halves


def _has_rates(topology: Topology) -> bool:
    if topology.num_ranks > MANY_RANKS:
        return topology.has_rates  # a bound would take longer than the step
    return any(lower_bound(topology, half, 1) > 0 for half in STEP)


def upto(limits: Sequence[float]) -> Limits:
    """Return limits that only say how much at most."""
    return [(0.0, limit) for limit in limits]


def fits(shares: Sequence[float], limits: Sequence[float]) -> bool:
    """Whether no rank owns more than it may."""
    return all(part <= limit + 1 / RESOLUTION for part, limit in zip(shares, limits, strict=True))


def _caps(num_ranks: int) -> Iterator[float]:
    """Yield what a rank may own, from a little more than its equal share to everything."""
    cap = BALANCED / num_ranks
    while cap < 1:
        yield cap
        cap *= _CAP_GROWTH
