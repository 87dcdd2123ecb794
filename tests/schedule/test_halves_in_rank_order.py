"""Halves in rank order: every rank sends an element once, and what direct exchange heaps on one link is spread."""

import numpy as np
import pytest
from hypothesis import given, settings as effort, strategies as st
from schedule_trees import balanced_tree, links, star, trees

from syncline.schedule import PLANNERS, Collective, CostModel, lower_bound, plan_tree, predict
from syncline.schedule.traffic import shares
from syncline.schedule.weighted_tree import MOST_RANKS
from syncline.topology import DirectedLink, Topology

plan_weighted_tree = PLANNERS["weighted_tree"].plan

SIZE = 64 << 20
WIRE = CostModel.of_links_alone()
HALVES = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)


def link_s(schedule, topology):
    return predict(schedule, topology, SIZE, cost=WIRE).link_s


def share_of_bound(schedule, topology):
    bound = lower_bound(topology, schedule.collective, SIZE, target="rank_order")
    return max(link_s(schedule, topology).values()) / bound


@effort(max_examples=30)
@given(
    trees(max_ranks=14, link=links(st.integers(1, 1000).map(lambda rate: rate * 1e6))).filter(
        lambda t: t.num_ranks > 1
    ),
    st.sampled_from(HALVES),
)
def test_random_trees_are_proved_and_nothing_is_sent_twice(topology, collective):
    schedule = plan_weighted_tree(topology, collective, target="rank_order")
    num_ranks = topology.num_ranks
    assert [
        schedule.owners[0, schedule.draft.cuts.index(rank * schedule.draft.denominator // num_ranks)]
        for rank in range(num_ranks)
    ] == list(range(num_ranks))
    sender = schedule.transfers.src if collective is Collective.REDUCE_SCATTER else schedule.transfers.dst
    sent = np.bincount(sender, shares(schedule.draft), num_ranks)
    assert sent == pytest.approx(np.full(num_ranks, 1 - 1 / num_ranks))
    away = "up" if collective is Collective.REDUCE_SCATTER else "down"
    carried = schedule.link_bytes(topology, 10_000 * num_ranks)
    for node in topology.walk():
        if node.link is not None:
            num_below = sum(node in topology.path(rank) for rank in range(num_ranks))
            least = 10_000 * (num_ranks - num_below)
            assert carried[DirectedLink(node.name, away)] == pytest.approx(least, abs=num_ranks * schedule.num_atoms)


def test_a_switch_of_many_unequal_hosts():
    topology = star([(100e6, 100e6 if rank else 50e6) for rank in range(MOST_RANKS)])
    schedule = plan_weighted_tree(topology, Collective.REDUCE_SCATTER, target="rank_order")
    assert share_of_bound(schedule, topology) < 1.02
    assert share_of_bound(plan_tree(topology, Collective.REDUCE_SCATTER, target="rank_order"), topology) > 1.9


@pytest.mark.parametrize("collective", HALVES)
def test_a_slow_host_is_told_once(collective):
    """Four hosts; one has a tenth of the others' rate in one direction, and direct exchange uses that three times."""
    slow = (100e6, 10e6) if collective is Collective.REDUCE_SCATTER else (10e6, 100e6)
    topology = star([(100e6, 100e6), slow, (100e6, 100e6), (100e6, 100e6)])
    direct = plan_tree(topology, collective, target="rank_order")
    spread = plan_weighted_tree(topology, collective, target="rank_order")
    assert share_of_bound(direct, topology) == pytest.approx(3.0, rel=0.01)
    assert share_of_bound(spread, topology) == pytest.approx(1.0, rel=0.01)


def test_three_levels_reach_the_bound():
    topology = Topology.load("deep-asymmetric")
    direct, spread = (
        plan(topology, Collective.ALL_GATHER, target="rank_order") for plan in (plan_tree, plan_weighted_tree)
    )
    assert share_of_bound(direct, topology) > 3.9
    assert share_of_bound(spread, topology) < 1.01


def test_of_two_that_reach_the_bound_the_one_with_fewer_full_links_is_taken():
    topology = Topology.load("deep-asymmetric")
    direct, spread = (
        plan(topology, Collective.REDUCE_SCATTER, target="rank_order") for plan in (plan_tree, plan_weighted_tree)
    )
    assert share_of_bound(direct, topology) < 1.01
    assert share_of_bound(spread, topology) < 1.01
    counts = [predict(schedule, topology, SIZE, cost=WIRE).num_full_links for schedule in (direct, spread)]
    assert counts == [3, 1]


def test_equal_links_keep_direct_exchange():
    for topology in (Topology.flat(8, rate=1e8), Topology.load("two-racks-5-3"), balanced_tree([[2, 2], [2, 2]])):
        for collective in HALVES:
            direct, weighted = (
                plan(topology, collective, target="rank_order") for plan in (plan_tree, plan_weighted_tree)
            )
            assert weighted.num_steps == direct.num_steps
            assert len(weighted.transfers) == len(direct.transfers)


def test_as_many_ranks_as_are_searched_for_are_planned():
    topology = balanced_tree([[4, 12, 8], [6, 2], [16, 7, 9]])
    assert topology.num_ranks == MOST_RANKS
    schedule = plan_weighted_tree(topology, Collective.ALL_GATHER, target="rank_order")
    assert share_of_bound(schedule, topology) < 1.1
