"""How buckets are cut and in which order they travel, without a network."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from syncline.errors import PeerLostError, ScheduleError, SynclineError
from syncline.observe import Trace
from syncline.runtime.communicator import Communicator, communicators_in_memory
from syncline.runtime.plans import Plans
from syncline.schedule import Collective, Schedule, plan_tree, predict
from syncline.schedule.cost import predicted_slice_bytes
from syncline.schedule.replicas import find_replicas
from syncline.topology import Topology
from syncline.updates import bucket_schedule
from syncline.updates.bucket import Bucket, BucketPlan, ParameterEntry, plan_buckets
from syncline.updates.bucket_collectives import BucketCollectives
from syncline.updates.bucket_schedule import BucketScheduleOptions, plan_bucket_schedules

TOPOLOGY = Topology.flat(3, rate=1e9)


class Recorder:
    """Stands for a communicator: plans, and keeps what it is given."""

    def __init__(self, *, slice_bytes: int = 1000) -> None:
        self.rank, self.world_size, self.topology = 0, 3, TOPOLOGY
        self.bucket_slice_bytes = lambda _: slice_bytes
        self.trace, self.timeout_s = Trace(), 1.0
        self.calls: list[dict[str, Any]] = []
        self.connection_classes = SimpleNamespace(assign=lambda *_: None)

    def plan(self, collective: Collective, _: int) -> Schedule:
        return plan_tree(TOPOLOGY, collective)

    def start(self, *_: Any, **settings: Any) -> Any:
        self.calls.append(settings)
        return SimpleNamespace()


def plans(*num_elements: int) -> tuple[BucketPlan, ...]:
    """Return a bucket for each number."""
    cpu = torch.device("cpu")
    entries = [
        ParameterEntry(name="p", group=0, shape=(number,), stride=(1,), dtype=torch.float32, device=cpu)
        for number in num_elements
    ]
    return plan_buckets(entries, bucket_bytes=4)


@pytest.mark.parametrize("is_divided", [True, False])
def test_a_bucket_has_as_many_slices_as_come_nearest_to_the_wanted_size(is_divided: bool) -> None:
    communicator: Any = Recorder(slice_bytes=1000)
    bucket_schedules = plan_bucket_schedules(
        communicator,
        plans(10, 250, 270, 370, 380, 630, 5000),
        BucketScheduleOptions(is_divided=is_divided),
        first_stream=1,
    )
    assert [len(bucket_schedule.layout.slices) for bucket_schedule in bucket_schedules] == [1, 1, 1, 1, 2, 3, 20]


@pytest.mark.parametrize("name", ["deep-asymmetric", "three-racks-uneven-uplinks"])
def test_buckets_that_follow_each_other_are_planned_as_part_of_all(name: str) -> None:
    """Alone a small one would take fewer steps, with half as much again on the busiest link, or more."""
    communicator: Any = Recorder()
    communicator.topology = topology = Topology.load(name)
    communicator.plan = Plans(topology, slice_bytes=None).schedule
    num_bytes, slice_bytes = 256 << 10, predicted_slice_bytes(topology)
    options = BucketScheduleOptions(is_divided=False)
    planned = plan_bucket_schedules(communicator, plans(*[num_bytes // 4] * 32), options, first_stream=1)
    (schedule,) = {
        id(one.schedules[Collective.ALL_REDUCE]): one.schedules[Collective.ALL_REDUCE] for one in planned
    }.values()
    alone = communicator.plan(Collective.ALL_REDUCE, num_bytes)
    together_s, alone_s = (predict(one, topology, 32 * num_bytes, slice_bytes).time_s for one in (schedule, alone))
    assert alone_s > 1.2 * together_s


RACKS = Topology.load("two-racks-5-3")


@pytest.mark.parametrize("replicate", [1, ["rack-a", "rack-b"]])
def test_each_replica_owns_a_bucket_once(replicate: Any) -> None:
    owned = []
    for rank in range(8):
        communicator: Any = Recorder()
        communicator.rank, communicator.topology = rank, RACKS
        options = BucketScheduleOptions(is_divided=True, replicate=replicate)
        for schedule in plan_bucket_schedules(communicator, plans(330, 470), options, first_stream=1):
            assert schedule.replicas == find_replicas(RACKS, 1)
            ranges = [pair for group in schedule.owned for pair in group]
            owned.append(sum(stop - start for start, stop in ranges))
    assert (sum(owned[:10]), sum(owned[10:])) == (800, 800)


def test_reduce_scatters_go_first_in_backward_order_and_then_all_gathers_in_forward_order() -> None:
    communicator: Any = Recorder()
    buckets = plans(10, 20, 30)
    bucket_schedules = plan_bucket_schedules(
        communicator, buckets, BucketScheduleOptions(is_divided=True), first_stream=1
    )
    collectives = BucketCollectives(communicator, control=communicator, bucket_schedules=bucket_schedules)
    begun = []
    for plan in reversed(buckets):
        memory = torch.zeros(plan.num_elements)
        bucket = Bucket(plan, parameters=memory, gradients=memory.clone(), owners=())
        collectives.start(bucket, Collective.ALL_GATHER, 0)
        collectives.start(bucket, Collective.REDUCE_SCATTER, 1)
        begun += [f"gather {plan.index}", f"reduce {plan.index}"]
    order = sorted(range(len(begun)), key=lambda place: communicator.calls[place]["urgency"])
    expected = ["reduce 2", "reduce 1", "reduce 0", "gather 0", "gather 1", "gather 2"]
    assert [begun[place] for place in order] == expected


def test_all_reduces_go_in_backward_order() -> None:
    communicator: Any = Recorder()
    buckets = plans(10, 20, 30)
    bucket_schedules = plan_bucket_schedules(
        communicator, buckets, BucketScheduleOptions(is_divided=False), first_stream=1
    )
    collectives = BucketCollectives(communicator, control=communicator, bucket_schedules=bucket_schedules)
    for plan in buckets:
        memory = torch.zeros(plan.num_elements)
        bucket = Bucket(plan, parameters=memory, gradients=memory.clone(), owners=())
        collectives.start(bucket, Collective.ALL_REDUCE, 0)
    urgencies = [call["urgency"] for call in communicator.calls]
    assert urgencies == sorted(urgencies, reverse=True)
    assert len(set(urgencies)) == 3


@pytest.fixture
def planned_on(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let one of any number of ranks plan for all; return whose planning has begun, each by the thread's rank."""
    planned: list[int] = []
    plan = bucket_schedule.plan_sharded_step
    monkeypatch.setattr(bucket_schedule, "MOST_PLANNING", 1)
    monkeypatch.setattr(bucket_schedule, "plan_sharded_step", lambda *a, **k: (planned.append(1), plan(*a, **k))[1])
    return planned


def on_all(work: Callable[[Communicator], Any]) -> list[Any]:
    """Run ``work`` on all ranks of two racks; return what each returned, or raised."""
    communicators = communicators_in_memory(8, RACKS)

    def run(communicator: Communicator) -> Any:
        try:
            return work(communicator)
        except SynclineError as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(run, communicators))
    for communicator in communicators:
        communicator.abort()
    return found


def plan_together(communicator: Communicator, **settings: Any) -> tuple[Any, ...]:
    options = BucketScheduleOptions(is_divided=True)
    return plan_bucket_schedules(
        communicator, plans(33_000, 47_000), options, first_stream=1, is_together=True, **settings
    )


def test_of_many_ranks_one_plans_and_all_have_what_each_would_have_planned(planned_on: list[int]) -> None:
    found = on_all(plan_together)
    assert len(planned_on) == 1
    alone = on_all(
        lambda communicator: plan_bucket_schedules(
            communicator, plans(33_000, 47_000), BucketScheduleOptions(is_divided=True), first_stream=1
        )
    )
    assert len(planned_on) == 9
    for told, own in zip(found, alone, strict=True):
        for one, other in zip(told, own, strict=True):
            assert one.owned == other.owned
            assert one.layout == other.layout
            assert {half: plan.digest for half, plan in one.schedules.items()} == {
                half: plan.digest for half, plan in other.schedules.items()
            }


def test_where_the_one_cannot_plan_all_say_why(planned_on: list[int]) -> None:
    errors = on_all(lambda communicator: plan_together(communicator, most=[0.1] * 8))
    assert all(isinstance(error, ScheduleError) for error in errors)
    assert {str(error) for error in errors} == {str(errors[0])}
    assert "may own 0.8 of it at most" in str(errors[0])
    assert len(planned_on) == 9


def test_all_are_told_of_a_rank_that_is_lost_while_it_plans(
    planned_on: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(communicator: Communicator) -> Any:
        if communicator.rank == 0:
            monkeypatch.setattr(bucket_schedule, "pack_step", lambda _: communicator.abort("killed") or b"never sent")
        return plan_together(communicator)

    _, *errors = on_all(work)
    assert all(isinstance(error, PeerLostError) for error in errors)
    assert all(error.ranks_at_fault == (0,) for error in errors)
