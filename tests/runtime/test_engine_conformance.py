"""Every planner, collective and dtype on random trees, in any order of delivery, gives the bits that its steps mean."""

import numpy as np
import pytest
from schedule_oracle import promised, random_topology, replay

from syncline.runtime import CollectiveCall, numpy_reduction
from syncline.runtime.reduction import DTYPES
from syncline.schedule import PLANNERS, UNOWNED, Collective, Draft, Layout, Transfer, Transfers, plan_tree, verify
from syncline.schedule.replicas import draft_in_replicas, find_replicas
from syncline.topology import Topology


def run_everywhere(communicators, schedule, layout, buffers, dtype, *, stream=1, urgency=0):
    """Run one call on all ranks, in place; returns the works."""
    return [
        communicator.submit(
            CollectiveCall(
                stream=stream,
                schedule=schedule,
                layout=layout,
                buffer=memoryview(buffer).cast("B"),
                reduction=numpy_reduction(dtype),
                label=f"{schedule.collective} of bucket {stream}",
                timeout_s=60.0,
                urgency=urgency,
            )
        )
        for communicator, buffer in zip(communicators, buffers, strict=True)
    ]


def random_buffers(num_ranks, num_elements, dtype, seed):
    source = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return [source.normal(size=num_elements).astype(dtype) for _ in range(num_ranks)]
    return [source.integers(0, 13, size=num_elements).astype(dtype) for _ in range(num_ranks)]


def check_against_oracle(make, topology, schedule, layout, dtype, seed, *, alike=False):
    communicators = make(topology.num_ranks, topology, seed=seed, max_inflight_bytes=3000)
    buffers = random_buffers(topology.num_ranks, layout.num_elements, dtype, seed)
    if alike:
        buffers = [buffers[0].copy() for _ in buffers]
        for rank, buffer in enumerate(buffers):
            mine = np.zeros(len(buffer), dtype=bool)
            for start, stop in layout.owned_ranges(schedule, rank):
                mine[start:stop] = True
            buffer[~mine] = rank  # what it must not pass on
    expected = replay(schedule, layout, buffers)
    got = [buffer.copy() for buffer in buffers]
    for work in run_everywhere(communicators, schedule, layout, got, dtype):
        work.wait(60)
    for rank in range(topology.num_ranks):
        assert got[rank].tobytes() == expected[rank].tobytes(), f"seed {seed}, rank {rank}"
        values, ranges = promised(schedule, layout, buffers, rank)
        for start, stop in ranges:
            tolerance = {"float16": 0.05, "float32": 1e-5}.get(dtype, 1e-12)
            np.testing.assert_allclose(got[rank][start:stop], values[start:stop], rtol=0, atol=tolerance * 10)


@pytest.mark.parametrize("collective", list(Collective))
@pytest.mark.parametrize("seed", range(8))
def test_tree_schedules_on_random_trees(anywhere, collective, seed):
    topology = random_topology(seed)
    target = "rank_order" if seed % 2 and collective is not Collective.BROADCAST else "balanced"
    schedule = plan_tree(topology, collective, target=target, root=seed % topology.num_ranks)
    num_elements = [0, 1, 7, 997, 6001][seed % 5]
    build = [Layout.build, Layout.contiguous][seed % 2]
    layout = build(schedule, num_elements, 500)
    check_against_oracle(anywhere, topology, schedule, layout, DTYPES[seed % len(DTYPES)], seed)


@pytest.mark.parametrize("planner", PLANNERS.values(), ids=lambda planner: planner.name)
@pytest.mark.parametrize("seed", range(200, 203))
def test_every_planner_on_random_trees(anywhere, planner, seed):
    topology = random_topology(seed)
    for number, collective in enumerate(sorted(planner.collectives)):
        schedule = planner.plan(topology, collective, root=topology.num_ranks - 1)
        num_elements = [3, 5000, 999, 1][(seed + number) % 4]
        check_against_oracle(anywhere, topology, schedule, Layout.build(schedule, num_elements, 400), "float32", seed)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("seed", range(300, 303))
def test_parts_of_an_all_reduce_with_replicas(anywhere, part, seed):
    topology = random_topology(seed)
    replicas = find_replicas(topology, 1 + seed % 2)
    schedule = verify(draft_in_replicas(plan_tree(topology, Collective.ALL_REDUCE).draft, replicas)[part])
    layout = Layout.build(schedule, [0, 7, 6001][seed % 3], 500)
    check_against_oracle(anywhere, topology, schedule, layout, "float32", seed, alike=part == 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_on_an_uneven_tree(anywhere, dtype):
    topology = Topology.load("two-racks-5-3")
    schedule = plan_tree(topology, Collective.ALL_REDUCE)
    check_against_oracle(anywhere, topology, schedule, Layout.build(schedule, 4099, 1024), dtype, seed=5)


def test_large_messages_wait_for_their_receives(anywhere):
    topology = Topology.flat(3)
    schedule = plan_tree(topology, Collective.ALL_REDUCE)
    check_against_oracle(anywhere, topology, schedule, Layout.build(schedule, 100_000, 30_000), "float32", seed=3)


@pytest.mark.parametrize("op", ["max", "min"])
def test_extrema_of_large_buffers(anywhere, op):
    topology = Topology.load("two-racks-5-3")
    communicators = anywhere(8, topology, seed=3, max_inflight_bytes=100_000)
    buffers = random_buffers(8, 50_000, "float32", 3)
    expected = {"max": np.max, "min": np.min}[op](buffers, axis=0)
    adds = numpy_reduction("float32", op)
    works = [c.all_reduce(memoryview(b).cast("B"), adds) for c, b in zip(communicators, buffers, strict=True)]
    for work in works:
        work.wait(60)
    assert all(buffer.tobytes() == expected.tobytes() for buffer in buffers)


def recursive_doubling(num_ranks):
    """Every rank sends the whole range to its partner while it receives into the same range: all hazards at once."""
    rows = []
    step, distance = 0, 1
    while distance < num_ranks:
        rows += [Transfer(step, rank, rank ^ distance, 0, 1, True) for rank in range(num_ranks)]
        step, distance = step + 1, distance * 2
    return verify(
        Draft(
            collective=Collective.ALL_REDUCE,
            num_ranks=num_ranks,
            cuts=(0, 1),
            transfers=Transfers.of(rows),
            owners=np.zeros(1, np.int32),
            planner="recursive doubling of the test",
        )
    )


@pytest.mark.parametrize("num_elements", [1, 50, 20_000])
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_adding_into_a_range_that_is_being_sent(anywhere, num_elements, seed):
    schedule = recursive_doubling(8)
    layout = Layout.build(schedule, num_elements, 6000)
    check_against_oracle(anywhere, Topology.flat(8), schedule, layout, "float32", seed or 0)


def swap_of_results(num_ranks):
    """A reduction to rank 0, a broadcast, and then neighbours swap what they hold: copies over what is being sent."""
    rows = [Transfer(0, rank, 0, 0, 2, True) for rank in range(1, num_ranks)]
    rows += [Transfer(1, 0, rank, 0, 2, False) for rank in range(1, num_ranks)]
    rows += [Transfer(2, rank, rank ^ 1, 0, 2, False) for rank in range(num_ranks)]
    return Draft(
        collective=Collective.ALL_REDUCE,
        num_ranks=num_ranks,
        cuts=(0, 1, 3),
        transfers=Transfers.of(rows),
        owners=np.full(2, UNOWNED),
        planner="swap of the test",
    )


@pytest.mark.parametrize("num_elements", [2, 30_000])
@pytest.mark.parametrize("seed", [1, 2])
def test_copying_over_a_range_that_is_being_sent_does_not_wait_in_a_circle(anywhere, num_elements, seed):
    schedule = verify(swap_of_results(4))
    layout = Layout.build(schedule, num_elements, 50_000)
    check_against_oracle(anywhere, Topology.flat(4), schedule, layout, "float64", seed)


@pytest.mark.parametrize("seed", range(4))
def test_many_calls_at_once_in_another_order_on_each_rank(in_memory, seed):
    topology = random_topology(seed + 100, max_ranks=6)
    communicators = in_memory(topology.num_ranks, topology, seed=seed, max_inflight_bytes=4096)
    schedule = plan_tree(topology, Collective.ALL_REDUCE)
    layout = Layout.build(schedule, 3001, 700)
    streams = list(range(1, 13))
    buffers = {stream: random_buffers(topology.num_ranks, 3001, "float32", stream) for stream in streams}
    expected = {stream: replay(schedule, layout, buffers[stream]) for stream in streams}
    works = []
    for rank, communicator in enumerate(communicators):
        for stream in np.random.default_rng([seed, rank]).permutation(streams).tolist():
            works += run_everywhere(
                [communicator],
                schedule,
                layout,
                [buffers[stream][rank]],
                "float32",
                stream=stream,
                urgency=(stream * (rank + 1)) % 5,
            )
    for work in works:
        work.wait(60)
    for stream in streams:
        for rank in range(topology.num_ranks):
            assert np.array_equal(buffers[stream][rank], expected[stream][rank]), f"seed {seed}"


def test_the_order_of_delivery_does_not_change_a_bit(in_memory):
    topology = Topology.load("two-racks-5-3")
    schedule = plan_tree(topology, Collective.ALL_REDUCE)
    layout = Layout.build(schedule, 5003, 1000)
    results = set()
    for seed in (None, *range(5)):
        communicators = in_memory(8, topology, seed=seed)
        buffers = random_buffers(8, 5003, "float32", 77)
        for work in run_everywhere(communicators, schedule, layout, buffers, "float32"):
            work.wait(60)
        results.update(buffer.tobytes() for buffer in buffers)
    assert len(results) == 1


def test_one_switch_sums_in_rank_order(in_memory):
    communicators = in_memory(6, seed=1, planner=lambda topology, collective, *_: plan_tree(topology, collective))
    buffers = random_buffers(6, 1000, "float32", 3)
    expected = buffers[0]
    for buffer in buffers[1:]:
        expected = expected + buffer
    works = [
        communicator.all_reduce(memoryview(buffer).cast("B"), numpy_reduction("float32"))
        for communicator, buffer in zip(communicators, buffers, strict=True)
    ]
    for work in works:
        work.wait(60)
    assert all(np.array_equal(buffer, expected) for buffer in buffers)


def test_a_buffer_of_more_than_two_gibibytes(in_memory):
    (alone,) = in_memory(1)
    buffer = np.zeros((1 << 31) + 5, np.uint8)  # sparse: nothing is ever written to it
    alone.all_reduce(memoryview(buffer), numpy_reduction("uint8")).wait(60)


def test_offsets_beyond_two_gibibytes(in_memory):
    communicators = in_memory(2, seed=0)
    schedule = plan_tree(Topology.flat(2), Collective.ALL_REDUCE)
    num_elements = (1 << 31) + 16
    start = num_elements - 16
    layout = Layout(slices=((start, start + 8, start + 16),), num_elements=num_elements)
    buffers = [np.zeros(num_elements, np.uint8) for _ in range(2)]  # sparse: only the last page is touched
    for rank, buffer in enumerate(buffers):
        buffer[-16:] = rank + 1
    for work in run_everywhere(communicators, schedule, layout, buffers, "uint8"):
        work.wait(60)
    assert [buffer[-16:].tolist() for buffer in buffers] == [[3] * 16, [3] * 16]
