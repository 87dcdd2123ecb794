"""Every planner, every collective, random trees: the result is the plain sum, and what is promised is owned."""

import numpy as np
import pytest
import reference
from hypothesis import example, given, settings as effort, strategies as st
from schedule_trees import balanced_tree, trees

from syncline.errors import ScheduleError
from syncline.schedule import PLANNERS, Collective, Layout, choose, plan_sharded_step, predict
from syncline.topology import Topology

SIZES = st.sampled_from([0, 1, 2, 3, 7, 31, 97, 211])
PAIRS = [(planner, collective) for planner in PLANNERS.values() for collective in sorted(planner.collectives)]


@pytest.mark.parametrize(("planner", "collective"), PAIRS, ids=lambda value: getattr(value, "name", value))
@effort(max_examples=10)
@given(trees(), SIZES, st.sampled_from(["balanced", "rank_order"]), st.integers(15, 100), st.data())
@example(Topology.flat(1), 5, "balanced", 3, None)
@example(balanced_tree([2, 3]), 7, "rank_order", 4, None)
def test_result_is_the_plain_sum(planner, collective, topology, num_elements, target, slice_elements, data):
    root = data.draw(st.integers(0, topology.num_ranks - 1)) if data else 0
    schedule = planner.plan(topology, collective, target=target, root=root)
    layout = Layout.build(schedule, num_elements, slice_elements)
    reference.check(schedule, layout)
    if collective.needs_owners:
        assert reference.owns_everything_once(schedule, layout)


@pytest.mark.parametrize(
    ("planner", "collective"),
    [pair for pair in PAIRS if pair[1].needs_owners],
    ids=lambda value: getattr(value, "name", value),
)
@effort(max_examples=10)
@given(trees(), SIZES, st.integers(1, 50))
def test_rank_order_gives_rank_k_the_kth_part(planner, collective, topology, num_elements, slice_elements):
    num_ranks = topology.num_ranks
    schedule = planner.plan(topology, collective, target="rank_order")
    layout = Layout.contiguous(schedule, num_elements, slice_elements)
    for rank in range(num_ranks):
        part = (rank * num_elements // num_ranks, (rank + 1) * num_elements // num_ranks)
        assert layout.owned_ranges(schedule, rank) == ((part,) if part[0] < part[1] else ())
    reference.check(schedule, layout)


def test_planner_refuses_a_collective_that_it_does_not_know():
    with pytest.raises(ScheduleError, match="'binomial' plans broadcast, not all_reduce; take another planner"):
        PLANNERS["binomial"].plan(Topology.flat(3), Collective.ALL_REDUCE)


@effort(max_examples=10)
@given(trees(), st.sampled_from(sorted(Collective)), st.sampled_from([1, 1000, 10**6, 10**8]))
def test_choice_is_the_fastest_by_prediction(topology, collective, num_bytes):
    chosen = predict(choose(topology, collective, num_bytes), topology, num_bytes).time_s
    for planner in PLANNERS.values():
        if collective in planner.collectives:
            assert chosen <= predict(planner.plan(topology, collective), topology, num_bytes).time_s


def test_small_messages_choose_latency_and_large_ones_bandwidth():
    topology = Topology.load("two-racks-5-3")
    assert choose(topology, Collective.ALL_REDUCE, 1024).planner == "recursive_doubling"
    assert choose(topology, Collective.BROADCAST, 1024).planner == "binomial"
    assert choose(topology, Collective.ALL_REDUCE, 16 << 20).planner == "tree"
    uneven = Topology.load("three-racks-uneven-uplinks")
    assert choose(uneven, Collective.ALL_REDUCE, 16 << 20).planner == "weighted_tree"


def test_every_process_plans_the_same():
    topology = Topology.load("deep-asymmetric")
    digests = {choose(topology, Collective.ALL_REDUCE, 1 << 20).digest for _ in range(3)}
    assert len(digests) == 1


@pytest.mark.parametrize(
    "name", [name for name, planner in PLANNERS.items() if Collective.ALL_REDUCE in planner.collectives]
)
@effort(max_examples=10)
@given(trees(max_ranks=13), st.integers(0, 2**32 - 1))
def test_all_ranks_end_with_the_same_bits(name, topology, seed):
    schedule = PLANNERS[name].plan(topology, Collective.ALL_REDUCE)
    layout = Layout.build(schedule, 101, 101)
    rng = np.random.default_rng(seed)
    scales = 10.0 ** rng.integers(-6, 6, (topology.num_ranks, 101))
    begun = (rng.standard_normal((topology.num_ranks, 101)) * scales).astype(np.float32)
    buffers = reference.run(schedule, layout, list(begun.copy()))
    assert len({buffer.tobytes() for buffer in buffers}) == 1
    np.testing.assert_allclose(buffers[0], begun.astype(np.float64).sum(axis=0), rtol=1e-4, atol=1e-1)


def test_a_topology_that_would_take_very_long_to_plan_is_refused_at_once():
    topology = Topology.flat(4097)
    for plan in (PLANNERS["tree"].plan, lambda *given: choose(*given, 1 << 20)):
        with pytest.raises(ScheduleError, match="4097 ranks, and schedules are planned for at most 4096"):
            plan(topology, Collective.ALL_REDUCE)
    with pytest.raises(ScheduleError, match="planned for at most 4096"):
        plan_sharded_step(topology, 1 << 20)
