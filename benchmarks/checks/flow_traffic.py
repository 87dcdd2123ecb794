"""A small traffic generator, run on a lab's hosts: `python flow_traffic.py SPEC`, with SPEC as JSON.

It prints `listening`, connects every flow when told so, prints `ready`, reads from its input when the measurement
begins and ends, sends at once, and prints as JSON how fast each flow arrived in that time, and what part of it other
machines had processors of this one. The kernel counts what arrives: a reader that waits for a core changes nothing. It
runs ahead of the machine's other work all the same, since a sender that waits for a core leaves its link idle.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

PORT = 7000
CHUNK_BYTES = 256 * 1024
PATIENCE_S = 20.0
OVERTIME_S = 0.1
"""Senders go on after the end, so that one who looks a little late finds the links as full as they were."""
TCP_INFO_BYTES_RECEIVED = 128
STEAL = 8
"""Where `/proc/stat` says it: "cpu user nice system idle iowait irq softirq steal"."""


class Window:
    """When the measurement begins and ends; unknown until everybody is ready."""

    def __init__(self) -> None:
        self.is_known = threading.Event()

    def learn(self, line: str) -> None:
        """Take both from a line of input."""
        self.begin, self.end = json.loads(line)
        self.is_known.set()

    def wait(self) -> None:
        """Wait until they are known."""
        assert self.is_known.wait(PATIENCE_S), "nobody said when to begin"


def look(connection: socket.socket) -> tuple[float, int, float]:
    """Return what time it is, how many bytes have arrived, and for how long processors were taken away so far."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return time.monotonic(), struct.unpack_from("=Q", info, TCP_INFO_BYTES_RECEIVED)[0], stolen_s()


def stolen_s() -> float:
    """Return for how long this machine's processors have been at work for other machines, all processors together."""
    processors = Path("/proc/stat").read_text().splitlines()[0].split()
    return int(processors[STEAL]) / os.sysconf("SC_CLK_TCK")


def receive(connection: socket.socket, flow: dict[str, Any], window: Window, arrived: list[dict[str, Any]]) -> None:
    """Read until the flow ends; note in ``arrived`` how fast it came in the window."""
    window.wait()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    first = last = None
    while connection.recv_into(buffer):
        now = time.monotonic()
        if first is None and now >= window.begin:
            first = look(connection)
        if last is None and now >= window.end:
            last = look(connection)
    assert first is not None
    assert last is not None
    seconds, num_bytes, stolen = (after - before for before, after in zip(first, last, strict=True))
    arrived.append({**flow, "bytes_per_s": num_bytes / seconds, "stolen": stolen / seconds})
    connection.close()


def send(connection: socket.socket, flow: dict[str, Any], window: Window) -> None:
    """Send until a little after the window."""
    payload = bytes(flow.get("chunk_bytes", CHUNK_BYTES))
    window.wait()
    while time.monotonic() < window.end + OVERTIME_S:
        connection.sendall(payload)
    connection.close()


def connect(flow: dict[str, Any]) -> socket.socket:
    """Connect a flow to its receiver, marked as it asks."""
    connection = socket.create_connection((flow["address"], PORT), timeout=PATIENCE_S)
    if flow.get("congestion_control"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, flow["congestion_control"].encode())
    if flow.get("dscp"):
        connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, flow["dscp"] << 2)
    connection.sendall(json.dumps(flow).encode())
    assert connection.recv(1) == b"!"
    return connection


def accept(listener: socket.socket, num_incoming: int, incoming: list[tuple[socket.socket, dict[str, Any]]]) -> None:
    """Accept all flows that end here."""
    for _ in range(num_incoming):
        connection, _ = listener.accept()
        connection.settimeout(PATIENCE_S)
        flow = json.loads(connection.recv(1024))
        incoming.append((connection, flow))
        connection.sendall(b"!")


def resent_segments() -> int:
    """Return how many segments this host sent again."""
    lines = Path("/proc/net/snmp").read_text().splitlines()
    names, values = [line.split() for line in lines if line.startswith("Tcp:")]
    return int(values[names.index("RetransSegs")])


def main() -> None:
    """Do as the specification and the input say."""
    spec = json.loads(sys.argv[1])
    os.nice(-15)
    window = Window()
    arrived: list[dict[str, Any]] = []
    incoming: list[tuple[socket.socket, dict[str, Any]]] = []
    listener = socket.create_server(("0.0.0.0", PORT), backlog=256)
    accepting = threading.Thread(target=accept, args=(listener, spec["num_incoming"], incoming))
    accepting.start()
    print("listening", flush=True)
    sys.stdin.readline()
    outgoing = [(connect(flow), flow) for flow in spec["flows"]]
    accepting.join()
    threads = [threading.Thread(target=receive, args=(*entry, window, arrived)) for entry in incoming]
    threads += [threading.Thread(target=send, args=(*entry, window)) for entry in outgoing]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    window.learn(sys.stdin.readline())
    for thread in threads:
        thread.join()
    print(json.dumps({"arrived": arrived, "resent": resent_segments()}))


if __name__ == "__main__":
    main()
