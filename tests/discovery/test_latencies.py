"""Latencies of links, from round trips between hosts, and flows that last as long as their round trips want."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import permutations

import pytest
from emulated_networks import random_racks, with_random_latencies

from syncline.discovery import probe
from syncline.discovery.latencies import LEAST_S, sites_of, with_latencies
from syncline.discovery.probe import Prober
from syncline.fabric.sizing import FAR_S
from syncline.runtime import communicators_in_memory
from syncline.runtime.port import Port
from syncline.topology import Topology
from syncline.topology.tree import longest_way_s

WAIT_S = 20.0


def firsts(topology: Topology) -> list[int]:
    return sorted(host.ranks[0].rank for host in topology.hosts)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_found_explains_all_round_trips(seed: int) -> None:
    """With what switches and hosts take beside it, which is no latency of a link."""
    bare = random_racks(seed)
    true, ranks, draw = with_random_latencies(bare, seed), firsts(bare), random.Random(seed)
    trips = {
        (one, other): true.round_trip_s(ranks[one], ranks[other]) + draw.uniform(50e-6, 400e-6)
        for one, other in permutations(range(len(ranks)), 2)
    }
    found = with_latencies(bare, ranks, trips)
    for one, other in trips:
        expected_s = true.round_trip_s(ranks[one], ranks[other])
        assert found.round_trip_s(ranks[one], ranks[other]) == pytest.approx(expected_s, abs=2 * LEAST_S)
    assert with_latencies(true, ranks, trips) == found, "what was there before does not count"


def test_what_a_switch_takes_is_no_latency() -> None:
    topology = Topology.load("two-racks-5-3")
    trips = dict.fromkeys(permutations(range(8), 2), 0.0003)
    assert with_latencies(topology, range(8), trips) == topology
    assert with_latencies(topology, range(8), dict.fromkeys(trips, 0.0)) == topology, "where no kernel tells"


def test_hosts_near_each_other_are_a_site() -> None:
    far_s, near_s = FAR_S, 0.9 * FAR_S
    trips = {(0, 1): near_s, (1, 3): near_s, (0, 3): far_s, (0, 2): far_s, (1, 2): far_s, (2, 3): far_s}
    assert sites_of(4, trips) == [{0, 1, 3}, {2}], "two are near a third"
    assert sites_of(5, trips | {(2, 4): 0.0}) == [{0, 1, 3}, {2, 4}], "what is not known is taken for near"
    assert sites_of(3, dict.fromkeys(permutations(range(3), 2), far_s)) == [{0}, {1}, {2}]


def test_far_flows_count_while_all_of_them_share_a_link() -> None:
    """The first has half of the link until the other ends, at 1.0 s, and all of it then."""
    far = probe._Receiving(begin_s=0.0, end_s=1.0, latest_s=2.0, round_trip_s=FAR_S)
    far.landed = [(second / 10, 1000) for second in range(1, 11)] + [
        (1.0 + second / 20, 1000) for second in range(1, 21)
    ]
    assert probe._rate(far) == pytest.approx(10_000)
    near = replace(far, round_trip_s=0.0)
    assert probe._rate(near) > 15_000, "which needs as many messages as a slow link lets pass after a pause"
    late = replace(near, latest_s=1.0)
    assert probe._rate(late) == pytest.approx(10_000), "but only while all of its round may send"


def test_the_longest_way_is_that_between_the_two_ranks_that_are_furthest() -> None:
    for seed in range(20):
        topology = with_random_latencies(random_racks(seed), seed)
        pairs = permutations(range(topology.num_ranks), 2)
        assert longest_way_s(topology.root) == pytest.approx(max(topology.round_trip_s(*pair) for pair in pairs) / 2)
    assert longest_way_s(Topology.parse("host: box\nranks: 2\n").root) == 0.0
    assert longest_way_s(Topology.flat(1, latency_s=1.0).root) == 0.0


def test_a_flow_that_is_far_has_time_for_its_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends of a flow send and await messages of one size, though only one of them knows the round trip."""
    far_s, sizes = 2 * FAR_S, []
    trips = {0: {1: far_s, 2: 0.0}, 1: {}, 2: {}}
    monkeypatch.setattr(Port, "round_trips", lambda port: trips[port.rank])
    send = Port.send

    def noting(port: Port, peer: int, tag: int, payload: memoryview, **how: int) -> None:
        sizes.append((port.rank, peer, len(payload)))
        send(port, peer, tag, payload, **how)

    monkeypatch.setattr(Port, "send", noting)
    communicators = communicators_in_memory(3)
    ports = [each.open_port("test") for each in communicators]
    probers = [Prober(port, (0, 1, 2), stream=7, known_s=lambda one, other: 1e-3 * (one + other)) for port in ports]
    for port, prober in zip(ports, probers, strict=True):
        port.run(prober.open(), WAIT_S)
    found = ports[0].run(probers[0].round_trips(), WAIT_S)
    assert found[0, 1] == found[1, 0] == far_s
    assert (found[1, 2], found[0, 2], found[2, 0]) == (3e-3, 2e-3, 2e-3), "what was known counts without a connection"
    measured = ports[0].run(probers[0].measure([(0, 1), (2, 0)], 0.02), WAIT_S)
    assert all(0 < rate < math.inf for rate in measured.rates)
    assert max(size for one, other, size in sizes if (one, other) == (0, 1)) == probe.FAR_BYTES
    assert max(size for one, other, size in sizes if (one, other) == (2, 0)) > probe.FAR_BYTES
    for each in communicators:
        each.abort()
