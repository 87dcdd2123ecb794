"""Links with a latency, or with losses: packets take so long, at the rate that the link has, and that share is lost."""

import random
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress

import psutil
import pytest
from test_lab_links import NUM_BYTES, send

from syncline.lab import Lab, latency
from syncline.lab.programs import processes_in
from syncline.topology import DirectedLink, Topology

SITES = """
switch: wide-area
children:
  - {switch: a, uplink: {rate: 200 Mbit/s, latency: 15 ms}, children: [{host: "h[0-1]", uplink: 1 Gbit/s}]}
  - {host: h2, uplink: {rate: 400 Mbit/s, latency: 5 ms}}
"""
ANSWER = """
import socket
listener = socket.create_server(("0.0.0.0", 7000))
print("listening", flush=True)
connection, _ = listener.accept()
while word := connection.recv(1):
    connection.sendall(word)
"""
ASK = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 7000))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
took_s = []
for _ in range(10):
    begin_s = time.perf_counter()
    connection.sendall(b"?")
    connection.recv(1)
    took_s.append(time.perf_counter() - begin_s)
print(min(took_s))
"""
DEADLINE_S = 60


def round_trip_s(lab, source, target):
    """Return the shortest of ten."""
    answering = lab.spawn(target, [sys.executable, "-c", ANSWER], stdout=subprocess.PIPE, text=True)
    assert answering.stdout.readline() == "listening\n"
    asking = [sys.executable, "-c", ASK, lab.plan.host(target).address]
    with lab.spawn(source, asking, stdout=subprocess.PIPE, text=True) as process:
        told = process.communicate(timeout=DEADLINE_S)[0]
    answering.communicate(timeout=DEADLINE_S)
    return float(told)


def test_packets_take_the_latency_of_all_links_on_their_way(is_gone):
    with Lab(Topology.parse(SITES)) as lab:
        lab_id, namespace = lab.lab_id, lab.plan.switch_namespace
        (holder,) = map(psutil.Process, processes_in([namespace]))
        far_s, near_s = round_trip_s(lab, "h0", "h2"), round_trip_s(lab, "h0", "h1")
        send(lab, "h1", "h2")
        carried = lab.link_bytes()
    assert 0.040 <= far_s < 0.060
    assert near_s < far_s / 4
    assert 1.0 <= carried[DirectedLink("a", "up")] / NUM_BYTES < 1.9
    assert 1.0 <= carried[DirectedLink("h2", "down")] / NUM_BYTES < 1.9
    assert is_gone(lab_id)
    holder.wait(timeout=DEADLINE_S)


def test_where_no_interface_can_be_made_latency_is_left_out_and_that_is_said(monkeypatch):
    monkeypatch.setattr(latency, "DEVICE", "/dev/missing")
    with Lab(Topology.parse(SITES)) as lab:
        assert processes_in([lab.plan.switch_namespace]) == set()
        assert lab.notes[0].startswith("The latency of a, h2 is left out")
        assert round_trip_s(lab, "h0", "h2") < 0.040


LOSING = "{switch: s, children: [{host: h0, uplink: {rate: 1 Gbit/s, loss: 5 %}}, {host: h1, uplink: 1 Gbit/s}]}"
NUM_PACKETS = 400


def way(source, sink, *, seed="d0", loss_share=0.05):
    return latency.Way(source.fileno(), sink.fileno(), 0.0, loss_share, random.Random(seed))


def passed(num_packets, **settings):
    """Return the numbers of the packets that a way passes on."""
    with ExitStack() as stack:
        ends = [stack.enter_context(end) for _ in range(2) for end in socket.socketpair(type=socket.SOCK_DGRAM)]
        source, into, out, sink = ends
        for end in ends:
            end.setblocking(False)
        one, numbers = way(into, out, **settings), []
        for number in range(num_packets):
            source.send(number.to_bytes(4, "big"))
            one.take()
            one.deliver()
            with suppress(BlockingIOError):
                numbers.append(int.from_bytes(sink.recv(4), "big"))
    return numbers


def test_a_way_loses_its_share_of_packets_and_the_same_ones_for_a_seed():
    numbers = passed(4000)
    assert 3750 < len(numbers) < 3850, "one of twenty is lost"
    assert numbers == sorted(numbers) == passed(4000)
    assert numbers != passed(4000, seed="ld0")
    assert passed(1000, loss_share=0.0) == list(range(1000))


RECEIVE_NUMBERS = """
import socket, sys
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
one.bind(("0.0.0.0", 7000))
print("listening", flush=True)
print(*(int(one.recv(100)) for _ in range(int(sys.argv[1]))))
"""
SEND_NUMBERS = f"""
import socket, sys
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in range({NUM_PACKETS}):
    one.sendto(str(number).encode(), (sys.argv[1], 7000))
"""


def test_a_link_of_the_lab_loses_those_packets_that_its_seed_says():
    generator = random.Random("ld0")
    expected = [number for number in range(NUM_PACKETS) if generator.random() >= 0.05]
    assert len(expected) < NUM_PACKETS
    with Lab(Topology.parse(LOSING)) as lab:
        receive = [sys.executable, "-c", RECEIVE_NUMBERS, str(len(expected))]
        receiving = lab.spawn("h1", receive, stdout=subprocess.PIPE, text=True)
        assert receiving.stdout.readline() == "listening\n"
        lab.spawn("h0", [sys.executable, "-c", SEND_NUMBERS, lab.plan.host("h1").address]).wait(timeout=DEADLINE_S)
        told = receiving.communicate(timeout=DEADLINE_S)[0]
        send(lab, "h0", "h1")
    assert [int(number) for number in told.split()] == expected


@pytest.mark.parametrize("links", ['[["one", "two"]]', "[[]]", "no"])
def test_the_program_refuses_what_are_no_links(links):
    program = [sys.executable, "-I", "-S", latency.__file__, links]
    result = subprocess.run(program, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.returncode == 1
    assert "Error" in result.stderr
