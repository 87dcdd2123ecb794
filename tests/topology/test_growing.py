"""Places for machines that come or come back: their own, beside others of their host, or under the root."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st
from topology_trees import topologies

from syncline.errors import TopologyError
from syncline.members.job_record import with_places
from syncline.topology import Host, Link, Rank, Topology

NET = """
topology: my-network
switch: core
children:
  - switch: rack-a
    uplink: {up: 200 Mbit/s, down: 400 Mbit/s, latency: 1 ms}
    children:
      - {host: "a[0-1]", uplink: 1 Gbit/s, ranks: 2, local: 8 Gbit/s}
  - {host: b0, uplink: {rate: 300 Mbit/s, latency: 2 ms}}
"""


def net() -> Topology:
    return Topology.parse(NET)


def test_who_comes_back_gets_the_lowest_free_place_of_its_host() -> None:
    known, places = with_places(net(), [0, 4], ["a1.example", "a0", "a1"], machines=["a0", "b0"])
    assert known == net()
    assert places == (2, 1, 3)


def test_one_more_rank_than_its_host_had_is_put_beside_the_others() -> None:
    known, places = with_places(net(), range(5), ["a0"], machines=["a0", "a0", "a1", "a1", "b0"])
    assert places == (5,)
    assert known.ranks_of("a0") == (0, 1, 5)
    assert known.path(5)[0].link == net().path(0)[0].link


def test_an_unknown_machine_comes_under_the_root_with_the_slowest_uplink() -> None:
    known, places = with_places(net(), range(5), ["c0.example", "c0.example"], machines=["a0", "a0", "a1", "a1", "b0"])
    assert places == (5, 6)
    assert known.ranks_of("c0") == (5, 6)
    link = known.host_of(5).link
    assert known.parent_of("c0") == known.root
    assert link == Link(up_bytes_per_s=25e6, down_bytes_per_s=37.5e6, latency_s=2e-3)


def test_a_machine_whose_name_is_a_switchs_gets_another() -> None:
    known, places = with_places(net(), range(5), ["rack-a", "-"], machines=["a0", "a0", "a1", "a1", "b0"])
    assert [known.host_of(place).name for place in places] == ["h0", "h1"]


def test_on_one_machine_that_stands_for_all_hosts_free_places_are_taken() -> None:
    known, places = with_places(Topology.flat(4), [0, 2], ["box"] * 3, machines=["box", "box"])
    assert places == (1, 3, 4)
    assert known.host_of(4).name == "box"


def test_beside_a_single_host_comes_a_switch() -> None:
    alone = Topology(name="one", root=Host(name="a", link=None, ranks=(Rank(rank=0),)))
    known, places = with_places(alone, [0], ["b"], machines=["a"])
    assert [host.name for host in known.hosts] == ["a", "b"]
    assert places == (1,)
    assert all(math.isinf(host.link.up_bytes_per_s) for host in known.hosts if host.link)


def test_a_name_that_may_be_two_hosts_is_refused() -> None:
    known = Topology.parse("{switch: s, children: [{host: a.x, uplink: 1 Gbit/s}, {host: a.y, uplink: 1 Gbit/s}]}")
    with pytest.raises(TopologyError, match=r"'a' may be 'a.x' or 'a.y'.*SYNCLINE_HOST"):
        with_places(known, [0], ["a"], machines=["a.x"])


@given(topologies(), st.data())
def test_places_are_free_and_what_was_there_stays(topology: Topology, data: st.DataObject) -> None:
    ranks = st.lists(st.integers(0, topology.num_ranks - 1), min_size=1, unique=True)
    taken = data.draw(ranks)
    names = data.draw(st.lists(st.sampled_from([*(host.name for host in topology.hosts), "new-a", "new-b"])))
    machines = [topology.host_of(place).name for place in taken]
    known, places = with_places(topology, taken, names, machines=machines)
    assert len({*taken, *places}) == len(taken) + len(names)
    assert known.restricted(range(topology.num_ranks)).num_ranks == topology.num_ranks
    assert [known.host_of(place).name for place in taken] == machines
    assert Topology.parse(known.to_yaml()) == known
    for name, place in zip(names, places, strict=True):
        assert known.host_of(place).name == name
