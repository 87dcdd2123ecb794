"""Bucket schedules: how the buffer of one bucket moves between the ranks, and which ranges of it this rank owns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby

import numpy as np

from syncline.errors import ConfigurationError
from syncline.runtime.communicator import Communicator
from syncline.schedule import (
    Collective,
    Layout,
    Schedule,
    ShardedStep,
    draft_with_owners,
    layout_of_step,
    plan_sharded_step,
    verify,
)
from syncline.topology import Topology
from syncline.updates.bucket import BucketPlan, Slot
from syncline.updates.host_portions import Portions, rank_shares
from syncline.updates.parameter_owners import Cost, assign_balanced, assign_parameters

Ranges = tuple[tuple[int, int], ...]
"""Sorted, disjoint element ranges (start, stop)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketScheduleOptions:
    """How an update rule wants its buckets to move.

    ``is_divided``: by reduce-scatter and all-gather with the same owners, in place of all-reduce.
    ``whole_parameters``: each parameter has one owner, and ranks have parameters of about as much ``cost`` as they
    have ``portions``. ``num_copies``: of parameters and of optimizer state that a rank keeps in a step.
    """

    is_divided: bool
    whole_parameters: bool = False
    slice_bytes: int | None = None
    portions: Portions = "balanced"
    cost: Cost = math.prod
    num_copies: int = 1


def check_sizes(*, bucket_bytes: int, slice_bytes: int | None) -> None:
    """Raise :class:`ConfigurationError` unless buckets, and slices if their size is given, can hold something."""
    if bucket_bytes <= 0 or (slice_bytes is not None and slice_bytes <= 0):
        raise ConfigurationError(f"bucket_bytes and slice_bytes must be positive, not {bucket_bytes} and {slice_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSchedule:
    """The schedules of one bucket, all laid over its elements in the same way.

    A bucket has a stream of its own, so that ranks may start their buckets in different orders.
    """

    stream: int
    layout: Layout
    schedules: Mapping[Collective, Schedule]
    owned: Ranges

    @property
    def num_owned(self) -> tuple[int, ...]:
        """How many elements each rank owns; all of them on every rank, if the bucket is not divided."""
        schedule = next(iter(self.schedules.values()))
        if Collective.ALL_REDUCE in self.schedules:
            return (self.layout.num_elements,) * schedule.num_ranks
        widths = np.diff(np.array(self.layout.slices, dtype=np.int64), axis=1).sum(axis=0)
        owned: list[int] = np.bincount(schedule.owners, widths, schedule.num_ranks).astype(np.int64).tolist()
        return tuple(owned)


def plan_bucket_schedules(
    communicator: Communicator,
    plans: Sequence[BucketPlan],
    options: BucketScheduleOptions,
    *,
    first_stream: int,
    most: Sequence[float] | None = None,
) -> tuple[BucketSchedule, ...]:
    """Plan how buckets move; every rank comes to the same bucket schedules.

    ``most`` is the share of a divided bucket that each rank may own. Raises :class:`ConfigurationError` for portions
    that name other hosts than the topology.
    """
    if not options.is_divided:
        return tuple(_plan_whole(communicator, plan, options, first_stream + plan.index) for plan in plans)
    step_of = _steps_of_buckets(communicator.topology, plans, options, most)
    return tuple(_plan_divided(communicator, plan, options, first_stream + plan.index, step_of(plan)) for plan in plans)


def _steps_of_buckets(
    topology: Topology, plans: Sequence[BucketPlan], options: BucketScheduleOptions, most: Sequence[float] | None
) -> Callable[[BucketPlan], ShardedStep]:
    portions = options.portions if isinstance(options.portions, str) else rank_shares(topology, options.portions)
    step_of = cache(lambda size_class: plan_sharded_step(topology, 1 << size_class, most=most, portions=portions))
    if not options.whole_parameters:
        return lambda plan: step_of(_size_class(plan.num_bytes))
    shares = step_of(max(_size_class(plan.num_bytes) for plan in plans)).shares
    assign = assign_balanced if portions == "balanced" else assign_parameters
    owners = assign(topology, plans, shares, cost=options.cost, most=most)
    owned_by = cache(partial(_step_of_owners, topology))
    return lambda plan: owned_by(_runs(plan.slots, owners[plan.index]))


def _size_class(num_bytes: int) -> int:
    return max(num_bytes - 1, 0).bit_length()


def _runs(slots: Sequence[Slot], owners: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return who owns how many elements, from the beginning of a bucket to its end."""
    pairs = groupby(zip(owners, slots, strict=True), key=lambda pair: pair[0])
    return tuple((owner, sum(slot.num_elements for _, slot in run)) for owner, run in pairs)


def _step_of_owners(topology: Topology, runs: tuple[tuple[int, int], ...]) -> ShardedStep:
    halves = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
    reduce_scatter, all_gather = (verify(draft_with_owners(topology, half, runs)) for half in halves)
    return ShardedStep(reduce_scatter=reduce_scatter, all_gather=all_gather)


def _plan_divided(
    communicator: Communicator, plan: BucketPlan, options: BucketScheduleOptions, stream: int, step: ShardedStep
) -> BucketSchedule:
    slice_elements = _slice_elements(communicator, plan, options)
    if options.whole_parameters:
        layout = Layout.contiguous(step.reduce_scatter, plan.num_elements, slice_elements)
    else:
        layout = layout_of_step(step, plan.num_elements, slice_elements)
    return BucketSchedule(
        stream=stream,
        layout=layout,
        schedules={Collective.REDUCE_SCATTER: step.reduce_scatter, Collective.ALL_GATHER: step.all_gather},
        owned=layout.owned_ranges(step.reduce_scatter, communicator.rank),
    )


def _plan_whole(
    communicator: Communicator, plan: BucketPlan, options: BucketScheduleOptions, stream: int
) -> BucketSchedule:
    schedule = communicator.plan(Collective.ALL_REDUCE, plan.num_bytes)
    layout = Layout.build(schedule, plan.num_elements, _slice_elements(communicator, plan, options))
    owned = ((0, plan.num_elements),)
    return BucketSchedule(stream=stream, layout=layout, schedules={Collective.ALL_REDUCE: schedule}, owned=owned)


def _slice_elements(communicator: Communicator, plan: BucketPlan, options: BucketScheduleOptions) -> int:
    """Return the size that cuts the bucket into as many slices as comes nearest to the size that is wanted.

    A message costs processors much and its bytes little, so a bucket of little more than two slices is not made three.
    """
    wanted = max(1, (options.slice_bytes or communicator.bucket_slice_bytes(plan.num_bytes)) // plan.dtype.itemsize)
    return -(-plan.num_elements // max(1, round(plan.num_elements / wanted)))
