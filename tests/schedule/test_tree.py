"""The tree planner puts on every link what the formulas say; steps, messages and ownership follow the tree."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings as effort
from schedule_trees import balanced_tree, trees

from syncline.errors import ScheduleError
from syncline.schedule import Collective, plan_tree
from syncline.topology import DirectedLink, Topology


def portions(topology):
    """What each rank should own by the rule: one over the degree of each parent on its path."""
    shares = {}

    def visit(node, share):
        if not node.children:
            shares[node.rank] = share
        for child in node.children:
            visit(child, share / len(node.children))

    visit(topology.root, Fraction(1))
    return [shares[rank] for rank in range(topology.num_ranks)]


def owned_share(schedule, rank):
    runs = schedule.owned(rank)
    return sum((Fraction(schedule.cuts[last] - schedule.cuts[first], schedule.denominator) for first, last in runs), 0)


def reduce_scatter_loads(topology):
    """Parts of S up and down on each link by the formulas: the own exchange, and the part of what goes on above."""
    loads = {}

    def visit(node, up, down):
        degree = len(node.children)
        for child in node.children:
            share = Fraction(1, degree)
            child_up, child_down = 1 - share + share * up, (degree - 1) * share + share * down
            loads[DirectedLink(child.name, "up")], loads[DirectedLink(child.name, "down")] = child_up, child_down
            visit(child, child_up, child_down)

    visit(topology.root, Fraction(0), Fraction(0))
    return loads


@effort(max_examples=30)
@given(trees(max_ranks=30))
def test_portions_are_one_over_the_degrees(topology):
    schedule = plan_tree(topology, Collective.REDUCE_SCATTER)
    assert [owned_share(schedule, rank) for rank in range(topology.num_ranks)] == portions(topology)


@effort(max_examples=20)
@given(trees(max_ranks=30))
def test_link_bytes_equal_the_formulas(topology):
    scatter, gather, both = (
        plan_tree(topology, collective)
        for collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER, Collective.ALL_REDUCE)
    )
    size = scatter.denominator
    loads = {link: load * size for link, load in reduce_scatter_loads(topology).items()}
    assert scatter.link_bytes(topology, size) == loads
    swapped = {DirectedLink(link.child, "down" if link.direction == "up" else "up"): n for link, n in loads.items()}
    assert gather.link_bytes(topology, size) == swapped
    assert both.link_bytes(topology, size) == {link: loads[link] + swapped[link] for link in loads}


@effort(max_examples=20)
@given(trees(max_ranks=30))
def test_each_rank_sends_all_but_its_portion(topology):
    schedule = plan_tree(topology, Collective.REDUCE_SCATTER)
    rows = schedule.transfers
    cuts = np.array(schedule.cuts, dtype=object)
    sent = cuts[rows.last] - cuts[rows.first]
    for rank, portion in enumerate(portions(topology)):
        assert Fraction(int(sum(sent[rows.src == rank])), schedule.denominator) == 1 - portion


def test_branch_sends_its_part_upward_once_not_once_for_each_rank():
    topology = balanced_tree([5, 3, 4])
    loads = plan_tree(topology, Collective.REDUCE_SCATTER).link_bytes(topology, 3 * 5 * 4 * 12)
    assert [loads[DirectedLink(host.name, "up")] for host in topology.hosts] == [3 * 5 * 4 * 12 * 2 // 3] * 3


def test_example_of_two_and_three_children():
    schedule = plan_tree(balanced_tree([2, 3]), Collective.REDUCE_SCATTER)
    assert [owned_share(schedule, rank) for rank in range(5)] == [Fraction(1, 4)] * 2 + [Fraction(1, 6)] * 3
    assert schedule.num_steps == 2


def test_siblings_send_in_rotation():
    sends = [send.peer for send in plan_tree(Topology.flat(5), Collective.REDUCE_SCATTER).program(3)[0].sends]
    assert sends == [4, 0, 1, 2]
    gathers = [send.peer for send in plan_tree(Topology.flat(5), Collective.ALL_GATHER).program(3)[0].sends]
    assert gathers == [4, 0, 1, 2]


def test_parents_with_one_child_cost_nothing():
    chain = balanced_tree([[[[2]]], [[1]]])
    assert plan_tree(chain, Collective.REDUCE_SCATTER).num_steps == 2
    assert plan_tree(balanced_tree([[[1]]]), Collective.ALL_REDUCE).num_steps == 0


def test_all_gather_is_the_reduce_scatter_backwards():
    topology = Topology.load("deep-asymmetric")
    scatter, gather = (plan_tree(topology, each) for each in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER))
    last = scatter.num_steps - 1
    backwards = [(last - row.step, row.dst, row.src, row.first, row.last, False) for row in scatter.transfers]
    assert [tuple(row) for row in gather.transfers] == backwards[::-1]


def test_fractions_weigh_the_children_of_a_parent():
    topology = balanced_tree([2, 3])
    names = [topology.root.name, topology.hosts[0].name]
    schedule = plan_tree(topology, Collective.REDUCE_SCATTER, fractions={names[0]: [1, 3], names[1]: [0, 1]})
    assert [owned_share(schedule, rank) for rank in range(5)] == [0, Fraction(1, 4), *[Fraction(1, 4)] * 3]


@pytest.mark.parametrize("weights", [[1], [1, -1], [0, 0]])
def test_fractions_that_fit_no_parent_are_refused(weights):
    topology = balanced_tree([2, 3])
    with pytest.raises(ScheduleError, match="has 2 children and was given"):
        plan_tree(topology, Collective.REDUCE_SCATTER, fractions={topology.root.name: weights})
    with pytest.raises(ScheduleError, match="'nobody' has no children"):
        plan_tree(topology, Collective.REDUCE_SCATTER, fractions={"nobody": [1]})
