"""Labs of other switches, senders and filters: what hosts find there, and what the kernel counts as lost."""

import json
import re
import subprocess
import sys
from pathlib import Path

from syncline.lab import Lab, QueueSettings
from syncline.lab.programs import run_program
from syncline.topology import DirectedLink, Topology

NUM_BYTES = 4_000_000
DEADLINE_S = 60
RECEIVE = """
import json, os, socket
listener = socket.create_server(("0.0.0.0", 7000))
print("listening", flush=True)
connection, _ = listener.accept()
while connection.recv(1 << 18):
    pass
print(json.dumps([connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\\0").decode(),
                  os.environ.get("SYNCLINE_CONGESTION")]))
"""
SEND = f"""
import socket, sys
connection = socket.create_connection((sys.argv[1], 7000))
print(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\\0").decode())
connection.sendall(bytes({NUM_BYTES}))
"""


def send(lab):
    """Send from h1 to h0; return both ends' congestion control, and what the receiver's environment says."""
    pipes = {"stdout": subprocess.PIPE, "text": True}
    receiver = lab.spawn("h0", [sys.executable, "-S", "-c", RECEIVE], **pipes)
    assert receiver.stdout.readline() == "listening\n"
    sender = lab.spawn("h1", [sys.executable, "-S", "-c", SEND, lab.plan.host("h0").address], **pipes)
    sending = sender.communicate(timeout=DEADLINE_S)[0].strip()
    return [sending, *json.loads(receiver.communicate(timeout=DEADLINE_S)[0])]


def test_connections_have_the_labs_congestion_control_and_bridges_ask_the_filters():
    settings = sorted(Path("/proc/sys/net/bridge").glob("bridge-nf-call-*tables"))
    with Lab(Topology.flat(2, rate=25e6), congestion="reno", packet_filters=True) as lab:
        assert send(lab) == ["reno", "reno", "reno"]
        namespace = lab.plan.switch_namespace
        found = [run_program("ip", "netns", "exec", namespace, "cat", str(path)).strip() for path in settings]
    assert settings
    assert found == ["1"] * len(settings)


def test_a_token_bucket_cuts_packets_into_frames():
    with Lab(Topology.flat(2, rate=25e6), queues="token-bucket") as lab:
        send(lab)
        shown = run_program("tc", "-n", lab.plan.host("h1").namespace, "-s", "qdisc", "show", "dev", "eth0")
    (num_bytes, num_packets) = (int(text) for text in re.search(r"tbf .*\n Sent (\d+) bytes (\d+) pkt", shown).groups())
    assert num_bytes / num_packets < 1600, "one frame each"


def test_what_a_queue_drops_is_counted_where_it_was_dropped():
    short = QueueSettings(switch_queue_s=0.0, min_switch_queue_bytes=70_000)
    counted = {}
    topology = Topology.parse("switch: s\nchildren: [{host: h0, uplink: 40 Mbit/s}, {host: h1, uplink: 1 Gbit/s}]\n")
    for name, queues in (("short", short), ("long", "long")):
        with Lab(topology, queues=queues, congestion="reno") as lab:
            send(lab)
            counted[name] = ({link for link, number in lab.dropped_packets().items() if number}, lab.resent_segments())
    assert counted["short"][0] == {DirectedLink("h0", "down")}
    assert counted["short"][1] > 0
    assert counted["long"] == (set(), 0)
