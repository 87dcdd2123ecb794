"""The tree broadcast: every link down carries the data once, no link more than once, from any root."""

from hypothesis import given, settings as effort, strategies as st
from schedule_trees import balanced_tree, trees

from syncline.schedule import Collective, plan_tree
from syncline.topology import DirectedLink, Topology


@effort(max_examples=30)
@given(trees(max_ranks=30), st.data())
def test_each_link_carries_the_data_at_most_once(topology, data):
    root = data.draw(st.integers(0, topology.num_ranks - 1))
    schedule = plan_tree(topology, Collective.BROADCAST, root=root)
    size = schedule.denominator
    loads = schedule.link_bytes(topology, size)
    on_the_path = {node.name for node in topology.path(root)}
    for link, load in loads.items():
        if link.direction == "down":
            assert load == (0 if link.child in on_the_path else size), link
        assert load <= size, link


def test_root_sends_once_and_receives_nothing():
    topology = balanced_tree([[2, 3], 4])
    schedule = plan_tree(topology, Collective.BROADCAST, root=2)
    loads = schedule.link_bytes(topology, schedule.denominator)
    assert loads[DirectedLink("rank 2", "up")] == schedule.denominator
    assert loads[DirectedLink("rank 2", "down")] == 0


def test_steps_follow_the_levels():
    assert plan_tree(Topology.flat(2), Collective.BROADCAST).num_steps == 1
    assert plan_tree(Topology.flat(9), Collective.BROADCAST).num_steps == 2
    assert plan_tree(balanced_tree([3, 3, 3]), Collective.BROADCAST).num_steps == 4


def test_fractions_weigh_the_branches_that_pass_it_on():
    topology = Topology.flat(4)
    schedule = plan_tree(topology, Collective.BROADCAST, fractions={"switch": [7, 2, 1, 1]}, root=0)
    loads = schedule.link_bytes(topology, 400)
    assert [loads[DirectedLink(f"h{k}", "up")] for k in range(4)] == [400, 400, 200, 200]
