"""Which spares a sharded step has: in another rack where that costs little, else on another host as near as can be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from syncline.errors import ScheduleError
from syncline.schedule.cost import DEFAULT_SLICE_BYTES, CostModel
from syncline.schedule.in_trees import RESOLUTION
from syncline.schedule.levelled_step import Known
from syncline.schedule.planners import check_plannable
from syncline.schedule.spares import Apart, add_spares, owners_of, spare_shares, spares_of, ways_apart
from syncline.schedule.step_candidates import MAY_TAKE, Candidate, Portions, draft_sharded_steps
from syncline.schedule.step_prediction import drawn, predict_pair
from syncline.topology import Topology

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
