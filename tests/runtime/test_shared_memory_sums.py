"""Sums are made in the order of the schedule, to the bit."""

import numpy as np
import pytest
from schedule_oracle import random_topology, replay

from syncline.runtime import numpy_reduction
from syncline.runtime.shared_memory.operation import add_up, find_sums
from syncline.schedule import PLANNERS, Collective, Layout, plan_tree
from syncline.topology import Topology

plan_recursive_doubling = PLANNERS["recursive_doubling"].plan
plan_ring = PLANNERS["ring"].plan


def add_on(rank, terms, buffers, dtype):
    into = buffers[rank].copy()
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    add_up(terms, memoryview(into).cast("B"), views.__getitem__, numpy_reduction(dtype), own=rank)
    return into


@pytest.mark.parametrize(
    ("planner", "num_ranks", "expected"),
    [
        (plan_tree, 4, (0, 1, 2, 3)),
        (plan_recursive_doubling, 2, (0, 1)),
        (plan_recursive_doubling, 4, ((0, 1), (2, 3))),
        (plan_recursive_doubling, 8, (((0, 1), (2, 3)), ((4, 5), (6, 7)))),
    ],
)
def test_known_orders(planner, num_ranks, expected):
    schedule = planner(Topology.flat(num_ranks), Collective.ALL_REDUCE)
    assert find_sums(schedule, owned_only=False) == [expected] * num_ranks


def test_an_order_that_differs_from_range_to_range_is_not_one():
    schedule = plan_ring(Topology.flat(4), Collective.ALL_REDUCE)
    assert find_sums(schedule, owned_only=False) == [None] * 4


@pytest.mark.parametrize("planner", [plan_tree, plan_ring, plan_recursive_doubling])
@pytest.mark.parametrize("collective", [Collective.ALL_REDUCE, Collective.REDUCE_SCATTER])
@pytest.mark.parametrize("seed", range(6))
def test_the_bits_of_the_schedule(planner, collective, seed):
    topology = random_topology(seed, max_ranks=7) if planner is plan_tree else Topology.flat(2 + seed)
    schedule = planner(topology, collective)
    layout = Layout.build(schedule, 1001, 400)
    source = np.random.default_rng(seed)
    scales = 10.0 ** source.integers(-3, 4, size=topology.num_ranks)
    buffers = [(source.normal(size=1001) * scale).astype("f4") for scale in scales]
    expected = replay(schedule, layout, buffers)
    is_scattered = collective is Collective.REDUCE_SCATTER
    for rank, terms in enumerate(find_sums(schedule, owned_only=is_scattered)):
        if terms is None:
            continue
        found = add_on(rank, terms, buffers, "float32")
        ranges = layout.owned_ranges(schedule, rank) if is_scattered else [(0, 1001)]
        for start, stop in ranges:
            assert found[start:stop].tobytes() == expected[rank][start:stop].tobytes()
