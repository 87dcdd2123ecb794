"""Gateways: ranks behind one own nothing and speak inside their host; host links carry what one rank would send."""

from dataclasses import replace

import pytest
from hypothesis import given, settings as effort, strategies as st
from schedule_trees import trees

from syncline.errors import ScheduleError
from syncline.schedule import PLANNERS, Collective, choose, predict, with_gateways_chosen
from syncline.topology import Host, Topology

SIZE = 48 << 20
ABLE = [planner for planner in PLANNERS.values() if planner.knows_gateways]
BOUND = [Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER]


def hosts_of(*nums_ranks, gateway="one"):
    hosts = ", ".join(
        f"{{host: {name}, uplink: 1 Gbit/s, ranks: {num_ranks}, gateway: {gateway}}}"
        for name, num_ranks in zip("abc", nums_ranks, strict=True)
    )
    return Topology.parse(f"{{switch: s, children: [{hosts}]}}")


@st.composite
def trees_with_gateways(draw):
    topology = draw(trees(max_ranks=16))
    chosen = {host.name: draw(st.sampled_from(["every", "one", "one"])) for host in topology.hosts}

    def change(node):
        if isinstance(node, Host):
            return replace(node, ranks=() if node.sockets else node.ranks, gateway=chosen[node.name])
        return replace(node, children=tuple(change(child) for child in node.children))

    return replace(topology, root=change(topology.root))


def owners_of(schedule):
    return {int(owner) for owner in schedule.owners[0]}


@pytest.mark.parametrize("collective", BOUND)
@pytest.mark.parametrize("planner", ABLE, ids=lambda planner: planner.name)
@effort(max_examples=13)
@given(topology=trees_with_gateways())
def test_ranks_behind_a_gateway_own_nothing_and_stay_inside_their_host(planner, collective, topology):
    schedule = planner.plan(topology, collective)  # proved
    behind = topology.gateways
    assert not owners_of(schedule) & set(behind)
    for source, target in zip(schedule.transfers.src.tolist(), schedule.transfers.dst.tolist(), strict=True):
        if source in behind or target in behind:
            assert topology.host_of(source) is topology.host_of(target)
            if not topology.host_of(source).sockets:
                assert behind.get(source, source) == behind.get(target, target) in (source, target)


@pytest.mark.parametrize("collective", BOUND)
@pytest.mark.parametrize("planner", ABLE, ids=lambda planner: planner.name)
def test_host_links_carry_each_range_once_for_each_host(planner, collective):
    behind_gateways = hosts_of(2, 3, 1)
    one_rank_each = hosts_of(1, 1, 1)
    carried = planner.plan(behind_gateways, collective).link_bytes(behind_gateways, SIZE)
    expected = planner.plan(one_rank_each, collective).link_bytes(one_rank_each, SIZE)
    assert {link: carried[link] for link in carried if link.child in "abc"} == {
        link: expected[link] for link in expected if link.child in "abc"
    }


def test_the_link_of_a_socket_is_crossed_once_by_what_its_ranks_have():
    sockets = "[{socket: s, uplink: 9 GB/s, ranks: 2}, {socket: t, uplink: 9 GB/s, ranks: 3}]"
    topology = Topology.parse(f"{{host: a, gateway: one, children: {sockets}}}")
    schedule = PLANNERS["tree"].plan(topology, Collective.REDUCE_SCATTER)
    carried = {str(link): num_bytes for link, num_bytes in schedule.link_bytes(topology, SIZE).items()}
    assert (carried["a/t up"], carried["a/t down"], owners_of(schedule)) == (SIZE, 0, {0})


def test_planners_that_do_not_know_gateways_are_no_choice():
    topology = hosts_of(2, 3, 1)
    for num_bytes in (1, SIZE):
        assert choose(topology, Collective.ALL_REDUCE, num_bytes).planner in {"tree", "weighted_tree"}
    assert choose(hosts_of(2, 3, 1, gateway="every"), Collective.ALL_REDUCE, 1).planner == "recursive_doubling"
    with pytest.raises(ScheduleError, match=r"'ring' lets every rank speak .* take one of tree, weighted_tree"):
        PLANNERS["ring"].plan(topology, Collective.ALL_REDUCE)


@pytest.mark.parametrize(
    ("collective", "target"),
    [
        (Collective.BROADCAST, "balanced"),
        (Collective.REDUCE_SCATTER, "rank_order"),
        (Collective.ALL_GATHER, "rank_order"),
    ],
)
def test_where_each_rank_has_its_own_part_every_rank_speaks(collective, target):
    plans = [
        choose(hosts_of(2, 3, 1, gateway=gateway), collective, SIZE, target=target) for gateway in ("every", "one")
    ]
    assert plans[0].digest == plans[1].digest


def test_gateways_left_open_are_chosen_by_prediction():
    auto = hosts_of(3, 3, 3, gateway="auto")
    assert auto.gateways == {}
    ways = {way: Topology.parse(auto.to_yaml().replace("auto", way)) for way in ("every", "one")}
    for num_bytes, expected in ((64 << 10, "one"), (SIZE, "every")):
        times = {
            way: predict(choose(topology, Collective.ALL_REDUCE, num_bytes), topology, num_bytes).time_s
            for way, topology in ways.items()
        }
        chosen = with_gateways_chosen(auto, num_bytes)
        assert chosen.hosts[0].gateway == min(times, key=times.__getitem__) == expected
        assert chosen.digest == ways[expected].digest
    assert with_gateways_chosen(ways["one"]) is ways["one"]
