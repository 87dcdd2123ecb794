"""A job's hosts and a topology's, matched by name whatever the order of ranks; else an error that shows both."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, strategies as st
from topology_trees import topologies

from syncline.errors import TopologyError
from syncline.schedule.draft import Collective
from syncline.schedule.planners import choose
from syncline.topology import Topology

NET = """
topology: my-network
switch: core
children:
  - switch: rack-a
    uplink: 200 Mbit/s
    children:
      - {host: "a[0-1]", uplink: 1 Gbit/s, ranks: 2}
  - {host: b0, uplink: 1 Gbit/s}
"""


def net() -> Topology:
    return Topology.parse(NET)


def hosts_of(topology: Topology) -> list[str]:
    return [topology.host_of(rank).name for rank in range(topology.num_ranks)]


def test_a_job_in_the_topologys_order_changes_nothing() -> None:
    topology = net()
    assert topology.matched(["a0", "a0", "a1", "a1", "b0"]) is topology


@pytest.mark.parametrize(
    "names",
    [
        ["b0", "a1", "a1", "a0", "a0"],
        ["a0", "a1", "b0", "a0", "a1"],
        ["b0.cluster.example", "A1.cluster.example", "A1.cluster.example", "a0", "a0"],
    ],
)
def test_ranks_are_on_the_hosts_that_they_name(names: list[str]) -> None:
    found = net().matched(names)
    assert hosts_of(found) == [name.partition(".")[0].lower() for name in names]
    assert dict(found.links())["rack-a"] == dict(net().links())["rack-a"]
    assert found.name == "my-network"


def test_what_stands_before_the_dot_counts_in_the_topology_too() -> None:
    topology = Topology.parse("{switch: s, children: [{host: 'a[0-1].example', uplink: 1 Gbit/s}]}")
    assert hosts_of(topology.matched(["a1", "a0"])) == ["a1.example", "a0.example"]


@given(topologies(), st.randoms(use_true_random=False))
def test_any_order_of_ranks_is_found_again(topology: Topology, source: random.Random) -> None:
    names = hosts_of(topology)
    source.shuffle(names)
    found = topology.matched(names)
    assert hosts_of(found) == names
    assert {host.name: len(host.ranks) for host in found.hosts} == {h.name: len(h.ranks) for h in topology.hosts}
    assert found.matched(names) is found


def test_ranks_of_one_host_keep_their_order_though_a_file_numbers_them_otherwise() -> None:
    text = (
        "{rank_numbers: [2, 0, 1], switch: s, children: "
        "[{host: a, uplink: 1 Gbit/s, ranks: 2}, {host: b, uplink: 1 Gbit/s}]}"
    )
    topology = Topology.parse(text)
    assert topology.matched(["a", "b", "a"]) is topology
    assert topology.matched(["b", "a", "a"]).ranks_of("a") == (2, 1)


def test_one_machine_stands_for_all_hosts() -> None:
    topology = Topology.load("two-racks-5-3")
    assert topology.matched(["laptop"] * 8) is topology


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["n0", "n0", "n1", "n1", "n2"], "'n0' is no host of the topology; 'n1' is no host"),
        (["a0", "a0", "a1", "a1", "n2"], "'n2' is no host of the topology"),
        (["a0", "a0", "a0", "a1", "b0"], "'a0' has 2 ranks in the topology and 3 ranks in the job; 'a1' has 2 ranks"),
        (["a0"] * 5, "'a0' has 2 ranks in the topology and 5 ranks in the job"),
        (["a0.x", "a0.y", "a1", "a1", "b0"], "'a0.x' and 'a0.y' may be 'a0'"),
    ],
)
def test_what_cannot_be_matched_shows_both_lists(names: list[str], message: str) -> None:
    with pytest.raises(TopologyError) as caught:
        net().matched(names)
    text = str(caught.value)
    assert message in text
    assert "The topology has a0 (ranks 0 and 1), a1 (ranks 2 and 3), b0 (rank 4)." in text
    assert all(name in text.partition("The job has ")[2] for name in names)
    assert "SYNCLINE_HOST" in text


def test_a_name_that_may_be_two_hosts_is_refused() -> None:
    topology = Topology.parse("{switch: s, children: [{host: 'a.x,a.y', uplink: 1 Gbit/s}]}")
    with pytest.raises(TopologyError, match=r"'a' may be 'a\.x' or 'a\.y'"):
        topology.matched(["a", "b"])


def test_addresses_are_compared_whole() -> None:
    topology = Topology.parse("{switch: s, children: [{host: '10.0.0.[1-2]', uplink: 1 Gbit/s}]}")
    assert hosts_of(topology.matched(["10.0.0.2", "10.0.0.1"])) == ["10.0.0.2", "10.0.0.1"]
    with pytest.raises(TopologyError, match=r"'10\.0\.0\.3' is no host"):
        topology.matched(["10.0.0.3", "10.0.0.1"])


def test_a_job_of_another_size_is_refused_first() -> None:
    with pytest.raises(TopologyError, match="has 5 ranks but the job has 4"):
        net().matched(["a0"] * 4)


def test_many_hosts_are_not_all_shown() -> None:
    topology = Topology.flat(40)
    with pytest.raises(TopologyError, match=r"h15 \(rank 15\), \.\.\.\. The job has n0 \(rank 0\)"):
        topology.matched([f"n{k}" for k in range(40)])


def test_a_flat_job_keeps_ranks_of_one_host_together() -> None:
    topology = Topology.flat_on(["n1.example", "n2.example", "n1.example", "n2.example"])
    assert (topology.name, topology.root.name) == ("flat-4", "unknown-network")
    assert (topology.ranks_of("n1"), topology.ranks_of("n2")) == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("names", "hosts"),
    [
        (["a.x", "a.y"], ["h0", "h1"]),
        (["10.0.0.1", "10.0.0.2"], ["10.0.0.1", "10.0.0.2"]),
        (["_a", "b"], ["h0", "h1"]),
        (["unknown-network", "b"], ["unknown-network", "b"]),
    ],
)
def test_a_flat_jobs_hosts_have_names_that_a_topology_can_have(names: list[str], hosts: list[str]) -> None:
    assert [host.name for host in Topology.flat_on(names).hosts] == hosts


@pytest.mark.parametrize("names", [["n0", "n1"] * 4, ["n0"] * 4 + ["n1"] * 4])
def test_a_flat_job_that_knows_its_hosts_sends_a_quarter_between_them(names: list[str]) -> None:
    sent = []
    for topology in (Topology.flat(8), Topology.flat_on(names)):
        draft = choose(topology, Collective.ALL_REDUCE, 1 << 20).draft
        between = [transfer for transfer in draft.transfers if names[transfer.src] != names[transfer.dst]]
        size = sum(draft.cuts[transfer.last] - draft.cuts[transfer.first] for transfer in between)
        sent.append(size / draft.cuts[-1])
    assert sent[1] == sent[0] / 4
