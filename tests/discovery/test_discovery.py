"""Ranks measure together and get the same tree, what is found is kept, and nothing of it is left on the fabric."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from emulated_networks import EmulatedNetwork

from syncline.discovery import Discovery, discover_network, discovery, discovery_folder
from syncline.discovery.kept import keep, recall
from syncline.discovery.probe import Prober
from syncline.discovery.tree_search import Flow, Round
from syncline.runtime import Communicator, communicators_in_memory
from syncline.topology import Topology

WAIT_S = 60.0
HOSTS = ["n0", "n1", "n0", "n2", "n3"]


def on_all(communicators: Sequence[Communicator], **settings: Any) -> list[Discovery]:
    """Return what each rank finds."""
    results: list[Any] = [None] * len(communicators)

    def main(rank: int) -> None:
        results[rank] = discover_network(communicators[rank], **settings)

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(len(communicators))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert None not in results
    return results


@pytest.fixture
def job() -> Any:
    communicators = communicators_in_memory(len(HOSTS), Topology.flat_on(HOSTS))
    yield communicators
    for communicator in communicators:
        communicator.abort()


def test_all_ranks_get_the_same_tree_of_their_hosts(job: Sequence[Communicator]) -> None:
    all_found = on_all(job)
    assert all(each.topology == all_found[0].topology for each in all_found)
    found = all_found[0].topology
    assert [found.host_of(rank).name for rank in range(len(HOSTS))] == HOSTS
    assert found.has_rates
    for communicator in job:
        statistics = communicator.statistics()
        assert statistics.fabric.pending_receives == 0
        assert statistics.fabric.unexpected_bytes == 0


def test_what_is_found_is_kept_and_recalled_while_it_holds(
    job: Sequence[Communicator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a network whose second half becomes ten times slower in the end."""
    true = Topology.parse(
        "{switch: s, children: [{host: n0, ranks: 2, uplink: 1 Gbit/s}, {host: 'n[1-3]', uplink: 1 Gbit/s}]}"
    )
    network = EmulatedNetwork(true, noise=0.005, seed=1)
    monkeypatch.setattr(discovery, "_measuring", lambda *_: network.measure)
    first, second = on_all(job, folder=tmp_path), on_all(job, folder=tmp_path)
    assert [each.is_recalled for each in (first[0], second[0])] == [False, True]
    assert first[0].topology == second[-1].topology
    assert first[0].kept == second[0].kept == str(*tmp_path.iterdir())
    assert "4 hosts at one switch, about 1 Gbit/s" in str(second[0])
    assert not on_all(job, folder=tmp_path, recalls=False)[0].is_recalled
    slow = Topology.parse(true.to_yaml().replace("1 Gbit/s", "100 Mbit/s"))
    network = EmulatedNetwork(slow, noise=0.005, seed=1)
    third = on_all(job, folder=tmp_path)[0]
    assert not third.is_recalled
    assert "about 100 Mbit/s" in str(third)


def test_a_flow_that_does_not_end_leaves_one_switch(
    job: Sequence[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> Any:
        def measure(flows: Sequence[Flow]) -> Round:
            raise TimeoutError

        return measure

    monkeypatch.setattr(discovery, "_measuring", never)
    all_found = on_all(job)
    assert {math.isinf(each.error) for each in all_found} == {True}
    assert not all_found[-1].topology.has_rates
    assert str(all_found[0]).startswith("the network could not be measured, as some flow did not end within 5 s")


def test_nothing_is_ordered_before_all_ranks_listen(
    job: Sequence[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a rank has listened before, on the same stream, what comes until it listens again is dropped."""
    opened: list[int] = []
    ordered_to: list[int] = []
    open_prober, lead = Prober.open, discovery._lead

    async def opening(prober: Prober) -> None:
        await open_prober(prober)
        opened.append(prober._port.rank)

    def leading(*arguments: Any) -> str:
        ordered_to.append(len(opened))
        return lead(*arguments)

    monkeypatch.setattr(Prober, "open", opening)
    monkeypatch.setattr(discovery, "_lead", leading)
    assert all(math.isfinite(on_all(job)[0].error) for _ in range(2))
    assert ordered_to == [4, 8]


def test_a_round_tells_the_rate_of_each_flow() -> None:
    first, second, third = communicators_in_memory(3)
    ports = [each.open_port("test") for each in (first, second, third)]
    probers = [Prober(port, (0, 1, 2), stream=7) for port in ports]
    for port, prober in zip(ports, probers, strict=True):
        port.run(prober.open(), WAIT_S)
    for flows in [((0, 1),), ((1, 2), (2, 1)), ((0, 1), (0, 2), (2, 0))]:
        measured = ports[0].run(probers[0].measure(flows, 0.02), WAIT_S)
        assert measured.flows == flows
        assert all(0 < rate < math.inf for rate in measured.rates)
    for each in (first, second, third):
        each.abort()


def test_what_was_kept_of_other_hosts_or_is_damaged_is_not_recalled(tmp_path: Path) -> None:
    flat = Topology.flat_on(["a", "b", "b"])
    kept = keep(tmp_path, flat)
    assert kept is not None
    assert recall(tmp_path, flat) == replace(flat, source=str(kept))
    more = Topology.flat_on(["b", "a", "a", "b"])
    recalled = recall(tmp_path, more)
    assert recalled is not None
    assert [recalled.host_of(rank).name for rank in range(4)] == ["b", "a", "a", "b"]
    assert recall(tmp_path, Topology.flat_on(["a", "c"])) is None
    for damaged in ("{", Topology.flat_on(["a", "c"]).to_yaml()):
        kept.write_text(damaged)
        assert recall(tmp_path, flat) is None
    kept.unlink()
    kept.mkdir()
    assert recall(tmp_path, flat) is None
    assert keep(tmp_path / "missing\0", flat) is None


def test_where_what_was_found_is_kept() -> None:
    assert discovery_folder({"HOME": "/home/a"}) == Path("/home/a/.cache/syncline/networks")
    assert discovery_folder({"HOME": "/home/a", "XDG_CACHE_HOME": "/c"}) == Path("/c/syncline/networks")
    assert discovery_folder({}) is None


@pytest.mark.parametrize(("round_trip_s", "flows_s"), [(0.0, list(discovery.FLOW_S)), (0.1, [discovery.FLOW_S[0]])])
def test_a_tree_in_doubt_is_measured_with_longer_flows_unless_round_trips_make_them_long(
    round_trip_s: float, flows_s: list[float]
) -> None:
    true = Topology.load("two-racks-5-3")
    network = EmulatedNetwork(true, noise=0.6, seed=1)
    asked = []

    def measuring(flow_s: float) -> Any:
        asked.append(flow_s)
        return network.measure

    trips = dict.fromkeys(permutations(range(8), 2), round_trip_s)
    discovery._lead(network.flat, measuring, lambda: trips, None, None)
    assert asked == flows_s
