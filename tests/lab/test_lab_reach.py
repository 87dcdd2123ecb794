"""A job with two hosts that nobody can dial, as behind routers: they train with all others."""

import json
import subprocess
import sys

import pytest
from lab_ranks import DEADLINE_S, carried_between, hear, start, tell
from lab_sharded import NUM_BYTES

from syncline.lab import Lab
from syncline.topology import DirectedLink, Topology

HIDDEN = ("h1", "h2")
DIAL_NOBODY = """
import subprocess, sys
tc = lambda *words: subprocess.run(["tc", *words], check=True)
tc("class", "add", "dev", "eth0", "parent", "1:", "classid", "1:ff", "htb", "rate", "1mbit")
tc("qdisc", "add", "dev", "eth0", "parent", "1:ff", "bfifo", "limit", "1")  # no packet is so small
first_packets = ["match", "ip", "protocol", "6", "0xff", "match", "u8", "0x02", "0x12", "at", "33"]
for address in sys.argv[1:]:
    to = ["match", "ip", "dst", address, *first_packets, "flowid", "1:ff"]
    tc("filter", "add", "dev", "eth0", "parent", "1:", "protocol", "ip", "prio", "1", "u32", *to)
"""
"""Lose what would open a connection to these addresses, as their routers would."""
ONE_PORT = 29600
DIAL_SOME_PORTS = """
import subprocess, sys
tc = lambda *words: subprocess.run(["tc", *words], check=True, capture_output=True, text=True).stdout
default = int(tc("qdisc", "show", "dev", "eth0").split("default ")[1].split()[0], 16)
tc("class", "add", "dev", "eth0", "parent", "1:", "classid", "1:ff", "htb", "rate", "1mbit")
tc("qdisc", "add", "dev", "eth0", "parent", "1:ff", "bfifo", "limit", "1")  # no packet is so small
add = ["filter", "add", "dev", "eth0", "parent", "1:", "protocol", "ip"]
first_packet = ["match", "ip", "protocol", "6", "0xff", "match", "u8", "0x02", "0xff", "at", "33"]
tc(*add, "prio", "1", "u32", "match", "ip", "dport", *sys.argv[1:], "flowid", f"1:{default:x}")
tc(*add, "prio", "2", "u32", *first_packet, "flowid", "1:ff")
"""
"""Lose what would open a connection to any other port (by number and mask), as a firewall would that lets some pass."""
LOSE_LARGE_PACKETS = """
import subprocess
nft = lambda words: subprocess.run(["nft", *words.split()], check=True)
nft("add table ip hole")
nft("add chain ip hole in { type filter hook input priority 0 ; }")
nft("add rule ip hole in ip length > 1024 drop")
"""
"""As on a way with an interface of a smaller MTU whose router does not say so."""
DIAL = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1.0)"


def run(lab, host, code, *arguments):
    process = lab.spawn(host, [sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True)
    errors = process.communicate(timeout=60)[1]
    return process.returncode, errors


def test_hosts_behind_routers_call_and_meet_at_one_that_can_be_dialled():
    topology = Topology.flat(3, rate=125e6)
    with Lab(topology) as lab:
        addresses = [lab.plan.host(host).address for host in HIDDEN]
        for host in ("h0", *HIDDEN):
            assert run(lab, host, DIAL_NOBODY, *addresses) == (0, "")
        for address in addresses:
            assert "TimeoutError" in run(lab, "h0", DIAL, address, "9")[1]
        assert "ConnectionRefusedError" in run(lab, "h1", DIAL, lab.plan.host("h0").address, "9")[1]
        hidden = {host: {"SYNCLINE_ADVERTISE": "none"} for host in HIDDEN}
        carried = carried_between(lab, start(lab, "lab_sharded.py", "2", of_hosts=hidden))
    # What the two say to each other passes there twice: a third of the model each way, in each half of a step.
    passed = carried[DirectedLink("h0", "up")] - carried[DirectedLink("h1", "up")]
    assert passed > 2 * 2 * (2 * NUM_BYTES / 3) * 0.5


@pytest.mark.parametrize(("ports", "mask"), [("29600", "0xffff"), ("29600-29631", "0xffe0")])
def test_a_whole_job_passes_through_the_ports_that_each_host_lets_through(ports, mask):
    """Of two hosts with two ranks each: between them no other port can be reached, not that of the store either."""
    topology = Topology.parse("{switch: core, children: [{host: 'h[0-1]', uplink: 1 Gbit/s, ranks: 2}]}")
    first, last = int(ports.partition("-")[0]), ports.rpartition("-")[2]
    with Lab(topology) as lab:
        for host in ("h0", "h1"):
            assert run(lab, host, DIAL_SOME_PORTS, str(first), mask) == (0, "")
        there = lab.plan.host("h0").address
        for closed in (first - 1, int(last) + 1):
            assert "TimeoutError" in run(lab, "h1", DIAL, there, str(closed))[1]
        assert "ConnectionRefusedError" in run(lab, "h1", DIAL, there, last)[1]
        some = {"SYNCLINE_PORTS": ports, "MASTER_PORT": last}
        carried = carried_between(lab, start(lab, "lab_sharded.py", "2", of_hosts={"h0": some, "h1": some}))
    assert carried[DirectedLink("h1", "up")] > 2 * NUM_BYTES * 0.5


def test_doctor_says_before_the_job_who_cannot_be_dialled():
    """The same hosts behind routers, found by running one command on each."""
    with Lab(Topology.flat(3, rate=125e6)) as lab:
        names = {host: lab.plan.host(host).address for host in ("h0", *HIDDEN)}
        for host in names:
            assert run(lab, host, DIAL_NOBODY, *(names[each] for each in HIDDEN)) == (0, "")
        doctor = [sys.executable, "-m", "syncline", "doctor", "--json", "--for", "60"]
        asked = [*doctor, "--hosts", ",".join(names.values()), "--ports", f"{ONE_PORT}-{ONE_PORT + 1}"]
        processes = [lab.spawn(host, asked, stdout=subprocess.PIPE, text=True) for host in names]
        told = [json.loads(process.communicate(timeout=90)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0] * 3
    for one in told:
        assert one["says"][-1] == f"{names['h1']} and {names['h2']} would meet at {names['h0']}, which passes all on."
        assert one["found"] == told[0]["found"]


def test_a_way_that_loses_large_packets_is_told_of_long_before_a_deadline():
    with Lab(Topology.flat(2, rate=125e6)) as lab:
        soon = {"SYNCLINE_SILENCE": "4"}
        ranks = start(lab, "lab_sharded.py", "2", of_hosts={"h0": soon, "h1": soon}, stderr=subprocess.PIPE)
        hear(ranks, "ready")
        assert run(lab, "h1", LOSE_LARGE_PACKETS) == (0, "")
        tell(ranks)
        told = [rank.communicate(timeout=DEADLINE_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    for errors in told:
        assert "is heard, but got nothing of the data that was sent to it for " in errors
        assert "as only small packets pass; give all interfaces on the way between the hosts the same MTU" in errors
