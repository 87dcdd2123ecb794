"""The lower bound is one: nothing is predicted below it. And it is tight where it should be."""

import math

import pytest
from hypothesis import example, given, settings as effort, strategies as st
from schedule_trees import star, trees

from syncline.errors import ScheduleError
from syncline.schedule import PLANNERS, Collective, lower_bound, predict
from syncline.topology import Topology

SIZE = 64 << 20
SYMMETRIC = [(rate, rate) for rate in (10e6, 20e6, 40e6)]


@effort(max_examples=20)
@given(trees(max_ranks=16), st.sampled_from(sorted(Collective)), st.sampled_from(["balanced", "rank_order"]), st.data())
@example(star(SYMMETRIC), Collective.REDUCE_SCATTER, "balanced", None)
def test_no_planner_is_predicted_below_the_bound(topology, collective, target, data):
    root = data.draw(st.integers(0, topology.num_ranks - 1)) if data else 0
    bound = lower_bound(topology, collective, SIZE, target=target, root=root)
    assert bound <= lower_bound(topology, collective, SIZE, target="rank_order", root=root) * (1 + 1e-9)
    for planner in PLANNERS.values():
        if collective in planner.collectives:
            schedule = planner.plan(topology, collective, target=target, root=root)
            busiest = max(predict(schedule, topology, SIZE).link_s.values())
            assert busiest >= bound * (1 - 1e-9), planner.name


@pytest.mark.parametrize(
    ("topology", "collective", "expected"),
    [
        (Topology.flat(8, rate=1e6), Collective.ALL_REDUCE, 2 * 7 / 8),
        (Topology.flat(8, rate=1e6), Collective.REDUCE_SCATTER, 7 / 8),
        (Topology.flat(8, rate=1e6), Collective.ALL_GATHER, 7 / 8),
        (Topology.flat(8, rate=1e6), Collective.BROADCAST, 1),
        (star([(1e6, 1e6), (9e6, 9e6), (9e6, 9e6)]), Collective.ALL_REDUCE, 1),  # the slow link
        (star([(2e6, 2e6), (3e6, 3e6), (3e6, 3e6)]), Collective.ALL_REDUCE, 4 / 8),  # 2 (R - 1) S / sum
        (star([(1e6, 3e6), (9e6, 9e6)]), Collective.REDUCE_SCATTER, 1 / 4),  # x S down, (1 - x) S up
        (star([(1e6, 3e6), (9e6, 9e6)]), Collective.ALL_GATHER, 1 / 4),
        (star([(4e6, 1e6), (1e6, 4e6)]), Collective.BROADCAST, 1 / 4),
        (Topology.flat(1, rate=1e6), Collective.ALL_REDUCE, 0),
        (Topology.flat(4), Collective.ALL_REDUCE, 0),
    ],
)
def test_known_bounds(topology, collective, expected):
    assert lower_bound(topology, collective, 10**6) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_two_racks_are_bound_by_their_uplinks():
    topology = Topology.load("two-racks-5-3")
    assert lower_bound(topology, Collective.ALL_REDUCE, 16 << 20) == pytest.approx((16 << 20) / 25e6)


def test_ring_of_equal_links_reaches_the_bound():
    topology = Topology.flat(5, rate=1e6)
    busiest = max(predict(PLANNERS["ring"].plan(topology, Collective.ALL_REDUCE), topology, SIZE).link_s.values())
    assert busiest * 1448 / 1514 == pytest.approx(lower_bound(topology, Collective.ALL_REDUCE, SIZE))


def test_bound_grows_with_the_size_and_refuses_negative_ones():
    topology = Topology.flat(3, rate=1e6)
    assert lower_bound(topology, Collective.ALL_REDUCE, 0) == 0
    one = lower_bound(topology, Collective.ALL_REDUCE, 1)
    assert math.isclose(lower_bound(topology, Collective.ALL_REDUCE, 1000), 1000 * one)
    with pytest.raises(ScheduleError, match="at least 0 bytes, not -1"):
        lower_bound(topology, Collective.ALL_REDUCE, -1)
