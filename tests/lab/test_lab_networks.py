"""Ranks whose network is none, is behind another, or means other things to others: they train as if it were one."""

import contextlib
import json
import secrets
import subprocess
import sys

import pytest
from lab_ranks import DEADLINE_S, end, hear, start, tell, trained

from syncline.lab import Lab
from syncline.lab.records import HOST_NAMES
from syncline.topology import Topology

PORT = "29600"
RACKS = """
switch: core
children:
  - {switch: r0, uplink: 1 Gbit/s, children: [{host: h0, uplink: 1 Gbit/s, ranks: 2, gateway: one}]}
  - {switch: r1, uplink: 1 Gbit/s, children: [{host: h1, uplink: 1 Gbit/s, ranks: 2, gateway: one}]}
"""
LENT = {"SYNCLINE_PORTS": PORT}
ALONE = {3: {"SYNCLINE_INTERFACE": "none"}}
BY_ROUTE = {"SYNCLINE_INTERFACE": ""}
HOME, ROUTER = "192.168.7.2", "192.168.7.1"
MASQUERADE = """
table ip home {
  chain out { type nat hook postrouting priority 100; oifname "eth0" masquerade; }
}
"""


@pytest.fixture(scope="module")
def lab():
    with Lab(Topology.parse(RACKS)) as built:
        yield built


@pytest.fixture(scope="module")
def expected(lab):
    """What the training comes to where nothing is in its way."""
    return trained(start(lab, "lab_sharded.py", "2"))


def run_in(namespace, *argv, text=None):
    command = ["ip", "netns", "exec", namespace, *argv]
    return subprocess.run(command, input=text, check=True, capture_output=True, text=True).stdout


def ip(namespace, *lines):
    run_in(namespace, "ip", "-batch", "-", text="\n".join(lines) + "\n")


@contextlib.contextmanager
def namespace():
    """A namespace that has but its loopback."""
    name = f"reach-{secrets.token_hex(3)}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        ip(name, "link set dev lo up")
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


@contextlib.contextmanager
def names(host, text):
    """Let the names of hosts mean this on a host, meanwhile."""
    file = HOST_NAMES / host.namespace / "hosts"
    before = file.read_text()
    file.write_text(text)
    yield
    file.write_text(before)


def test_a_rank_without_a_network_uses_that_of_its_host(lab, expected):
    with namespace() as nowhere:
        assert run_in(nowhere, "ip", "route") == ""
        ranks = start(lab, "lab_sharded.py", "2", of_hosts={"h1": LENT}, of_ranks=ALONE, within={3: nowhere})
        assert trained(ranks) == expected


def test_without_its_own_loopback_a_rank_says_so_at_once():
    find = "from syncline.fabric import *; from syncline.fabric.lending import *"
    code = f"{find}; find_network('h1', FabricOptions(ports=(29600, 29600)))"
    ended = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert "needs its own loopback, which is down (Network is unreachable): ip link set lo up" in ended.stderr


def test_rank_0_may_be_without_a_network(lab, expected):
    """It serves the store at the port that it shares with who lends it a network."""
    shared = {host: LENT | {"MASTER_PORT": PORT} for host in ("h0", "h1")}
    with namespace() as nowhere:
        alone = {0: ALONE[3]}
        assert (
            trained(start(lab, "lab_sharded.py", "2", of_hosts=shared, of_ranks=alone, within={0: nowhere})) == expected
        )


def kill(rank):
    rank.kill()
    rank.communicate(timeout=DEADLINE_S)


def test_when_who_lends_is_killed_all_name_it(lab):
    with namespace() as nowhere:
        ranks = start(
            lab,
            "lab_sharded.py",
            "2",
            of_hosts={"h1": LENT},
            of_ranks=ALONE,
            within={3: nowhere},
            stderr=subprocess.PIPE,
        )
        hear(ranks, "ready")
        kill(ranks.pop(2))
        tell(ranks)
        for rank in ranks:
            errors = rank.communicate(timeout=DEADLINE_S)[1]
            assert rank.returncode == 1
            assert "PeerLostError: rank 2 (host h1)" in errors


def test_an_elastic_job_goes_on_when_who_lends_is_killed(lab):
    """With the rank that was lent to, whose connections are its own."""
    with namespace() as nowhere:
        elastic = {"SYNCLINE_ELASTIC": "on"}
        of_hosts = {"h0": elastic, "h1": LENT | elastic}
        ranks = start(lab, "lab_sharded.py", "2", "1", of_hosts=of_hosts, of_ranks=ALONE, within={3: nowhere})
        hear(ranks, "ready")
        kill(ranks.pop(2))
        tell(ranks)
        hear(ranks, "done")
        assert len(set(end(ranks))) == 1


def test_hosts_that_have_but_ipv6(lab, expected):
    addresses = {host.name: f"fd00::{number}" for number, host in enumerate(lab.plan.hosts, start=1)}
    prefix = lab.plan.network.prefixlen
    for host in lab.plan.hosts:
        ip(
            host.namespace,
            f"address add {addresses[host.name]}/64 dev eth0 nodad",
            f"address delete {host.address}/{prefix} dev eth0",
        )
    try:
        v6 = BY_ROUTE | {"MASTER_ADDR": addresses["h0"]}
        assert trained(start(lab, "lab_sharded.py", "2", of_hosts={"h0": v6, "h1": v6})) == expected
    finally:
        for host in lab.plan.hosts:
            ip(host.namespace, f"address add {host.address}/{prefix} dev eth0")


def test_names_mean_other_things_on_other_hosts_and_the_route_tells_the_interface(lab, expected):
    """The master's name is loopback on its own host, as on Debian; other hosts' names lead nowhere, and nobody asks.

    Both hosts have a further interface, with the same address there.
    """
    first, second = lab.plan.hosts
    wrong = "192.0.2.9 h0 h1\n"
    for host in lab.plan.hosts:
        ip(
            host.namespace,
            "link add aaa0 type veth peer name aaa1",
            "address add 172.31.0.1/24 dev aaa0",
            "link set dev aaa0 up",
        )
    master = {"MASTER_ADDR": "head"}
    with names(first, f"{wrong}127.0.1.1 head\n"), names(second, f"{wrong}{first.address} head\n"):
        ranks = start(lab, "lab_sharded.py", "2", of_hosts={"h0": master, "h1": master | BY_ROUTE})
        assert trained(ranks) == expected
    for host in lab.plan.hosts:
        ip(host.namespace, "link delete aaa0")


@contextlib.contextmanager
def behind(router):
    """A namespace whose packets leave by a host, with that one's address."""
    with namespace() as home:
        ip(
            router.namespace,
            f"link add name home0 type veth peer name eth0 netns {home}",
            f"address add {ROUTER}/24 dev home0",
            "link set dev home0 up",
        )
        ip(home, f"address add {HOME}/24 dev eth0", "link set dev eth0 up", f"route add default via {ROUTER}")
        run_in(router.namespace, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        run_in(router.namespace, "nft", "-f", "-", text=MASQUERADE)
        try:
            yield home
        finally:
            run_in(router.namespace, "nft", "delete", "table", "ip", "home")
            ip(router.namespace, "link delete home0")


def test_a_host_behind_masquerading_dials(lab, expected):
    first, second = lab.plan.hosts
    with behind(second) as home:
        doctor = [sys.executable, "-m", "syncline", "doctor", "--json", "--for", "60"]
        asked = [*doctor, "--hosts", f"{first.address},{HOME}", "--ports", PORT]
        processes = [
            lab.spawn(host.name, [*within, *asked], stdout=subprocess.PIPE, text=True)
            for host, within in ((first, []), (second, ["ip", "netns", "exec", home]))
        ]
        for process in processes:
            told = json.loads(process.communicate(timeout=DEADLINE_S)[0])
            assert (process.returncode, told["can_meet"]) == (0, True)
            assert told["says"][0].startswith(f"{HOME} cannot be dialled from {first.address} (silent): let these")
            assert told["says"][0].endswith("start its ranks with SYNCLINE_ADVERTISE=none, and they dial.")
        hidden = BY_ROUTE | {"SYNCLINE_ADVERTISE": "none"}
        ranks = start(lab, "lab_sharded.py", "2", of_hosts={"h1": hidden}, within={2: home, 3: home})
        assert trained(ranks) == expected
