"""A small traffic generator, run on a lab's hosts: `python lab_traffic.py SPEC`, with SPEC as JSON.

It listens, connects every flow, prints `ready`, reads from its input when to begin and to end, sends until then, and
prints as JSON how many bytes of each flow arrived in the window. It runs ahead of the machine's other work: a sender
that waits for a core says nothing about the link.
"""

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

PORT = 7000
CHUNK_BYTES = 256 * 1024
PATIENCE_S = 20.0


class Window:
    """When the measurement begins and ends; unknown until everybody is ready."""

    def __init__(self):
        self.is_known = threading.Event()

    def learn(self, line):
        self.warm_up_begin, self.begin, self.end = json.loads(line)
        self.is_known.set()

    def wait_for_warm_up(self):
        assert self.is_known.wait(PATIENCE_S), "nobody said when to begin"
        time.sleep(max(0.0, self.warm_up_begin - time.monotonic()))


def receive(connection, flow, window, arrived):
    window.wait_for_warm_up()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    num_bytes = 0
    while (now := time.monotonic()) < window.end:
        count = connection.recv_into(buffer)
        if not count:
            break
        if now >= window.begin:
            num_bytes += count
    arrived.append({**flow, "num_bytes": num_bytes})
    connection.close()


def send(connection, flow, window):
    payload = bytes(flow.get("chunk_bytes", CHUNK_BYTES))
    window.wait_for_warm_up()
    try:
        while time.monotonic() < window.end:
            connection.sendall(payload)
    except OSError:
        pass  # the receiver's window is over
    connection.close()


def connect(flow):
    connection = create_connection(flow["address"])
    if flow.get("congestion_control"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, flow["congestion_control"].encode())
    if flow.get("dscp"):
        connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, flow["dscp"] << 2)
    connection.sendall(json.dumps(flow).encode())
    assert connection.recv(1) == b"!"
    return connection


def create_connection(address):
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=PATIENCE_S)
        except ConnectionRefusedError:  # the other host's listener is a moment behind
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def accept(listener, num_incoming, incoming):
    for _ in range(num_incoming):
        connection, _ = listener.accept()
        connection.settimeout(PATIENCE_S)
        flow = json.loads(connection.recv(1024))
        incoming.append((connection, flow))
        connection.sendall(b"!")


def resent_segments():
    lines = Path("/proc/net/snmp").read_text().splitlines()
    names, values = [line.split() for line in lines if line.startswith("Tcp:")]
    return int(values[names.index("RetransSegs")])


def main():
    spec = json.loads(sys.argv[1])
    os.nice(-15)
    arrived, incoming, window = [], [], Window()
    listener = socket.create_server(("0.0.0.0", PORT), backlog=256)
    accepting = threading.Thread(target=accept, args=(listener, spec["num_incoming"], incoming))
    accepting.start()
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
