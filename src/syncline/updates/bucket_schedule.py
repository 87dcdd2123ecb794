"""Bucket schedules: how the buffer of one bucket moves between the ranks, and which ranges of it this rank owns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from syncline.errors import ConfigurationError, SynclineError
from syncline.runtime.communicator import Communicator
from syncline.schedule import (
    Collective,
    Layout,
    Schedule,
    ShardedStep,
    layout_of_step,
    plan_sharded_step,
    verify,
)
from syncline.schedule.in_trees import RESOLUTION, draft_row_with_owners
from syncline.schedule.replicas import Replicas, Replicate, find_replicas
from syncline.schedule.replicated_step import ReplicaStep, choose_replicas, draft_replicas
from syncline.schedule.sharded_step import pack_step, unpack_step
from syncline.schedule.spares import Apart, add_spares, spare_of_each
from syncline.schedule.step_candidates import MANY_RANKS
from syncline.schedule.step_flow import STEP
from syncline.topology import Topology
from syncline.updates.bucket import BucketPlan, Slot
from syncline.updates.ownership import Cost, Owners, Portions, assign_parameters, rank_shares

MOST_PLANNING = MANY_RANKS
"""With more ranks planning takes seconds, and what comes of it a hundredth of that to send and to prove."""
MANY_BUCKETS = 64
"""With more, what one is cut into is less: together they use all ways anyhow."""
Ranges = tuple[tuple[int, int], ...]
"""Sorted, disjoint element ranges (start, stop)."""
Runs = tuple[tuple[int, int], ...]
"""Who has how many elements, from the beginning of a bucket to its end."""
_ROUNDING = 4 / RESOLUTION
"""By which shares may miss what they should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketScheduleOptions:
    """How an update rule wants its buckets to move.

    ``is_divided``: by reduce-scatter and all-gather with the same owners, in place of all-reduce.
    ``whole_parameters``: each parameter has one owner, and ranks have parameters of about as much ``cost`` as they
    have ``portions``. ``num_copies``: of parameters and of optimizer state that a rank keeps in a step.
    ``replicate``: which parts of the topology own everything each by itself; ``"auto"`` leaves it to the model.
    ``spares``: how many other ranks keep each range, too. ``is_contiguous``: a rank owns one range of a bucket, or few.
    """

    is_divided: bool
    whole_parameters: bool = False
    portions: Portions = "balanced"
    cost: Cost = math.prod
    num_copies: int = 1
    replicate: Replicate | None = None
    spares: int = 0
    is_contiguous: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSchedule:
    """The schedules of one bucket, all laid over its elements in the same way.

    A bucket has a stream of its own, so that ranks may start their buckets in different orders.
    """

    stream: int
    layout: Layout
    schedules: Mapping[Collective, Schedule]
    owned: tuple[Ranges, ...]
    """What this rank owns: ranges in groups, each of which has one owner in each other replica, or one spare."""
    spared: tuple[Ranges, ...] = ()
    """What this rank is the spare of: ranges in groups, each of which has one owner."""
    apart: Apart | None = None
    """What owners and spares are apart by; None where there are no spares."""
    replicas: Replicas = ()
    """The ranks of each replica; empty where nothing is replicated."""

    @property
    def num_owned(self) -> tuple[int, ...]:
        """How many elements each rank owns, or is the spare of; all on every rank, if the bucket is not divided."""
        schedule = next(iter(self.schedules.values()))
        if Collective.ALL_REDUCE in self.schedules:
            return (self.layout.num_elements,) * schedule.num_ranks
        widths = np.diff(np.array(self.layout.slices, dtype=np.int64), axis=1).sum(axis=0)
        owned: list[int] = (
            np.bincount(schedule.owners.reshape(-1), np.tile(widths, len(schedule.owners)), schedule.num_ranks)
            .astype(np.int64)
            .tolist()
        )
        return tuple(owned)

    def held_by(self, rank: int) -> Ranges:
        """Return the elements that a rank owns, or is the spare of."""
        if Collective.ALL_REDUCE in self.schedules:
            return ((0, self.layout.num_elements),)
        return self.layout.owned_ranges(self.schedules[Collective.REDUCE_SCATTER], rank)


def plan_bucket_schedules(
    communicator: Communicator,
    plans: Sequence[BucketPlan],
    options: BucketScheduleOptions,
    *,
    first_stream: int,
    most: Sequence[float] | None = None,
    is_together: bool = False,
) -> tuple[BucketSchedule, ...]:
    """Plan how buckets move; every rank comes to the same bucket schedules.

    ``most`` is the share of a divided bucket that each rank may own. ``is_together``: all ranks call this at once, so
    that of many one may plan for all. Raises :class:`ConfigurationError` for portions that name other hosts than the
    topology.
    """
    if not options.is_divided:
        # Each as part of all, since they follow each other and keep the links busy together.
        schedule = communicator.plan(Collective.ALL_REDUCE, sum(plan.num_bytes for plan in plans))
        return tuple(_plan_whole(communicator, plan, first_stream + plan.index, schedule) for plan in plans)
    if options.replicate is not None:
        found = _step_with_replicas(communicator, plans, options, most)
        if len(found.replicas) > 1:
            return _plan_replicated(communicator, plans, options, found, first_stream=first_stream, most=most)
    steps = _steps_of_buckets(communicator, plans, options, most, is_together=is_together)
    planned = [
        _plan_divided(communicator, plan, options, first_stream + plan.index, step)
        for plan, step in zip(plans, steps, strict=True)
    ]
    if options.spares:
        _check_room(planned, most, "with these spares", "take more hosts, or no spares")
    return tuple(planned)


def plan_for_owners(
    communicator: Communicator, plans: Sequence[BucketPlan], owners: Sequence[Runs], *, first_stream: int
) -> tuple[BucketSchedule, ...]:
    """Plan how divided buckets move whose owners are given."""
    steps = _steps_of_owners(communicator.topology, owners, [()] * len(plans), apart=None)
    options = BucketScheduleOptions(is_divided=True, is_contiguous=True)
    return tuple(
        _plan_divided(communicator, plan, options, first_stream + plan.index, step)
        for plan, step in zip(plans, steps, strict=True)
    )


def _steps_of_buckets(
    communicator: Communicator,
    plans: Sequence[BucketPlan],
    options: BucketScheduleOptions,
    most: Sequence[float] | None,
    *,
    is_together: bool,
) -> Sequence[ShardedStep]:
    """Plan the step of each bucket: as part of all, since they follow each other and keep the links busy together."""
    topology = communicator.topology
    portions = rank_shares(topology, options.portions) if isinstance(options.portions, Mapping) else options.portions
    num_bytes = sum(plan.num_bytes for plan in plans)
    slice_bytes = communicator.bucket_slice_bytes(max(plan.num_bytes for plan in plans))
    settings: dict[str, Any] = {"spares": options.spares, "slice_bytes": slice_bytes}
    plan = partial(plan_sharded_step, topology, num_bytes, most=most, portions=portions, **settings)
    whole = _planned_by_one(communicator, plan) if is_together and communicator.world_size > MOST_PLANNING else plan()
    if not options.whole_parameters:
        return [whole] * len(plans)
    own = most if most is None or whole.apart is None else [limit / 2 for limit in most]
    cap = None if isinstance(portions, tuple) or portions == "fastest" else portions
    owners = assign_parameters(topology, plans, whole.shares, cost=options.cost, most=own, cap=cap)
    spares = _spares_of_parameters(topology, plans, owners, whole)
    rows = ([_runs(plan.slots, ranks[plan.index]) for plan in plans] for ranks in (owners, spares))
    return _steps_of_owners(topology, *rows, apart=whole.apart)


def _planned_by_one(communicator: Communicator, plan: Callable[[], ShardedStep]) -> ShardedStep:
    """Plan on rank 0 alone, and prove on the others what it tells; if it cannot plan, all find by themselves why."""
    told = b""
    if communicator.rank == 0:
        with suppress(SynclineError):
            told = pack_step(plan())
    size = bytearray(len(told).to_bytes(8, "little"))
    communicator.sum_bytes(size, label="rank 0's plan")
    packed = bytearray(told) or bytearray(int.from_bytes(size, "little"))
    if not packed:
        return plan()
    communicator.sum_bytes(packed, label="rank 0's plan")
    return unpack_step(packed)


def _spares_of_parameters(
    topology: Topology, plans: Sequence[BucketPlan], owners: Owners, whole: ShardedStep
) -> Owners:
    """Return for each bucket the spare of each of its parameters; no ranks where there are no spares."""
    if whole.apart is None:
        return ((),) * len(plans)
    ranges = [
        (owner, slot.num_elements)
        for plan, of_plan in zip(plans, owners, strict=True)
        for slot, owner in zip(plan.slots, of_plan, strict=True)
    ]
    spares = iter(spare_of_each(topology, ranges, whole.shares, whole.apart))
    return tuple(tuple(next(spares) for _ in plan.slots) for plan in plans)


def _runs(slots: Sequence[Slot], owners: Sequence[int]) -> Runs:
    """Return who owns how many elements, from the beginning of a bucket to its end."""
    pairs = groupby(zip(owners, slots, strict=bool(owners)), key=lambda pair: pair[0])
    return tuple((owner, sum(slot.num_elements for _, slot in run)) for owner, run in pairs)


def _steps_of_owners(
    topology: Topology, owners: Sequence[Runs], spares: Sequence[Runs], *, apart: Apart | None
) -> list[ShardedStep]:
    """Plan all buckets together: where each has but a few owners, only all of them can use the links evenly."""
    num_atoms = max(1, 4 * topology.num_ranks * min(1, MANY_BUCKETS / len(owners)))
    rows = (draft_row_with_owners(topology, half, owners, num_atoms=math.ceil(num_atoms)) for half in STEP)
    pairs = list(zip(*rows, strict=True))
    if apart is not None:
        pairs = [add_spares(pair, runs) for pair, runs in zip(pairs, spares, strict=True)]
    return [ShardedStep(reduce_scatter=verify(one), all_gather=verify(two), apart=apart) for one, two in pairs]


def _plan_divided(
    communicator: Communicator, plan: BucketPlan, options: BucketScheduleOptions, stream: int, step: ShardedStep
) -> BucketSchedule:
    slice_elements = _slice_elements(communicator, plan)
    if options.whole_parameters or options.is_contiguous:
        layout = Layout.contiguous(step.reduce_scatter, plan.num_elements, slice_elements)
    else:
        layout = layout_of_step(step, plan.num_elements, slice_elements)
    return BucketSchedule(
        stream=stream,
        layout=layout,
        schedules={Collective.REDUCE_SCATTER: step.reduce_scatter, Collective.ALL_GATHER: step.all_gather},
        owned=layout.owned_alike(step.reduce_scatter, communicator.rank, row=0),
        spared=layout.owned_alike(step.reduce_scatter, communicator.rank, row=1) if step.apart else (),
        apart=step.apart,
    )


def _step_with_replicas(
    communicator: Communicator,
    plans: Sequence[BucketPlan],
    options: BucketScheduleOptions,
    most: Sequence[float] | None,
) -> ReplicaStep:
    """Draft the step of all buckets together."""
    assert options.replicate is not None, "who asks for replicas says which"
    assert not isinstance(options.portions, Mapping), "replicas have no portions of hosts"
    topology, num_bytes = communicator.topology, sum(plan.num_bytes for plan in plans)
    slice_bytes = communicator.bucket_slice_bytes(max(plan.num_bytes for plan in plans))
    if options.replicate == "auto":
        return choose_replicas(topology, num_bytes, most=most, portions=options.portions, slice_bytes=slice_bytes)
    replicas = find_replicas(topology, options.replicate)
    return draft_replicas(topology, num_bytes, replicas, most=most, portions=options.portions, slice_bytes=slice_bytes)


def _plan_replicated(
    communicator: Communicator,
    plans: Sequence[BucketPlan],
    options: BucketScheduleOptions,
    found: ReplicaStep,
    *,
    first_stream: int,
    most: Sequence[float] | None,
) -> tuple[BucketSchedule, ...]:
    """Lay one step with replicas over all buckets."""
    first, second = map(verify, found.pair)
    planned = []
    for plan in plans:
        borders = [*(slot.start for slot in plan.slots), plan.num_elements]
        slice_elements = _slice_elements(communicator, plan)
        layout = (
            Layout.aligned(first, borders, slice_elements)
            if options.whole_parameters
            else Layout.build(first, plan.num_elements, slice_elements)
        )
        bucket_schedule = BucketSchedule(
            stream=first_stream + plan.index,
            layout=layout,
            schedules={Collective.REDUCE_SCATTER: first, Collective.ALL_GATHER: second},
            owned=layout.owned_alike(first, communicator.rank),
            replicas=found.replicas,
        )
        planned.append(bucket_schedule)
    _check_room(planned, most, "with these replicas", "replicate larger parts")
    return tuple(planned)


def _check_room(
    bucket_schedules: Sequence[BucketSchedule], most: Sequence[float] | None, why: str, remedy: str
) -> None:
    owned = np.sum([one.num_owned for one in bucket_schedules], axis=0)
    num_elements = sum(one.layout.num_elements for one in bucket_schedules)
    if most is None:
        return
    for rank, (number, share) in enumerate(zip(owned.tolist(), most, strict=True)):
        if number > share * num_elements + 1 + _ROUNDING * num_elements:
            raise ConfigurationError(
                f"{why.capitalize()} rank {rank} would own {number} of {num_elements} elements, and the memory that "
                f"the topology says its host has is enough for {int(share * num_elements)}; {remedy}"
            )


def _plan_whole(communicator: Communicator, plan: BucketPlan, stream: int, schedule: Schedule) -> BucketSchedule:
    layout = Layout.build(schedule, plan.num_elements, _slice_elements(communicator, plan))
    owned = (((0, plan.num_elements),),)
    return BucketSchedule(stream=stream, layout=layout, schedules={Collective.ALL_REDUCE: schedule}, owned=owned)


def _slice_elements(communicator: Communicator, plan: BucketPlan) -> int:
    """Return the size that cuts the bucket into as many slices as comes nearest to the size that is wanted.

    A message costs processors much and its bytes little, so a bucket of little more than two slices is not made three.
    """
    wanted = max(1, communicator.bucket_slice_bytes(plan.num_bytes) // plan.dtype.itemsize)
    return -(-plan.num_elements // max(1, round(plan.num_elements / wanted)))
