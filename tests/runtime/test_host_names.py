"""All ranks number the topology by the names of their hosts, or all say why that cannot be."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from meeting_stores import DictStore
from syncline.errors import RendezvousError, TopologyError
from syncline.runtime import match_topology
from syncline.schedule import with_gateways_chosen
from syncline.topology import Topology

TIMEOUT_S = 60.0


def match_all(
    topology: Topology | Sequence[Topology | TopologyError | None] | None,
    hosts: Sequence[str],
    store: DictStore | None = None,
) -> list[object]:
    """What each rank of a job on ``hosts`` gets, or the error that it ends with."""
    store = store or DictStore()
    given = topology if isinstance(topology, Sequence) else [topology] * len(hosts)
    results: list[object] = [None] * len(hosts)

    def main(rank: int) -> None:
        try:
            results[rank] = match_topology(
                given[rank], rank=rank, world_size=len(hosts), store=store, host=hosts[rank], timeout_s=TIMEOUT_S
            )
        except (RendezvousError, TopologyError) as error:
            results[rank] = error

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    return results


def pair() -> Topology:
    return Topology.parse("{topology: pair, switch: s, children: [{host: 'h[0-1]', uplink: 1 Gbit/s}]}")


def test_ranks_in_another_order_get_one_topology() -> None:
    found = match_all(pair(), ["h1.example", "h0.example"])
    assert found[0] == found[1] == pair().permuted([1, 0])


def test_gateways_that_are_left_open_are_chosen() -> None:
    topology = Topology.parse("{switch: s, children: [{host: 'h[0-1]', uplink: 1 Gbit/s, ranks: 2, gateway: auto}]}")
    found = match_all(topology, ["h1", "h1", "h0", "h0"])
    assert found == [with_gateways_chosen(topology.permuted([2, 3, 0, 1]))] * 4
    assert all(host.gateway != "auto" for host in found[0].hosts)  # type: ignore[attr-defined]


def test_an_earlier_attempt_in_the_same_store_is_not_believed() -> None:
    store = DictStore()
    match_all(pair(), ["h1", "h0"], store)
    assert match_all(pair(), ["h0", "h1"], store) == [pair(), pair()]


def test_one_machine_stands_for_all_hosts() -> None:
    assert match_all(pair(), ["laptop", "laptop"]) == [pair(), pair()]


def test_every_rank_shows_both_lists() -> None:
    for error in match_all(pair(), ["n0", "n1"]):
        assert isinstance(error, TopologyError)
        assert "The topology has h0 (rank 0), h1 (rank 1). The job has n0 (rank 0), n1 (rank 1)" in str(error)


def test_without_a_topology_hosts_have_their_names_and_ranks() -> None:
    found = match_all(None, ["n0", "n1", "n0"])
    assert found[0] == found[1] == found[2] == Topology.flat_on(["n0", "n1", "n0"])


def test_without_a_topology_one_machine_is_one_switch() -> None:
    assert match_all(None, ["n0", "n0"]) == [Topology.flat(2)] * 2


def test_a_name_that_cannot_be_told_is_told_as_far_as_it_can() -> None:
    assert match_all(pair(), ["h1\n", "h0"]) == [pair().permuted([1, 0])] * 2
    assert match_all(pair(), ["", ""]) == [pair(), pair()]


def test_a_job_of_one_rank_meets_nobody() -> None:
    alone = Topology.flat(1)
    for topology in (alone, None):
        found = match_topology(topology, rank=0, world_size=1, store=DictStore(), host="laptop", timeout_s=1.0)
        assert found == alone


def test_who_does_not_come_is_named_by_its_host_where_a_topology_says_it() -> None:
    with pytest.raises(RendezvousError, match=r"1 of 2 are here, and rank 1 did not come \(of h1\)"):
        match_topology(pair(), rank=0, world_size=2, store=DictStore(), host="H0.example", timeout_s=0.2)


def test_a_topology_of_another_size_is_refused_at_once() -> None:
    with pytest.raises(TopologyError, match="has 2 ranks but the job has 3"):
        match_topology(pair(), rank=0, world_size=3, store=DictStore(), host="h0", timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_topology_that_differs_is_told_to_all_with_who_and_what(odd: int) -> None:
    """Trees that are equal may be in files of different names."""
    other = Topology.flat(3, rate=1e9)
    usual = Topology.flat(3)
    given: list[Topology | TopologyError | None] = [replace(usual, name=f"copy-{rank}") for rank in range(3)]
    given[odd] = other
    results = match_all(given, ["h0", "h1", "h2"])
    assert len({str(error) for error in results}) == 1
    assert all(isinstance(error, TopologyError) for error in results)
    text = str(results[0])
    assert f"rank {odd} has digest {other.digest[:12]}" in text
    assert f"have digest {usual.digest[:12]}" in text
    assert all(error.ranks_at_fault == (odd,) for error in results)
    assert f"look first at rank {odd} (host h{odd})" in text


@pytest.mark.parametrize("odd", [0, 1])
def test_a_topology_of_no_use_is_told_to_the_ranks_that_can_use_theirs(odd: int) -> None:
    given: list[Topology | TopologyError | None] = [None, None]
    given[odd] = TopologyError("Topology 'x.yaml' line 3: no such thing")
    results = match_all(given, ["h0", "h1"])
    assert len({str(error) for error in results}) == 1
    assert f"look first at rank {odd} (host h{odd})" in str(results[0])
    assert f"rank {odd} has one of no use: Topology 'x.yaml' line 3: no such thing" in str(results[0])


def test_a_topology_that_is_of_no_use_to_anybody_is_told_as_it_is() -> None:
    error = TopologyError("Topology 'x.yaml' line 3: no such thing")
    assert match_all([error, error], ["h0", "h1"]) == [error, error]
