"""Windows and chunks that fit the links."""

import itertools
import math

from hypothesis import given, strategies as st

from syncline.fabric import FabricOptions
from syncline.fabric._native import GrantScheduler
from syncline.fabric.sizing import fit_grants, fit_options, fit_window, fit_window_sizes
from syncline.topology.topology import Topology

KIB = 1 << 10


def window(topology, rank=0, **settings):
    world_size = topology.num_ranks if topology else 2
    sizes = fit_grants(FabricOptions(**settings), rank=rank, world_size=world_size, topology=topology)
    return sizes["window"].most_bytes


def window_of(rate, **settings):
    return fit_window(rate, FabricOptions(**settings))


def test_the_window_lasts_ten_milliseconds_on_the_link_of_the_host():
    assert window(Topology.flat(2, rate=1e9)) == 10_000_000
    assert window(Topology.flat(2, rate=1e6)) == 64 * KIB, "two chunks at least"
    assert window(None) == 4096 * KIB
    assert window(Topology.flat(2)) == 4096 * KIB
    assert window(Topology.flat(2, rate=1e9), grant_window_bytes=5) == 5


def test_chunks_last_five_milliseconds_on_their_route():
    options = fit_options(FabricOptions(), rank=0, world_size=2, topology=Topology.flat(2, rate=20e6))
    assert options[1].chunk_bytes == 100_000
    assert options[1].unsent_bytes == 100_000
    assert options[1].congestion == "cubic"
    options = fit_options(FabricOptions(), rank=0, world_size=2, topology=Topology.flat(2, rate=1e5))
    assert options[1].chunk_bytes == 32 * KIB
    options = fit_options(FabricOptions(), rank=0, world_size=2, topology=Topology.flat(2, rate=1e9))
    assert options[1].chunk_bytes == 256 * KIB
    assert fit_options(FabricOptions(), rank=0, world_size=2, topology=None)[1] == FabricOptions()


def test_a_socket_is_shared_by_its_ranks():
    sockets = "[{socket: s, uplink: 40 MB/s, ranks: 2}, {socket: t, uplink: 80 MB/s, ranks: 2}]"
    topology = Topology.parse(f"{{switch: w, children: [{{host: a, uplink: 1 GB/s, children: {sockets}}}]}}")
    windows = [fit_grants(FabricOptions(), rank=rank, world_size=4, topology=topology)["window"] for rank in (0, 2)]
    alone = [
        fit_grants(FabricOptions(), rank=0, world_size=2, topology=Topology.flat(2, rate=rate))["window"]
        for rate in (20e6, 40e6)
    ]
    assert windows == alone


def test_with_several_classes_the_window_may_shrink():
    topology = Topology.flat(2, rate=20e6)
    scheduler = GrantScheduler(**fit_grants(FabricOptions(), rank=0, world_size=2, topology=topology))
    assert (scheduler.window_bytes, scheduler.quantum_bytes) == (200_000, 100_000)
    scheduler.resize(**fit_window_sizes(FabricOptions(num_classes=4), 0, 2, topology))
    assert (scheduler.window_bytes, scheduler.quantum_bytes) == (200_000, 50_000), "a quarter of the window"
    found = window_of(20e6, num_classes=4)
    assert (found.most_bytes, found.least_bytes) == (200_000, 40_000)
    assert window_of(1e6, num_classes=4).least_bytes == 32 * KIB
    for settings in ({"num_classes": 1}, {"num_classes": 4, "grant_window_bytes": 70_000}):
        assert window_of(20e6, **settings).is_fixed
    assert window_of(math.inf, num_classes=4).is_fixed


def test_eager_messages_still_fit_into_a_chunk():
    settings = {"eager_bytes": 100_000, "chunk_bytes": 200_000}
    options = fit_options(FabricOptions(**settings), rank=0, world_size=2, topology=Topology.flat(2, rate=1e5))
    assert options[1].chunk_bytes == 100_000


def unasked(topology, rank=0, **settings):
    options = fit_options(FabricOptions(**settings), rank=rank, world_size=topology.num_ranks, topology=topology)
    return {peer: (fitted.eager_bytes, fitted.credit_bytes) for peer, fitted in options.items()}


def test_neighbours_send_up_to_a_chunk_unasked_within_a_window_for_all():
    asking = (16 * KIB, 4096 * KIB)
    topology = Topology.load("two-racks-5-3")
    terms = unasked(topology)
    assert [terms[peer] for peer in (1, 2, 3, 4)] == [(256 * KIB, 312_500)] * 4
    assert [terms[peer] for peer in (5, 6, 7)] == [asking] * 3, "links between switches"
    assert unasked(topology, num_classes=2)[1] == asking, "several classes are for order"
    assert unasked(topology, eager_bytes=0)[1] == (0, 4096 * KIB), "always ask"
    assert unasked(Topology.flat(8, rate=20e6))[1] == asking, "28 KB of credit are too little"


def test_neighbours_ask_where_the_credit_of_one_of_them_would_be_too_little():
    hosts = "[{host: slow, uplink: 80 Mbit/s}, {host: 'h[1-2]', uplink: 1 Gbit/s}]"
    topology = Topology.parse(f"switch: rack\nchildren: {hosts}\n")
    asking = (16 * KIB, 4096 * KIB)
    fast, slow = unasked(topology, rank=1), unasked(topology, rank=0)
    assert fast[0] == slow[1] == slow[2] == asking, "50 KB of credit are too little"
    assert fast[2] == (256 * KIB, 625_000)


@given(st.lists(st.floats(1e4, 1e11), min_size=2, max_size=9), st.integers(0, 1 << 18))
def test_each_takes_what_the_other_sends_unasked(rates, eager_bytes):
    children = ", ".join(
        f"{{host: h{number}, uplink: {8 * rate / 1e6:.6f} Mbit/s}}" for number, rate in enumerate(rates)
    )
    topology = Topology.parse(f"switch: rack\nchildren: [{children}]\n")
    terms = [unasked(topology, rank=rank, eager_bytes=eager_bytes) for rank in range(len(rates))]
    for sender, receiver in itertools.permutations(range(len(rates)), 2):
        sent_bytes, taken_bytes = terms[sender][receiver][0], terms[receiver][sender][1]
        assert eager_bytes <= sent_bytes <= taken_bytes


def test_ranks_of_one_host_divide_its_link_and_ask_each_other():
    topology = Topology.load("deep-asymmetric")  # h5 has rank 5, h6 has ranks 6 and 7
    assert unasked(topology, rank=6) == {
        peer: (256 * KIB, 625_000) if peer == 5 else (16 * KIB, 4096 * KIB) for peer in range(10)
    }


def test_each_route_has_its_own_sizes():
    topology = Topology.load("deep-asymmetric")  # h6 has ranks 6 and 7 and 1 Gbit/s; its rack has 100 Mbit/s up
    assert window(topology, rank=6) == 625_000, "two ranks share the link of their host"
    options = fit_options(FabricOptions(), rank=6, world_size=10, topology=topology)
    assert options[7].chunk_bytes == 256 * KIB
    assert options[0].chunk_bytes == 62_500


def shares(name, peer, rank):
    topology = name if isinstance(name, Topology) else Topology.load(name)
    sizes = fit_grants(FabricOptions(), rank=rank, world_size=topology.num_ranks, topology=topology)
    return [share.part_bytes for share in sizes["shares"][peer]]


def test_receivers_behind_a_slow_link_share_fifteen_milliseconds_of_it():
    assert shares("two-racks-5-3", 0, 5) == [125_000, 125_000], "25 MB/s, three receivers: the rack's link and its own"
    assert shares("two-racks-5-3", 5, 0) == [75_000, 75_000]
    assert shares("two-racks-5-3", 0, 1) == [], "no link between switches lies on the way"
    slow = Topology.parse(Topology.load("two-sites").to_yaml().replace(", latency: 10 ms", ""))
    assert shares(slow, 0, 4) == [32 * KIB] * 2, "never less than the smallest chunk"
    assert shares("flat-8", 0, 1) == []


SITES = """
switch: wide-area
children:
  - {switch: a, uplink: {rate: 200 Mbit/s, latency: 10 ms}, children: [{host: "a[0-1]", uplink: 1 Gbit/s}]}
  - {switch: b, uplink: {rate: 100 Mbit/s, latency: 5 ms}, children: [{host: "b[0-1]", uplink: 1 Gbit/s}]}
  - {host: c, uplink: 1 Gbit/s}
"""


def test_what_a_route_carries_in_three_round_trips_is_under_way_beside_the_window():
    topology = Topology.parse(SITES)
    sizes = fit_grants(FabricOptions(), rank=0, world_size=5, topology=topology)
    near_bytes, far_bytes, from_c_bytes = 1_250_000, 12_500_000 * 3 * 0.030, 25_000_000 * 3 * 0.020
    assert sizes["window"].most_bytes == near_bytes + far_bytes + from_c_bytes, "each slow link counts once"
    assert sizes["sender_bytes"] == {
        0: near_bytes + far_bytes + from_c_bytes,
        1: near_bytes,
        **dict.fromkeys((2, 3), 125_000 + far_bytes),
        4: 250_000 + from_c_bytes,
    }
    up, down = sizes["shares"][2]
    assert (up.part_bytes, up.target_s) == (12_500_000 * 0.105 // 3, 0.050)
    assert (down.part_bytes, down.target_s) == (25_000_000 * 0.105 // 2, 0.050), "the longest way over it counts"
    assert (up.most_bytes, down.most_bytes) == (12_500_000 * 0.105, 25_000_000 * 0.105)
    assert (up.least_bytes, down.least_bytes) == (12_500_000 * 0.030 // 3, 25_000_000 * 0.030 // 2), "it waits nowhere"
    assert (up.tolerated_share, up.least_judged_bytes) == (0.04, 724_000), "a far link loses some by chance"


def test_without_latency_shares_fall_as_far_as_they_did():
    sizes = fit_grants(FabricOptions(), rank=0, world_size=8, topology=Topology.load("two-racks-5-3"))
    found = [share for shares in sizes["shares"].values() for share in shares]
    assert {share.least_bytes for share in found} == {16 * KIB}
    assert {(share.tolerated_share, share.least_judged_bytes) for share in found} == {(0.02, 0)}


def test_only_what_is_far_is_sent_by_a_control_that_does_not_begin_slowly_after_a_pause():
    options = fit_options(FabricOptions(), rank=0, world_size=5, topology=Topology.parse(SITES))
    assert [options[peer].congestion for peer in range(5)] == [None, "cubic", "bbr", "bbr", "bbr"]
    near = fit_options(FabricOptions(), rank=0, world_size=8, topology=Topology.load("two-racks-5-3"))
    assert {options.congestion for peer, options in near.items() if peer} == {"cubic"}
    asked = fit_options(FabricOptions(congestion="reno"), rank=0, world_size=5, topology=Topology.parse(SITES))
    assert {options.congestion for options in asked.values()} == {"reno"}


def test_what_is_far_is_bounded_by_the_rate_of_the_own_link():
    uplink = "{rate: 1 Gbit/s, latency: 10 ms}"
    sites = [f"{{switch: s{k}, uplink: {uplink}, children: [{{host: h{k}, uplink: 1 Gbit/s}}]}}" for k in range(4)]
    topology = Topology.parse(f"{{switch: w, children: [{', '.join(sites)}]}}")
    assert window(topology) == 125_000_000 * (0.010 + 3 * 0.040)
