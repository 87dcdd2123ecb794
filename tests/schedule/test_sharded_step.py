"""Sharded steps: near the least time of links, within caps, the same in every process; and what they cost."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import reference
from hypothesis import given, settings as effort, strategies as st
from schedule_trees import links, star, trees

from syncline.errors import ScheduleError
from syncline.schedule import (
    Collective,
    CostModel,
    ShardedStep,
    layout_of_step,
    lower_bound,
    plan_sharded_step,
    plan_tree,
    predict_sharded_step,
    sharded_step_bound,
)
from syncline.schedule.sharded_step import pack_step, unpack_step
from syncline.topology import Topology
from syncline.topology.document import shipped_names

SIZE = 64 << 20
WIRE = CostModel.of_links_alone()
HALVES = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)


def capped(topology):
    return [min(1.0, 1.25 / topology.num_ranks)] * topology.num_ranks


def over_bound(topology, most):
    """What a step takes beyond the bound, if links alone cost anything."""
    step = plan_sharded_step(topology, SIZE, most=most, portions="fastest", cost=WIRE)
    assert all(share <= part + 1e-4 for share, part in zip(step.shares, most, strict=True))
    bound = sharded_step_bound(topology, SIZE, most=most)
    return predict_sharded_step(step, topology, SIZE, cost=WIRE).time_s / bound if bound else 1.0


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_topologies_are_within_a_tenth_of_the_bound(name):
    topology = Topology.load(name)
    assert 1 - 1e-6 <= over_bound(topology, capped(topology)) < 1.05
    assert 1 - 1e-6 <= over_bound(topology, [1.0] * topology.num_ranks) < 1.1


@effort(max_examples=20)
@given(trees(max_ranks=16, max_degree=4))
def test_random_trees_are_within_a_tenth_of_the_bound(topology):
    assert 1 - 1e-6 <= over_bound(topology, capped(topology)) < 1.1


@effort(max_examples=10)
@given(trees(max_ranks=12, link=links(st.integers(1, 1000).map(lambda rate: rate * 1e6))))
def test_the_bound_of_a_step_is_no_less_than_those_of_its_halves_and_no_plan_is_below_it(topology):
    bound = sharded_step_bound(topology, SIZE)
    assert bound >= sum(lower_bound(topology, half, SIZE) for half in HALVES) * (1 - 1e-6)
    assert sharded_step_bound(topology, SIZE, most=capped(topology)) >= bound * (1 - 1e-6)
    for portions in ("balanced", "fastest"):
        step = plan_sharded_step(topology, SIZE, portions=portions)
        busiest = [max(half.link_s.values()) for half in _halves(predict_sharded_step(step, topology, SIZE, cost=WIRE))]
        assert sum(busiest) >= bound * (1 - 1e-6)


def _halves(prediction):
    return prediction.reduce_scatter, prediction.all_gather


@effort(max_examples=10)
@given(trees(max_ranks=10), st.sampled_from([1, 1000, 10**6, 10**8]), st.integers(0, 200), st.integers(1, 50))
def test_a_step_sums_and_gathers(topology, num_bytes, num_elements, slice_elements):
    step = plan_sharded_step(topology, num_bytes)
    layout = layout_of_step(step, num_elements, slice_elements)
    for half in (step.reduce_scatter, step.all_gather):
        reference.check(half, layout)
        assert reference.owns_everything_once(half, layout)


@pytest.mark.parametrize("name", shipped_names())
def test_balanced_owners_are_nearly_equal_or_a_tenth_of_the_time_is_at_stake(name):
    topology = Topology.load(name)
    fastest, balanced = (plan_sharded_step(topology, SIZE, portions=portions) for portions in ("fastest", "balanced"))
    fastest_s, balanced_s = (predict_sharded_step(step, topology, SIZE).time_s for step in (fastest, balanced))
    assert balanced_s <= 1.1 * fastest_s
    if max(balanced.shares) > 1.25 / topology.num_ranks + 1e-4:
        equal = plan_sharded_step(topology, SIZE, portions="fastest", most=capped(topology))
        assert predict_sharded_step(equal, topology, SIZE).time_s > 1.1 * fastest_s
        assert max(balanced.shares) <= max(fastest.shares)


def test_a_cap_rises_where_equal_portions_would_cost_much():
    """Of the slow link's rank half must go up and half come down, whatever it owns; a third costs a third more."""
    topology = star([(1e6, 1e6), (1e9, 1e9), (1e9, 1e9)])
    assert plan_sharded_step(topology, SIZE, portions="fastest").shares[0] == pytest.approx(0.5, abs=0.01)
    assert 0.42 < plan_sharded_step(topology, SIZE).shares[0] < 0.5


@effort(max_examples=13)
@given(trees(max_ranks=14), st.sampled_from([1, 1.25, 2.0, 50.0]))
def test_a_number_is_a_cap_that_holds_whatever_it_costs(topology, cap):
    step = plan_sharded_step(topology, SIZE, portions=cap)
    assert max(step.shares) <= cap / topology.num_ranks + 1 / 16384
    fastest_s, capped_s = (
        predict_sharded_step(one, topology, SIZE, cost=WIRE).time_s
        for one in (plan_sharded_step(topology, SIZE, portions="fastest", cost=WIRE), step)
    )
    assert cap < 50 or capped_s <= 1.1 * fastest_s, "a cap above everything limits nothing"


def test_a_cap_above_what_memory_allows_is_refused():
    with pytest.raises(ScheduleError, match=r"portions=1 no rank owns more than 0.25 .* take larger portions"):
        plan_sharded_step(Topology.flat(4, rate=1e6), 1000, portions=1, most=[0.1, 0.5, 0.5, 0.5])


def test_exact_portions_are_met():
    topology = Topology.load("three-racks-uneven-uplinks")
    portions = [0.2, 0.05, 0.05, 0.3, 0.0, 0.1, 0.1, 0.1, 0.1]
    step = plan_sharded_step(topology, 1 << 20, portions=portions)
    assert step.shares == pytest.approx(portions, abs=1e-4)
    with pytest.raises(ScheduleError, match=r"may own 0.1 at most; give it a smaller portion"):
        plan_sharded_step(topology, 1 << 20, portions=portions, most=[0.1] * 3 + [0.2] * 6)
    equal = plan_sharded_step(topology, 1 << 20, portions=[1 / 9] * 9)
    assert equal.shares == pytest.approx([1 / 9] * 9, abs=1e-12)


def test_what_memory_allows_goes_before_all_else():
    topology = Topology.load("deep-asymmetric")
    most = [0.02, 0.3, *[1 / 8] * 8]
    step = plan_sharded_step(topology, 1 << 20, most=most)
    assert all(share <= part + 1e-4 for share, part in zip(step.shares, most, strict=True))
    tight = [0.1] * 10
    assert plan_sharded_step(topology, 1 << 20, most=tight).shares == pytest.approx(tight, abs=1e-4)


def test_too_little_memory_and_portions_that_cannot_be_are_refused():
    topology = Topology.flat(4, rate=1e6)
    for call in (plan_sharded_step, sharded_step_bound):
        with pytest.raises(ScheduleError, match="of it at most; give ranks more memory"):
            call(topology, 1000, most=[0.2] * 4)
        with pytest.raises(ScheduleError, match="each of 4 ranks may own some part"):
            call(topology, 1000, most=[0.5, -0.1, 0.5, 0.5])
    for portions in ([0.5] * 4, [1.0], [1.5, -0.5, 0.0, 0.0]):
        with pytest.raises(ScheduleError, match="portions are one for each of 4 ranks"):
            plan_sharded_step(topology, 1000, portions=portions)
    with pytest.raises(ScheduleError, match="at least 0 bytes"):
        sharded_step_bound(topology, -1)


def test_halves_of_different_owners_are_no_step():
    scatter = plan_tree(Topology.flat(3), Collective.REDUCE_SCATTER)
    other = plan_tree(Topology.load("two-racks-5-3"), Collective.ALL_GATHER)
    for gather in (other, scatter):
        with pytest.raises(ScheduleError, match="same cuts and owners"):
            ShardedStep(reduce_scatter=scatter, all_gather=gather)


def test_without_rates_owners_are_equal():
    step = plan_sharded_step(Topology.flat(6), 1 << 20)
    assert step.shares == pytest.approx([1 / 6] * 6)
    assert sharded_step_bound(Topology.flat(6), 1 << 20) == 0.0
    assert plan_sharded_step(Topology.flat(1), 1 << 20).shares == (1.0,)


def test_every_process_plans_the_same():
    program = (
        "from syncline.schedule import plan_sharded_step\nfrom syncline.topology import Topology\n"
        "step = plan_sharded_step(Topology.load('deep-asymmetric'), 1 << 24)\n"
        "print(step.reduce_scatter.digest, step.all_gather.digest)"
    )
    step = plan_sharded_step(Topology.load("deep-asymmetric"), 1 << 24)
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.split() == [step.reduce_scatter.digest, step.all_gather.digest]


def test_updating_in_the_backward_pass_uses_both_directions_at_once():
    """Of two ranks one owns everything: what is reduced goes one way, what is gathered the other."""
    topology = Topology.flat(2, rate=125e6)
    one, both = (
        predict_sharded_step(plan_sharded_step(topology, SIZE, portions=portions), topology, SIZE, cost=WIRE)
        for portions in ([1.0, 0.0], [0.5, 0.5])
    )
    assert one.time_s == pytest.approx(2 * SIZE / 125e6)
    assert one.overlapped_s == pytest.approx(SIZE / 125e6, rel=0.02)
    assert both.overlapped_s == pytest.approx(both.time_s), "halves that fill both directions gain nothing"
    assert both.time_s == pytest.approx(SIZE / 125e6)


def test_ranks_behind_gateways_own_nothing():
    hosts = "{host: 'a[0-1]', uplink: 1 Gbit/s, ranks: 3, gateway: one}, {host: b, uplink: 1 Gbit/s}"
    topology = Topology.parse(f"{{switch: s, children: [{hosts}]}}")
    step = plan_sharded_step(topology, SIZE)
    assert step.shares == pytest.approx([1 / 3, 0, 0, 1 / 3, 0, 0, 1 / 3], abs=1e-4)
    assert sharded_step_bound(topology, SIZE) == pytest.approx(4 / 3 * SIZE / 125e6)
    with pytest.raises(ScheduleError, match=r"rank 1 is to own 0.1429 of everything, but may own 0 at most"):
        plan_sharded_step(topology, SIZE, portions=[1 / 7] * 7)
    one_host = Topology.parse("{host: a, ranks: 3, gateway: one}")
    assert plan_sharded_step(one_host, SIZE).shares == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("topology", [Topology.load("deep-asymmetric"), Topology.flat(70, rate=1e8)])
@pytest.mark.parametrize("spares", [0, 1])
def test_a_packed_step_is_the_same_and_proved_anew(topology, spares):
    step = plan_sharded_step(topology, SIZE, spares=spares)
    packed = pack_step(step)
    again = unpack_step(bytearray(packed))
    assert again.reduce_scatter.digest == step.reduce_scatter.digest
    assert again.all_gather.digest == step.all_gather.digest
    assert (again.apart, again.shares, again.spare_shares) == (step.apart, step.shares, step.spare_shares)
    assert [half.planner for half in (again.reduce_scatter, again.all_gather)] == [
        half.planner for half in (step.reduce_scatter, step.all_gather)
    ]
    assert len(packed) < 16 * (len(step.reduce_scatter.transfers) + len(step.all_gather.transfers)) + 4096


def test_a_packed_step_that_does_not_add_up_is_refused():
    step = plan_sharded_step(Topology.flat(4), SIZE)
    scatter = step.reduce_scatter
    wrong = SimpleNamespace(
        collective=scatter.collective,
        num_ranks=4,
        cuts=scatter.cuts,
        owners=scatter.owners,
        planner=scatter.planner,
        transfers=scatter.transfers.take(np.arange(1, len(scatter.transfers))),
    )
    packed = pack_step(SimpleNamespace(reduce_scatter=wrong, all_gather=step.all_gather, apart=None))
    with pytest.raises(ScheduleError, match="is refused"):
        unpack_step(packed)
