"""Bucket schedules: how the buffer of one bucket moves between the ranks, and which ranges of it this rank owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from syncline.errors import ConfigurationError, ScheduleError
from syncline.runtime.communicator import Communicator
from syncline.schedule import Collective, Layout, Schedule, plan_tree, split
from syncline.updates.bucket import BucketPlan

Ranges = tuple[tuple[int, int], ...]
"""Sorted, disjoint element ranges (start, stop)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketScheduleOptions:
    """How an update rule wants its buckets to move.

    ``is_divided``: by reduce-scatter and all-gather with the same owners, in place of all-reduce.
    ``whole_parameters``: cuts are moved to borders between parameters, so that each parameter has one owner.
    """

    is_divided: bool
    whole_parameters: bool = False
    slice_bytes: int | None = None


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


def plan_bucket_schedules(
    communicator: Communicator, plans: Sequence[BucketPlan], options: BucketScheduleOptions, *, first_stream: int
) -> tuple[BucketSchedule, ...]:
    """Plan how buckets move; every rank comes to the same bucket schedules."""
    halves = cache(lambda num_bytes: _plan_halves(communicator, num_bytes))
    return tuple(
        _plan_bucket_schedule(communicator, plan, options, first_stream + plan.index, halves(plan.num_bytes))
        if options.is_divided
        else _plan_whole(communicator, plan, options, first_stream + plan.index)
        for plan in plans
    )


def _plan_halves(communicator: Communicator, num_bytes: int) -> tuple[Schedule, Schedule]:
    """Halve the best all-reduce; one without owners (for short messages) gives way to the tree."""
    try:
        return split(communicator.plan(Collective.ALL_REDUCE, num_bytes))
    except ScheduleError:
        return split(plan_tree(communicator.topology, Collective.ALL_REDUCE))


def _plan_bucket_schedule(
    communicator: Communicator,
    plan: BucketPlan,
    options: BucketScheduleOptions,
    stream: int,
    halves: tuple[Schedule, Schedule],
) -> BucketSchedule:
    reduce_scatter, all_gather = halves
    if options.whole_parameters:
        borders = [*(slot.start for slot in plan.slots), plan.num_elements]
        layout = Layout.aligned(reduce_scatter, borders, _slice_elements(communicator, plan, options))
    else:
        layout = Layout.build(reduce_scatter, plan.num_elements, _slice_elements(communicator, plan, options))
    return BucketSchedule(
        stream=stream,
        layout=layout,
        schedules={Collective.REDUCE_SCATTER: reduce_scatter, Collective.ALL_GATHER: all_gather},
        owned=layout.owned_ranges(reduce_scatter, communicator.rank),
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
