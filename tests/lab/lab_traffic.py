"""A small traffic generator, run on a lab's hosts: `python lab_traffic.py SPEC`, with SPEC as JSON.

It listens, sends to every peer until the end, and prints as JSON how many bytes of each flow arrived in the window.
"""

import json
import socket
import sys
import threading
import time
from pathlib import Path

PORT = 7000
CHUNK_BYTES = 256 * 1024


def receive(connection, spec, arrived):
    flow = json.loads(connection.recv(256))
    connection.sendall(b"!")
    buffer = memoryview(bytearray(CHUNK_BYTES))
    num_bytes = 0
    while (now := time.monotonic()) < spec["end"]:
        count = connection.recv_into(buffer)
        if not count:
            break
        if now >= spec["begin"]:
            num_bytes += count
    arrived.append({**flow, "num_bytes": num_bytes})
    connection.close()


def accept(listener, spec, arrived, threads):
    for _ in range(spec["num_incoming"]):
        connection, _ = listener.accept()
        connection.settimeout(20.0)
        threads.append(threading.Thread(target=receive, args=(connection, spec, arrived)))
        threads[-1].start()


def send(flow, spec):
    connection = connect(flow["address"])
    if flow.get("congestion_control"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, flow["congestion_control"].encode())
    if flow.get("dscp"):
        connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, flow["dscp"] << 2)
    connection.sendall(json.dumps(flow).encode())
    connection.recv(1)
    wait_until(spec["begin"] - spec["warm_up_s"])
    payload = bytes(flow.get("chunk_bytes", CHUNK_BYTES))
    try:
        while time.monotonic() < spec["end"]:
            connection.sendall(payload)
    except OSError:
        pass  # the receiver's window is over
    connection.close()


def connect(address):
    deadline = time.monotonic() + 10.0
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=20.0)
        except ConnectionRefusedError:  # the other host's listener is a moment behind
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def wait_until(moment):
    time.sleep(max(0.0, moment - time.monotonic()))


def resent_segments():
    lines = Path("/proc/net/snmp").read_text().splitlines()
    names, values = [line.split() for line in lines if line.startswith("Tcp:")]
    return int(values[names.index("RetransSegs")])


def main():
    spec = json.loads(sys.argv[1])
    arrived, threads = [], []
    listener = socket.create_server(("0.0.0.0", PORT), backlog=256)
    threads.append(threading.Thread(target=accept, args=(listener, spec, arrived, threads)))
    threads += [threading.Thread(target=send, args=(flow, spec)) for flow in spec["flows"]]
    for thread in list(threads):
        thread.start()
    for thread in threads:  # grows while it is walked: accepted connections come behind
        thread.join()
    print(json.dumps({"arrived": arrived, "resent": resent_segments()}))


if __name__ == "__main__":
    main()
