"""A process that does not belong to the job and knocks at its ports: a scanner, a browser, garbage, a silent crowd."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import socket
from typing import Any

NUM_IDLE = 40
MAGIC = b"SYNCLINE"
DEADLINE_S = 5.0


def main(config: dict[str, Any]) -> None:
    """Knock at every port once in each way, wait for the job to close what is nonsense, and say how often it did."""
    choose = random.Random(config["seed"])
    texts = [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01" + bytes(60), b"", MAGIC]
    texts += [choose.randbytes(choose.randint(1, 4000)) for _ in range(4)]
    knocking = [_knock(tuple(place), text) for place in config["places"] for text in texts]
    idle = [_knock(tuple(place), None) for place in config["places"] for _ in range(NUM_IDLE // len(config["places"]))]
    opened = [sock for sock in knocking if sock is not None]
    num_closed = sum(_is_closed(sock) for sock in opened)
    for sock in (*opened, *idle):
        if sock is not None:
            sock.close()
    event = {"rank": -1, "at_s": 0.0, "event": "knocked", "opened": len(opened), "closed": num_closed}
    pipe = os.open(config["events"], os.O_WRONLY)
    os.write(pipe, (json.dumps(event) + "\n").encode())


def _knock(place: tuple[str, int], text: bytes | None) -> socket.socket | None:
    with contextlib.suppress(OSError):
        sock = socket.create_connection(place, timeout=DEADLINE_S)
        if text is not None:
            sock.sendall(text)
            if not text:
                sock.shutdown(socket.SHUT_WR)
        return sock
    return None


def _is_closed(sock: socket.socket) -> bool:
    """Whether the other end closes, be it after it has said why."""
    sock.setblocking(True)
    while select.select([sock], [], [], DEADLINE_S)[0]:
        try:
            if not sock.recv(4096):
                return True
        except OSError:
            return True
    return False
