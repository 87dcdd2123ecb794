"""The plan of a lab: names, addresses and variables, without building anything."""

import ipaddress

import pytest

from syncline.errors import LabError
from syncline.lab.plan import building_batches, choose_network, plan_lab
from syncline.lab.queues import QueueSettings
from syncline.topology import Topology

NETWORK = ipaddress.IPv4Network("10.99.0.0/16")


def plan(topology):
    return plan_lab(topology, lab_id="abc123", network=NETWORK)


def test_hosts_bridges_and_links_of_two_racks():
    lab = plan(Topology.load("two-racks-5-3"))
    assert lab.namespaces[:2] == ("syncline-abc123._switches", "syncline-abc123.h0")
    assert [host.address for host in lab.hosts][:2] == ["10.99.0.1", "10.99.0.2"]
    assert list(lab.bridges) == ["core", "rack-a", "rack-b"]
    rack, first = lab.links[0], lab.links[1]
    assert (rack.child, rack.lower_bridge, rack.upper_bridge) == ("rack-a", "b1", "b0")
    assert (first.child, first.lower_bridge, first.lower_interface, first.upper_bridge) == ("h0", None, "eth0", "b1")
    interfaces = [link.upper_interface for link in lab.links]
    assert len(set(interfaces)) == len(interfaces)
    assert all(len(interface) <= 15 for interface in interfaces)  # the kernel's limit


def test_variables_lead_to_the_host_of_rank_0():
    topology = Topology.load("demo-1-3").permuted([2, 0, 1, 3])
    lab = plan(topology)
    assert lab.environment(lab.hosts[1], topology_file="/t.yaml") == {
        "SYNCLINE_LAB": "abc123",
        "SYNCLINE_TOPOLOGY": "/t.yaml",
        "SYNCLINE_HOST": "h1",
        "SYNCLINE_INTERFACE": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "MASTER_ADDR": lab.host("h2").address,
        "MASTER_PORT": "29500",
    }


def test_a_host_alone_talks_to_itself():
    lab = plan(Topology.parse("host: box\nranks: 4\n"))
    assert (lab.hosts[0].interface, lab.hosts[0].address) == ("lo", "127.0.0.1")
    assert (lab.links, lab.bridges) == ((), {})


def test_what_cannot_be_emulated_is_told():
    assert plan(Topology.load("two-sites")).notes() == ()
    without = plan_lab(Topology.load("two-sites"), lab_id="abc123", network=NETWORK, has_taps=False)
    assert without.notes() == ("The latency of site-a, site-b is left out: /dev/net/tun cannot be opened here.",)
    assert without.tapped_interfaces == ()
    assert plan(Topology.load("flat-8")).notes() == ()
    losing = Topology.parse("{switch: s, children: [{host: h, uplink: {rate: 1 GB/s, loss: 1 %}}]}")
    assert [each[2:] for each in plan(losing).tapped_interfaces] == [(0.0, 0.01)]
    alone = plan_lab(losing, lab_id="abc123", network=NETWORK, has_taps=False)
    assert alone.notes() == ("The loss of h is left out: /dev/net/tun cannot be opened here.",)
    local = plan(Topology.parse("host: box\nranks: 9\nlocal: 1 GB/s\n")).notes()
    names = "rank 0, rank 1, rank 2, rank 3 and 5 more"
    assert local == (f"Ranks of one host talk over its loopback: the rates of {names} are left out.",)


def test_a_network_is_chosen_that_no_route_leads_to():
    def choose(*networks):
        return str(choose_network(map(ipaddress.IPv4Network, networks)))

    assert choose() == "10.99.0.0/16"
    assert choose("0.0.0.0/0") == "10.99.0.0/16"
    assert choose("10.99.3.0/24", "10.100.0.0/15") == "10.102.0.0/16"
    assert choose("10.0.0.0/8") == "172.16.0.0/16"
    with pytest.raises(LabError, match="every private network that the lab knows is routed"):
        choose("10.0.0.0/8", "172.16.0.0/12", "198.18.0.0/15")


def test_too_many_hosts_and_unknown_hosts():
    with pytest.raises(LabError, match=r"8 hosts do not fit in 10\.99\.0\.0/29; a lab has at most 6"):
        plan_lab(Topology.flat(8), lab_id="x", network=ipaddress.IPv4Network("10.99.0.0/29"))
    with pytest.raises(LabError, match="lab abc123 has no host 'x'; its hosts are h0, h1"):
        plan(Topology.flat(2)).host("x")


def test_building_makes_namespaces_first_and_never_touches_the_machines_own():
    batches = list(building_batches(plan(Topology.load("deep-asymmetric")), QueueSettings()))
    assert batches[0].namespace is None
    assert all(line.startswith("netns add syncline-abc123.") for line in batches[0].lines)
    assert all(batch.namespace is not None for batch in batches[1:])
    limits = [line for batch in batches if batch.program == "tc" for line in batch.lines if "classid 1:1 " in line]
    assert len(limits) == 2 * len(plan(Topology.load("deep-asymmetric")).links)


def test_links_with_a_latency_are_made_by_who_holds_packets_back():
    lab = plan(
        Topology.parse(
            "switch: s\nchildren:\n"
            "  - {host: h0, uplink: {rate: 1 Gbit/s, latency: 2 ms, loss: 1 %}}\n"
            "  - {switch: t, uplink: {rate: 1 Gbit/s, latency: 5 ms}, children: [{host: h1, uplink: 1 Gbit/s}]}\n"
        )
    )
    assert lab.tapped_interfaces == (("ld0", "d0", 0.002, 0.01), ("ld1", "d1", 0.005, 0.0))
    _, switches, *_ = building_batches(lab, QueueSettings())
    made = [line for line in switches.lines if "veth" in line or "link set dev ld" in line]
    assert made == [
        "link set dev ld0 name eth0 netns syncline-abc123.h0",
        "link set dev ld1 name u1 netns syncline-abc123._switches",
        "link add name d2 type veth peer name eth0 netns syncline-abc123.h1",
    ]


def test_sockets_are_inside_a_host_and_their_rates_are_left_out():
    sockets = "[{socket: s, uplink: 1 GB/s, ranks: 2}, {socket: t, uplink: unlimited, ranks: 2}]"
    topology = Topology.parse(f"{{switch: w, children: [{{host: a, uplink: 1 Gbit/s, children: {sockets}}}]}}")
    lab = plan(topology)
    assert [link.child for link in lab.links] == ["a"]
    assert lab.notes() == ("Ranks of one host talk over its loopback: the rates of a/s are left out.",)
