"""An all-reduce that is cut at replicas: both parts do what they promise, and the second stays inside each replica."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import reference
from hypothesis import given, reject, settings as effort, strategies as st
from schedule_trees import balanced_tree, trees

from syncline.errors import ScheduleError, TopologyError
from syncline.schedule import PLANNERS, Collective, Draft, Layout, Transfer, Transfers, plan_tree, predict, verify
from syncline.schedule.replicas import draft_in_replicas, find_parties, find_replicas, levels_of
from syncline.schedule.replicated_step import choose_replicas, draft_replicas
from syncline.schedule.step_candidates import draft_sharded_steps
from syncline.schedule.verifier import split_at_owners
from syncline.topology import DirectedLink, Topology
from syncline.topology.document import shipped_names

plan_weighted_tree = PLANNERS["weighted_tree"].plan

RACKS = Topology.load("two-racks-5-3")
DEEP = Topology.load("deep-asymmetric")


def split_in_replicas(whole, replicas):
    first, second = draft_in_replicas(whole.draft, replicas)
    return verify(first), verify(second)


def parts_of(topology, replicate, plan=plan_tree):
    return split_in_replicas(plan(topology, Collective.ALL_REDUCE), find_replicas(topology, replicate))


def carried(schedule, topology, num_bytes):
    return {str(link): count for link, count in schedule.link_bytes(topology, num_bytes).items()}


@effort(max_examples=30)
@given(trees(max_ranks=14), st.integers(0, 4), st.sampled_from([plan_tree, plan_weighted_tree]), st.integers(0, 700))
def test_both_parts_of_random_trees_keep_their_promises(topology, level, plan, num_elements):
    depth = max(len(topology.path(rank)) for rank in range(topology.num_ranks))
    replicas = find_replicas(topology, min(level, depth))
    whole = plan(topology, Collective.ALL_REDUCE)
    try:
        first, second = split_in_replicas(whole, replicas)
    except ScheduleError as error:
        if plan is plan_tree or "which owns it not" not in str(error):
            raise
        reject()  # sums may come another way than they go
    assert (first.collective, second.collective) == (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
    assert first.owners.tolist() == second.owners.tolist()
    number = {rank: replica for replica, ranks in enumerate(replicas) for rank in ranks}
    assert all(number[row.src] == number[row.dst] for row in second.transfers)
    for layout in (Layout.build(first, num_elements, 200), Layout.aligned(first, [0, 3, 3, num_elements + 3], 200)):
        reference.check(first, layout)
        reference.check(second, layout)
        for ranks in replicas:
            owned = sorted(pair for rank in ranks for pair in layout.owned_ranges(first, rank))
            assert sum(stop - start for start, stop in owned) == layout.num_elements
            assert all(left[1] <= right[0] for left, right in pairwise(owned))
    for link, num_bytes in carried(whole, topology, 9973).items():
        assert carried(first, topology, 9973)[link] + carried(second, topology, 9973)[link] == num_bytes


ONE_WAY = Topology.parse("""
switch: s1
children:
- switch: s2
  uplink: {up: 200 Mbit/s, down: 400 Mbit/s}
  children:
  - {host: h3, uplink: {up: 200 Mbit/s, down: 400 Mbit/s}, ranks: 2}
  - host: h4
    uplink: {up: 1 Gbit/s, down: 10 Gbit/s}
    ranks: 3
    local: [{up: 10 Gbit/s, down: 200 Mbit/s}, unlimited, {up: 100 Mbit/s, down: 400 Mbit/s}]
  - host: h5
    uplink: {up: 1 Gbit/s, down: 10 Gbit/s}
    ranks: 2
    local: [{up: 200 Mbit/s, down: 400 Mbit/s}, unlimited]
- switch: s6
  uplink: {up: 200 Mbit/s, down: 100 Mbit/s}
  children:
  - {host: h7, uplink: {up: 200 Mbit/s, down: 100 Mbit/s}}
  - {host: h8, uplink: {up: 100 Mbit/s, down: 400 Mbit/s}, local: 400 Mbit/s}
""")


@pytest.mark.parametrize("level", [1, 2])
def test_sums_that_come_another_way_than_they_go_cannot_be_cut_at_replicas(level):
    """They leave a replica from a rank that has not what its owner has, unless the second part came first."""
    with pytest.raises(
        ScheduleError, match=r"the weighted_tree's all-gather leaves one from rank \d, which owns it not"
    ):
        parts_of(ONE_WAY, level, plan_weighted_tree)
    parts_of(ONE_WAY, level)
    step = draft_replicas(ONE_WAY, 1 << 20, find_replicas(ONE_WAY, level))
    assert [verify(half).collective for half in step.pair] == [Collective.REDUCE_SCATTER, Collective.ALL_GATHER]


def test_one_replica_is_the_ordinary_split():
    whole = plan_tree(DEEP, Collective.ALL_REDUCE)
    halves = split_in_replicas(whole, find_replicas(DEEP, 0))
    assert [half.digest for half in halves] == [half.digest for half in map(verify, split_at_owners(whole.draft))]


def test_two_racks_send_everything_once_each_way_before_the_step_and_nothing_after_it():
    first, second = parts_of(RACKS, 1)
    before, after = carried(first, RACKS, 9600), carried(second, RACKS, 9600)
    for rack in ("rack-a", "rack-b"):
        assert (before[f"{rack} up"], before[f"{rack} down"]) == (9600, 9600)
        assert (after[f"{rack} up"], after[f"{rack} down"]) == (0, 0)
    # Within a rack of n, a rank is sent all but its share of what the others of its rack own.
    assert [after[f"h{rank} down"] for rank in range(8)] == [9600 * 4 // 5] * 5 + [9600 * 2 // 3] * 3
    for rank, share in enumerate([5] * 5 + [3] * 3):
        assert sum(stop - start for start, stop in Layout.build(first, 9600, 9600).owned_ranges(first, rank)) == (
            9600 // share
        )


def test_three_racks_send_four_thirds_each_way():
    topology = Topology.load("three-racks-uneven-uplinks")
    first, second = parts_of(topology, 1)
    racks = [child.name for child in topology.root.children]
    for direction in ("up", "down"):
        assert [carried(first, topology, 3600)[f"{rack} {direction}"] for rack in racks] == [4800] * 3
        assert not any(carried(second, topology, 3600)[f"{rack} {direction}"] for rack in racks)


def test_ranges_are_grouped_by_their_owners_elsewhere():
    """Racks of two and of three divide at 1/2 and at thirds: who owns the first half owns two groups."""
    first, _ = parts_of(balanced_tree([[1, 1], [1, 1, 1]]), 1)
    layout = Layout.build(first, 600, 300)
    assert layout.owned_ranges(first, 0) == ((0, 150), (300, 450))
    assert layout.owned_alike(first, 0) == (((0, 100), (300, 400)), ((100, 150), (400, 450)))
    assert layout.owned_alike(first, 3) == (((100, 150), (400, 450)), ((150, 200), (450, 500)))
    alike, _ = parts_of(balanced_tree([[1, 1], [1, 1]]), 1)
    assert [len(Layout.build(alike, 600, 300).owned_alike(alike, rank)) for rank in range(4)] == [1] * 4
    assert Layout.build(alike, 0, 300).owned_alike(alike, 0) == ()


def test_what_enters_a_replica_at_several_ranks_cannot_be_split():
    replicas = find_replicas(RACKS, 1)
    with pytest.raises(ScheduleError, match="the ring's all-gather enters one 2 times"):
        split_in_replicas(PLANNERS["ring"].plan(RACKS, Collective.ALL_REDUCE), replicas)
    with pytest.raises(ScheduleError, match="only an all_reduce with owners can be split"):
        split_in_replicas(PLANNERS["recursive_doubling"].plan(RACKS, Collective.ALL_REDUCE), replicas)
    first, _ = parts_of(RACKS, 1)
    with pytest.raises(ScheduleError, match="only an all_reduce with owners can be split"):
        split_in_replicas(first, replicas)


def two_owners(rows, *, owners=((0,), (2,))):
    return Draft(
        collective=Collective.REDUCE_SCATTER,
        num_ranks=4,
        cuts=(0, 1),
        transfers=Transfers.of(rows),
        owners=np.array(owners),
        planner="test",
    )


IN_LINE = [Transfer(0, rank, 0, 0, 1, True) for rank in (1, 2, 3)]  # at rank 0
IN_PAIRS = [Transfer(0, 3, 2, 0, 1, True), Transfer(0, 0, 1, 0, 1, True), Transfer(1, 1, 2, 0, 1, True)]  # at rank 2


def test_all_owners_of_a_range_add_in_the_same_order():
    halves = [Transfer(0, 1, 0, 0, 1, True), Transfer(0, 3, 2, 0, 1, True)]
    verify(two_owners([*halves, Transfer(1, 0, 2, 0, 1, True), Transfer(1, 2, 0, 0, 1, True)]))
    verify(two_owners([*IN_LINE, Transfer(1, 0, 2, 0, 1, False)]))
    with pytest.raises(
        ScheduleError, match=r"rank 2 adds atom 0 \(\[0, 1\) of the data\) in another order than rank 0"
    ):
        verify(two_owners([*IN_LINE, *IN_PAIRS]))


def test_every_owner_is_promised_the_result():
    with pytest.raises(
        ScheduleError, match="each owner of a range holds its result after reduce_scatter, but in rank 2"
    ):
        verify(two_owners(IN_LINE))
    for owners, shape in ((np.zeros((0, 1)), r"\(0, 1\)"), (np.zeros((2, 2)), r"\(2, 2\)")):
        with pytest.raises(ScheduleError, match=f"each of the 1 atoms needs an owner, not {shape}"):
            verify(two_owners(IN_LINE, owners=owners))
    with pytest.raises(ScheduleError, match="has rank 4 as its owner"):
        verify(two_owners(IN_LINE, owners=((0,), (4,))))


def test_what_several_owners_add_is_no_all_reduce_by_owners():
    """Owners of several replicas need not have the same bits, so gathering from them proves nothing."""
    rows = [*IN_LINE, *IN_PAIRS, Transfer(2, 0, 1, 0, 1, False), Transfer(2, 2, 3, 0, 1, False)]
    with pytest.raises(ScheduleError, match="in another order than rank 0"):
        verify(replace(two_owners(rows), collective=Collective.ALL_REDUCE))


def test_replicas_are_found_by_every_name():
    racks = ((0, 1, 2, 3, 4), (5, 6, 7))
    for replicate in (1, ["rack-a", "rack-b"], ("rack-a", (7, 6, 5)), ((4, 0, 1, 2, 3), (5, 6, 7))):
        assert find_replicas(RACKS, replicate) == racks
    assert find_replicas(RACKS, ["rack-b", "rack-a"]) == racks[::-1]
    assert find_replicas(RACKS, 0) == (tuple(range(8)),)
    assert find_replicas(DEEP, "host") == (*((rank,) for rank in range(6)), (6, 7), (8,), (9,))
    assert find_replicas(DEEP, 2) == ((0,), (1,), (2, 3, 4), (5, 6, 7), (8,), (9,))
    assert find_replicas(RACKS, ["rack-a", "h5", "h6", "rank 7"]) == (racks[0], (5,), (6,), (7,))


@pytest.mark.parametrize(
    ("replicate", "reason"),
    [
        ("rack-a", "not 'rack-a'"),
        (4, "not 4"),
        (-1, "not -1"),
        (True, "not True"),
        (["rack-a"], "each rank is in one of them, but rank 5 is in 0, rank 6 is in 0, rank 7 is in 0"),
        (["core", "h7"], "but rank 7 is in 2"),
        ([(0, 1, 2, 3), (4, 5, 6, 7)], r"but ranks \[0, 1, 2, 3\] are not all ranks below one node"),
        (["rack-c"], "has no node 'rack-c'"),
        ([], "but rank 0 is in 0"),
    ],
)
def test_what_is_no_replica_is_refused(replicate, reason):
    with pytest.raises(TopologyError, match=reason):
        find_replicas(RACKS, replicate)


def test_the_refusal_says_what_there_is():
    with pytest.raises(
        TopologyError, match=r"from 0 \(the root\) to 3, names of switches or hosts \(core, rack-a, h0, "
    ):
        find_replicas(RACKS, "rack")


def choice(topology):
    return choose_replicas(topology, 64 << 20).replicas


@effort(max_examples=10)
@given(trees(max_ranks=10), st.sampled_from([1, 1.25, 3.0]))
def test_steps_with_replicas_keep_the_cap_and_are_never_slower_where_chosen(topology, cap):
    plain = draft_replicas(topology, 64 << 20, levels_of(topology)[0], portions=cap)
    assert plain.time_s == draft_sharded_steps(topology, 64 << 20, portions=cap)[0][1].time_s
    assert choose_replicas(topology, 64 << 20, portions=cap).time_s <= 1.01 * plain.time_s
    for replicas in levels_of(topology):
        step = draft_replicas(topology, 64 << 20, replicas, portions=cap)
        for half in map(verify, step.pair):
            reference.check(half, Layout.build(half, 331, 200))
        for ranks in replicas:
            owned = [step.shares[rank] for rank in ranks]
            assert sum(owned) == pytest.approx(1)
            assert max(owned) <= cap / len(ranks) + 1 / 16384


@pytest.mark.parametrize("name", shipped_names())
def test_owners_from_both_parts_are_no_slower_than_those_of_an_all_reduce(name):
    topology = Topology.load(name)
    for replicas in levels_of(topology)[1:]:
        cuts = [split_in_replicas(plan(topology, Collective.ALL_REDUCE), replicas) for plan in (plan_tree,)]
        cut_s = min(sum(predict(half, topology, 16 << 20, in_windows=False).time_s for half in pair) for pair in cuts)
        assert draft_replicas(topology, 16 << 20, replicas, portions="fastest").time_s <= cut_s * (1 + 1e-9)


def test_a_replica_of_uneven_links_keeps_its_cap_and_is_faster_for_it():
    """The tree's all-reduce gives one rank of seven four fifths of what its replica owns."""
    step = draft_replicas(DEEP, 16 << 20, find_replicas(DEEP, 1))
    assert max(step.shares[rank] for rank in range(1, 8)) <= 1.25 / 7 + 1 / 16384
    first, second = split_in_replicas(plan_weighted_tree(DEEP, Collective.ALL_REDUCE), step.replicas)
    cut_s = sum(predict(half, DEEP, 16 << 20, in_windows=False).time_s for half in (first, second))
    assert step.time_s < 0.98 * cut_s


def test_the_level_is_chosen_that_leaves_least_after_the_step_and_takes_no_longer_in_all():
    assert choice(RACKS) == find_replicas(RACKS, 0), "what is gathered in the racks comes on top of the uplinks' time"
    racks = balanced_tree([[4, 4], [4, 4]])
    assert choice(racks) == find_replicas(racks, 1), "hosts as replicas would take longer in all"


def test_nothing_is_replicated_where_that_gains_nothing():
    assert choice(Topology.flat(8, rate=1e8)) == (tuple(range(8)),)
    assert choice(Topology.flat(1)) == ((0,),)
    assert choice(balanced_tree([1, 3])) == (tuple(range(4)),), "one of the replicas would keep everything"


def test_a_link_in_the_way_of_both_parts_is_named_by_its_bytes():
    first, second = parts_of(DEEP, 2)
    whole = plan_tree(DEEP, Collective.ALL_REDUCE).link_bytes(DEEP, 5040)
    uplink = DirectedLink("rack-a2", "up")
    assert first.link_bytes(DEEP, 5040)[uplink] == whole[uplink]
    assert second.link_bytes(DEEP, 5040)[uplink] == 0


@pytest.mark.parametrize(
    ("tree", "parties"),
    [
        ("{host: 'h[0-3]', LINK}", ((0,), (1,), (2,), (3,))),
        ("{host: a, ranks: 2, LINK}, {host: b, ranks: 2, LINK}", ((0, 1), (2, 3))),
        ("{host: a, ranks: 3, LINK}", ((0,), (1,), (2,))),
        (
            "{switch: t, LINK, children: [{switch: a, LINK, children: [{host: 'a[0-1]', LINK}]}, {host: b, LINK}]}",
            ((0, 1), (2,)),
        ),
    ],
    ids=["hosts", "hosts of two", "one host", "below a lone switch"],
)
def test_parties_are_what_the_first_switch_divides(tree, parties):
    children = tree.replace("LINK", "uplink: 1 Gbit/s")
    topology = Topology.parse(f"{{switch: s, children: [{children}]}}")
    assert find_parties(topology, "auto") == parties
    assert find_parties(topology, None) == tuple((rank,) for rank in range(topology.num_ranks))
    assert find_parties(topology, [tuple(range(topology.num_ranks))]) == (tuple(range(topology.num_ranks)),)
