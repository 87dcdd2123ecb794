"""The weighted tree: it reaches the lower bound of an all-reduce, and is never slower than equal portions."""

import functools
import itertools
import random

import pytest
from hypothesis import given, settings as effort, strategies as st
from schedule_trees import links, star, trees

from syncline.schedule import PLANNERS, Collective, CostModel, lower_bound, plan_tree, predict
from syncline.schedule.portions import best_fractions
from syncline.schedule.verifier import split_at_owners
from syncline.topology import Host, Link, Rank, Switch, Topology

plan_weighted_tree = PLANNERS["weighted_tree"].plan

SIZE = 64 << 20
WIRE = CostModel.of_links_alone()
RATES = st.integers(1, 1000).map(lambda rate: rate * 1e6)


def busiest(schedule, topology):
    return max(predict(schedule, topology, SIZE, cost=WIRE).link_s.values())


@effort(max_examples=30)
@given(st.lists(RATES, min_size=2, max_size=8))
def test_all_reduce_reaches_the_bound_of_one_parent(rates):
    topology = star([(rate, rate) for rate in rates])
    num_links = len(rates)
    bound = max(SIZE / min(rates), 2 * (num_links - 1) * SIZE / sum(rates))
    assert lower_bound(topology, Collective.ALL_REDUCE, SIZE) == pytest.approx(bound)
    reached = busiest(plan_weighted_tree(topology, Collective.ALL_REDUCE), topology)
    assert bound * (1 - 1e-9) <= reached <= bound * (1 + 0.003)


@effort(max_examples=20)
@given(trees(max_ranks=14, link=links(RATES)), st.randoms(use_true_random=False))
def test_no_other_fractions_of_an_all_reduce_are_better(topology, random):
    best = plan_tree(topology, Collective.ALL_REDUCE, fractions=best_fractions(topology, Collective.ALL_REDUCE))
    reached = busiest(best, topology)
    assert reached >= lower_bound(topology, Collective.ALL_REDUCE, SIZE) * (1 - 1e-9)
    for _ in range(8):
        fractions = {
            node.name: [random.randint(1, 100) for _ in node.children]
            for node in topology.walk()
            if not isinstance(node, Rank) and len(node.children) > 1
        }
        other = plan_tree(topology, Collective.ALL_REDUCE, fractions=fractions)
        assert reached <= busiest(other, topology) * (1 + 0.003)


def test_levels_that_are_equally_slow_keep_an_all_reduce_above_the_bound():
    link, local = Link.symmetric(1e6), Link.unlimited()
    hosts = [Host(name=f"h{rank}", link=link, ranks=(Rank(rank=rank, link=local),)) for rank in range(3)]
    inner = Switch(name="inner", link=link, children=tuple(hosts[:2]))
    topology = Topology(name="steps", root=Switch(name="top", link=None, children=(inner, hosts[2])))
    assert lower_bound(topology, Collective.ALL_REDUCE, SIZE) == pytest.approx(4 / 3 * SIZE / 1e6)
    assert busiest(plan_weighted_tree(topology, Collective.ALL_REDUCE), topology) == pytest.approx(1.5 * SIZE / 1e6)


@effort(max_examples=15)
@given(
    trees(max_ranks=16, link=links(RATES)),
    st.sampled_from(sorted(Collective)),
    st.sampled_from(["balanced", "rank_order"]),
    st.data(),
)
def test_never_slower_than_equal_portions(topology, collective, target, data):
    root = data.draw(st.integers(0, topology.num_ranks - 1))
    equal, weighted = (
        predict(plan(topology, collective, target=target, root=root), topology, 16 << 20).time_s
        for plan in (plan_tree, plan_weighted_tree)
    )
    assert weighted <= 1.02 * equal  # of two that should take about equally long, that with fewer full links


def direct_exchange_optimum(rates):
    """The least T of a reduce-scatter at one parent: f within [1 - T up, T down / (R - 1)] that sum to 1."""
    low, high = 0.0, 1.0
    for _ in range(60):
        time = (low + high) / 2
        ranges = [(max(0.0, 1 - time * up), min(1.0, time * down / (len(rates) - 1))) for up, down in rates]
        fits = all(least <= most for least, most in ranges)
        fits = fits and sum(least for least, _ in ranges) <= 1 <= sum(most for _, most in ranges)
        low, high = (low, time) if fits else (time, high)
    return high


@effort(max_examples=15)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=2, max_size=6))
def test_reduce_scatter_and_all_gather_are_the_best_direct_exchange_of_one_parent(rates):
    for collective, seen in (
        (Collective.REDUCE_SCATTER, rates),
        (Collective.ALL_GATHER, [(down, up) for up, down in rates]),
    ):
        topology = star([(up * 1e6, down * 1e6) for up, down in rates])
        schedule = plan_tree(topology, collective, fractions=best_fractions(topology, collective))
        optimum = direct_exchange_optimum(seen) * SIZE / 1e6
        assert busiest(schedule, topology) == pytest.approx(optimum, rel=0.005)


def test_unequal_uplinks_are_within_8_percent_of_the_bound():
    topology = Topology.load("three-racks-uneven-uplinks")
    bound = lower_bound(topology, Collective.ALL_REDUCE, SIZE)
    schedule = plan_weighted_tree(topology, Collective.ALL_REDUCE)
    assert predict(schedule, topology, SIZE).time_s <= 1.08 * bound
    assert predict(schedule, topology, 16 << 20, 256 << 10).time_s <= 1.08 * bound / 4
    assert predict(plan_tree(topology, Collective.ALL_REDUCE), topology, SIZE).time_s > 1.3 * bound


def test_three_levels_of_a_scatter_use_ratios_from_above():
    topology = Topology.load("deep-asymmetric")
    for collective, equal_ratio in itertools.product((Collective.REDUCE_SCATTER, Collective.ALL_GATHER), (0.76,)):
        weighted, equal = (busiest(plan(topology, collective), topology) for plan in (plan_weighted_tree, plan_tree))
        assert weighted <= equal_ratio * equal


def test_equal_links_keep_equal_portions():
    for topology in (Topology.flat(7, rate=1e8), Topology.load("two-racks-5-3"), Topology.flat(3), Topology.flat(1)):
        for collective in Collective:
            assert best_fractions(topology, collective) == {}


@pytest.mark.parametrize("seed", range(4))
def test_an_all_reduce_takes_an_in_tree_for_each_owner_where_links_differ_in_both_directions(seed):
    rate = functools.partial(random.Random(seed).uniform, 5e6, 20e6)

    def link():
        return Link(up_bytes_per_s=rate(), down_bytes_per_s=rate())

    hosts = [Host(name=f"h{rank}", link=link(), ranks=(Rank(rank=rank),)) for rank in range(16)]
    pods = [Switch(name=f"pod{k}", link=link(), children=tuple(hosts[4 * k : 4 * k + 4])) for k in range(4)]
    halves = [Switch(name=f"half{k}", link=link(), children=tuple(pods[2 * k : 2 * k + 2])) for k in range(2)]
    topology = Topology(name="uneven", root=Switch(name="top", link=None, children=tuple(halves)))
    fractions = best_fractions(topology, Collective.ALL_REDUCE)
    portions = plan_tree(topology, Collective.ALL_REDUCE, fractions=fractions)
    chosen = plan_weighted_tree(topology, Collective.ALL_REDUCE)
    assert busiest(chosen, topology) < 0.97 * busiest(portions, topology)
    scatter, gather = split_at_owners(chosen.draft)
    assert scatter.num_steps + gather.num_steps == chosen.num_steps
    assert plan_weighted_tree(topology, Collective.ALL_REDUCE).digest == chosen.digest
