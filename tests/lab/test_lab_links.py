"""What is set up and counted on links: a rate for each direction, a queue for each mark, and all bytes that go by.

What they carry in a second is measured by `make bench-check`.
"""

import re
import subprocess
import sys

import pytest

from syncline.lab import Lab
from syncline.lab.programs import run_program
from syncline.topology import DirectedLink, Topology

BITS = {"bit": 1.0, "Kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}


def classes(namespace, interface):
    """Return the classes of an interface's queue as `tc` tells them, statistics included, by their number."""
    text = run_program("ip", "netns", "exec", namespace, "tc", "-s", "class", "show", "dev", interface)
    return dict(re.findall(r"^class htb (\S+) (.*?)(?=^class|\Z)", text, re.MULTILINE | re.DOTALL))


def rate_of(description):
    number, unit = re.search(r"rate ([\d.]+)(\w+) ceil \1\2", description).groups()
    return float(number) * BITS[unit] / 8


def test_each_direction_of_each_link_is_limited_to_its_rate():
    topology = Topology.parse(
        "switch: s\nchildren:\n"
        "  - {host: h0, uplink: {up: 40 Mbit/s, down: 80 Mbit/s}}\n"
        "  - {switch: t, uplink: 200 Mbit/s, children: [{host: h1, uplink: 1 Gbit/s}, {host: h2, uplink: unlimited}]}\n"
    )
    found = {}
    with Lab(topology) as lab:
        for link in lab.plan.links:
            up = classes(link.lower_namespace, link.lower_interface)
            down = classes(lab.plan.switch_namespace, link.upper_interface)
            found[link.child] = tuple(rate_of(one["1:1"]) if one else None for one in (up, down))
    assert found == {"h0": (5e6, 10e6), "t": (25e6, 25e6), "h1": (125e6, 125e6), "h2": (None, None)}


NUM_BYTES = 8_000_000
RECEIVE = """
import socket
listener = socket.create_server(("0.0.0.0", 7000))
print("listening", flush=True)
connection, _ = listener.accept()
total = 0
while count := len(connection.recv(1 << 18)):
    total += count
print(total)
"""
SEND = f"""
import socket, sys
connection = socket.create_connection((sys.argv[1], 7000))
connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, int(sys.argv[2]) << 2)
connection.sendall(bytes({NUM_BYTES}))
"""
DEADLINE_S = 60


def send(lab, source, target, dscp=0):
    """Send from host to host, and wait until all has arrived."""
    receiver = lab.spawn(target, [sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE, text=True)
    assert receiver.stdout.readline() == "listening\n"
    sender = lab.spawn(source, [sys.executable, "-c", SEND, lab.plan.host(target).address, str(dscp)])
    assert int(receiver.communicate(timeout=DEADLINE_S)[0]) == NUM_BYTES
    assert sender.wait(timeout=DEADLINE_S) == 0


@pytest.mark.parametrize(("dscp", "number"), [(46, "1:a"), (18, "1:c"), (0, "1:d")])
def test_bytes_wait_in_the_queue_of_their_mark(dscp, number):
    with Lab(Topology.flat(2, rate=25e6), priorities=True) as lab:
        send(lab, "h1", "h0", dscp)
        (port,) = (link.upper_interface for link in lab.plan.links if link.child == "h0")
        leaves = {key: text for key, text in classes(lab.plan.switch_namespace, port).items() if key != "1:1"}
    sent = {key: int(re.search(r"Sent (\d+) bytes", text)[1]) for key, text in leaves.items()}
    assert len(sent) == 4
    assert sent.pop(number) > NUM_BYTES
    assert all(num_bytes < 0.01 * NUM_BYTES for num_bytes in sent.values()), sent


def test_bytes_are_counted_on_the_links_of_the_route_alone():
    with Lab("two-racks-5-3") as lab:
        send(lab, "h1", "h6")
        carried = lab.link_bytes()
    ways = (("h1", "up"), ("rack-a", "up"), ("rack-b", "down"), ("h6", "down"))
    route = {DirectedLink(child, direction) for child, direction in ways}
    assert route < carried.keys()
    for link, num_bytes in carried.items():
        if link in route:
            assert 1.0 <= num_bytes / NUM_BYTES < 1.9, link  # once, and again what a full queue has dropped
        else:
            assert num_bytes < 0.02 * NUM_BYTES, link
