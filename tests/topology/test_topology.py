"""The questions that planners ask of a topology."""

import math
import pickle
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from topology_trees import topologies

from syncline.errors import TopologyError
from syncline.topology import DirectedLink, Host, Link, Rank, Socket, Switch, Topology


def host(name, *ranks, link=None):
    return Host(name=name, link=link or Link.unlimited(), ranks=tuple(Rank(rank=rank) for rank in ranks))


def socket(name):
    return Socket(name=name, link=Link.unlimited(), children=(Rank(rank=0),))


def test_flat():
    topology = Topology.flat(3, rate=100.0)
    assert topology.num_ranks == 3
    assert [h.name for h in topology.hosts] == ["h0", "h1", "h2"]
    assert topology.host_of(2).name == "h2"
    assert topology.ranks_of("h1") == (1,)
    assert [node.name for node in topology.path(0)] == ["rank 0", "h0"]
    assert dict(topology.links())["h2"] == Link.symmetric(100.0)
    assert math.isinf(dict(topology.links())["rank 2"].up_bytes_per_s)


def test_route_goes_up_and_down_and_never_through_the_root_twice():
    topology = Topology.load("two-racks-5-3")
    assert [str(link) for link in topology.route(0, 7)] == [
        "rank 0 up", "h0 up", "rack-a up", "rack-b down", "h7 down", "rank 7 down",
    ]  # fmt: skip
    assert [str(link) for link in topology.route(5, 6)] == ["rank 5 up", "h5 up", "h6 down", "rank 6 down"]
    assert topology.route(4, 4) == ()


@given(topologies())
def test_every_route_crosses_each_link_once_and_its_reverse_is_the_reverse(topology):
    ends = (0, topology.num_ranks // 2, topology.num_ranks - 1)
    for source in ends:
        for destination in ends:
            route = topology.route(source, destination)
            assert len(set(route)) == len(route)
            opposite = {"up": "down", "down": "up"}
            back = [DirectedLink(link.child, opposite[link.direction]) for link in reversed(route)]
            assert list(topology.route(destination, source)) == back
            if source != destination:
                assert (route[0].child, route[-1].child) == (f"rank {source}", f"rank {destination}")


@given(topologies())
def test_paths_hosts_and_names_agree(topology):
    names = [node.name for node in topology.walk()]
    assert len(set(names)) == len(names)
    for rank in range(topology.num_ranks):
        assert rank in topology.ranks_of(topology.host_of(rank).name)
        above = [node.name for node in topology.path(rank)] + [topology.root.name]
        assert [topology.parent_of(child).name for child in above[:-1]] == above[1:]
    assert topology.parent_of(topology.root.name) is None


def test_the_first_rank_of_a_host_speaks_for_the_others():
    topology = Topology.parse(
        "{switch: s, rank_numbers: [3, 0, 1, 2, 5, 4], children: [{host: a, uplink: 1 Gbit/s, ranks: 2, gateway: one},"
        "{host: b, uplink: 1 Gbit/s, ranks: 2, gateway: auto}, {host: c, uplink: 1 Gbit/s, ranks: 2, gateway: helper}]}"
    )
    assert topology.gateways == {0: 3, 4: 5}
    assert topology.helpers == (5,)
    assert topology.permuted([1, 0, 2, 3, 4, 5]).gateways == {1: 3, 4: 5}
    assert Topology.flat(3).gateways == {}


def test_what_is_left_of_a_host_keeps_a_gateway_but_no_helper_without_the_helper():
    topology = Topology.parse("{host: a, ranks: 4, gateway: helper}")
    assert topology.restricted([0, 2]).helpers == (0,)
    assert (topology.restricted([3, 2]).gateways, topology.restricted([3, 2]).helpers) == ({0: 1}, ())
    assert (topology.restricted([0]).gateways, topology.restricted([0]).helpers) == ({}, ())


def test_sockets_are_kept_where_ranks_are_left():
    sockets = "[{socket: s, uplink: 1 GB/s, ranks: 2}, {socket: t, uplink: 1 GB/s, ranks: 2}]"
    topology = Topology.parse(f"{{host: a, gateway: helper, children: {sockets}}}")
    left = topology.restricted([1, 3, 2])
    assert [node.name for node in left.walk()] == ["a", "a/s", "rank 0", "a/t", "rank 2", "rank 1"]
    assert [node.name for node in topology.permuted([3, 2, 1, 0]).path(0)] == ["rank 0", "a/t"]


@given(topologies(), st.randoms(use_true_random=False))
def test_permuted_moves_ranks_and_nothing_else(topology, random):
    order = list(range(topology.num_ranks))
    random.shuffle(order)
    permuted = topology.permuted(order)
    for new, old in enumerate(order):
        assert permuted.host_of(new).name == topology.host_of(old).name
    assert permuted.permuted([order.index(rank) for rank in range(topology.num_ranks)]) == topology


@given(topologies())
def test_digest_is_equal_exactly_where_trees_are(topology):
    renamed = Topology(name="another name", root=topology.root)
    assert renamed.digest == topology.digest
    assert pickle.loads(pickle.dumps(topology)) == topology
    order = [*range(1, topology.num_ranks), 0]
    permuted = topology.permuted(order)
    assert (permuted.digest == topology.digest) == (permuted == topology)
    assert hash(permuted.root) is not None


def test_digest_is_stable_between_versions():
    assert Topology.flat(2, rate=1.25e8).digest == "91fced98e120dd93"


def test_a_thousand_ranks_are_quick_enough_to_route():
    topology = Topology.flat(1000)
    assert sum(len(topology.route(0, rank)) for rank in range(1000)) == 999 * 4


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Topology.flat(0), "a flat topology needs at least 1 host"),
        (lambda: Link.symmetric(0.0), "Link: up_bytes_per_s must be a number above 0, not"),
        (lambda: Link.symmetric(math.nan), "Link: up_bytes_per_s must be a number above 0, not"),
        (
            lambda: Link(up_bytes_per_s=1.0, down_bytes_per_s=-1.0),
            "Link: down_bytes_per_s must be a number above 0, not",
        ),
        (lambda: Link.symmetric(1.0, latency_s=-1.0), "Link: latency_s must be a number from 0 up, finite, not -1.0"),
        (lambda: replace(Link.unlimited(), loss_share=1.0), "Link: loss_share must be"),
        (lambda: Switch(name="s", link=None, children=()), "switch 's' is empty"),
        (lambda: host("h"), "host 'h' has no rank"),
        (
            lambda: Host(name="h", link=None, ranks=(Rank(rank=0),), gateway="two"),
            'Host: gateway must be "every", "one"',
        ),
        (lambda: Host(name="h", link=None, ranks=(Rank(rank=1),), sockets=(socket("h/s"),)), "both ranks and sockets"),
        (lambda: Host(name="h", link=None, sockets=(socket("g/s"),)), "socket 'g/s' is below 'h'; call it 'h/s'"),
        (lambda: Socket(name="h/s", link=Link.unlimited(), children=()), "socket 'h/s' has no rank"),
        (lambda: host("rank 3", 0), "host name 'rank 3' cannot be used"),
        (lambda: Topology(name="t", root=host("h", 0)), "the root 'h' has a link"),
        (lambda: Topology.flat(2).permuted([0, 0]), "an order names each of the ranks 0 to 1 once"),
        (lambda: Topology.flat(2).host_of(2), "Topology 'flat-2' has no rank 2; its ranks are 0 to 1"),
        (lambda: Topology.flat(2).ranks_of("x"), "has no host 'x'; its hosts are h0, h1"),
        (lambda: Topology.flat(2).node("x"), "has no node 'x'; its switches and hosts are switch, h0, h1$"),
        (lambda: Topology.flat(40).node(""), "has no node ''; its switches and hosts are switch, h0, .*, h14, [.]{3}$"),
    ],
)
def test_what_cannot_be_is_refused(build, message):
    with pytest.raises(TopologyError, match=message):
        build()


@pytest.mark.parametrize(
    ("children", "message"),
    [
        ((host("a", 0), host("a", 1)), "'a' names two nodes"),
        ((host("s", 0),), "'s' names two nodes"),
        ((host("a", 0), host("b", 0)), "'rank 0' names two nodes"),
        ((host("a", 0), host("b", 2)), r"ranks must be numbered 0 to 1 without a gap, not \[0, 2\]"),
        ((Host(name="a", link=None, ranks=(Rank(rank=0),)),), "'a' has no link to 's'"),
    ],
)
def test_trees_that_do_not_fit_are_refused(children, message):
    with pytest.raises(TopologyError, match=message):
        Topology(name="t", root=Switch(name="s", link=None, children=children))


def test_world_size_is_compared_by_name_line_and_number():
    topology = Topology.parse(
        "switch: s\nchildren:\n  - {host: a, uplink: 1 Gbit/s}\n  - {host: b, uplink: 1 Gbit/s}\n", source="net.yaml"
    )
    topology.check_world_size(2)
    with pytest.raises(TopologyError) as fewer:
        topology.check_world_size(1)
    assert str(fewer.value) == (
        "Topology 'net.yaml' (from host b, rank 1, on): the topology has 2 ranks but the job has 1; start 2, or give a "
        "topology of 1"
    )
    with pytest.raises(TopologyError, match=r"'net\.yaml': the topology has 2 ranks but the job has 3"):
        topology.check_world_size(3)


def test_render():
    topology = Topology.parse(
        "topology: t\nswitch: core\nchildren:\n"
        "  - {host: a, uplink: {up: 1 Gbit/s, down: 2 Gbit/s}, ranks: 3, features: {gpu: x, memory: 5}}\n"
        "  - {switch: rack, uplink: {rate: 20 Mbit/s, latency: 10 ms, loss: 0.2 %},"
        " children: [{host: b, uplink: unlimited, local: 1 GB/s}]}\n"
    )
    assert topology.render().splitlines() == [
        "t: 4 ranks on 2 hosts",
        "core",
        "├── a               up 1 Gbit/s, down 2 Gbit/s  ranks 0 to 2  gpu=x, memory=5",
        "└── rack            20 Mbit/s, 10 ms, 0.2 % lost",
        "    └── b           unlimited",
        "        └── rank 3  8 Gbit/s",
    ]


def test_render_shows_sockets_gateways_and_memory():
    topology = Topology.parse(
        "{topology: t, host: a, memory: 64 GiB, gateway: helper, features: {gpu: x}, children: ["
        "{socket: s, uplink: 1 GB/s, ranks: 2}, {socket: t, uplink: 2 GB/s, local: 1 GB/s}]}"
    )
    assert topology.render().splitlines() == [
        "t: 3 ranks on 1 host",
        "a               helper rank 0  64 GiB  gpu=x",
        "├── a/s         8 Gbit/s  ranks 0, 1",
        "└── a/t         16 Gbit/s",
        "    └── rank 2  8 Gbit/s",
    ]
