"""Links that have a latency: a process holds packets back between two interfaces, as netem would, which kernels lack.

    python latency.py '[["ld0", "d0", 0.01], ...]'

Each link is two TAP interfaces, which are made in the namespace in which this is started, and may go to others then.
What leaves one of them enters the other after the link's latency, in seconds, in order; what that one cannot take is
lost, as on a wire. The program ends when all interfaces are there, and leaves behind a process that serves them until
it is killed. Rates are limited where packets enter, by the queues of the lab. Nothing is imported but what Python has,
so that the program is there at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

DEVICE = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_TAP = 0x0002
_WITHOUT_INFORMATION = 0x1000
_WITH_OFFLOADS = 0x4000
"""Each packet begins with ten bytes that say what is left to do: checksums, and cuts into frames."""
_OFFLOADS = 0x01 | 0x02 | 0x04
"""Checksums, and TCP segments for IPv4 and IPv6: up to 64 KiB pass as one packet, as between veth pairs."""
_LARGEST_BYTES = 10 + 18 + 65_536
_NICENESS = -15
"""A process that gets its turn late makes links later than they should be."""


def is_possible() -> bool:
    """Return whether this machine makes such interfaces, for this user."""
    try:
        os.close(os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _open_interface(name: str) -> int:
    """Make a TAP interface in this namespace; return what reads and writes its packets, without waiting."""
    descriptor = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = _TAP | _WITHOUT_INFORMATION | _WITH_OFFLOADS
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _OFFLOADS)
    return descriptor


@dataclass(slots=True)
class _Way:
    """One direction of a link: where packets come from, where they go, and those that are on their way."""

    source: int
    sink: int
    latency_s: float
    packets: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self) -> None:
        """Take all packets that have come."""
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = os.read(self.source, _LARGEST_BYTES)
                self.packets.append((time.monotonic() + self.latency_s, packet))

    def deliver(self) -> None:
        """Pass on what has been on its way for as long as the link takes."""
        while self.packets and self.packets[0][0] <= time.monotonic():
            _, packet = self.packets.popleft()
            with contextlib.suppress(OSError):  # an interface that is down, or full
                os.write(self.sink, packet)


def _serve(ways: Mapping[int, _Way]) -> None:
    """Pass packets on, for ever; ``ways`` by where their packets come from."""
    while True:
        due = min((way.packets[0][0] for way in ways.values() if way.packets), default=None)
        wait_s = None if due is None else max(0.0, due - time.monotonic())
        for source in select.select(ways, (), (), wait_s)[0]:
            ways[source].take()
        for way in ways.values():
            way.deliver()


def _stay_behind() -> None:
    """Go on as a process that nobody waits for, and that holds no stream of who started the program open."""
    if os.fork():
        os._exit(0)
    os.setsid()
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(silent, stream)
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)


def main() -> None:
    """Make the interfaces of all links, and serve them."""
    ways = {}
    try:
        for lower_name, upper_name, latency_s in json.loads(sys.argv[1]):
            lower, upper = _open_interface(lower_name), _open_interface(upper_name)
            ways[lower], ways[upper] = _Way(lower, upper, latency_s), _Way(upper, lower, latency_s)
    except OSError as error:
        sys.exit(f"no TAP interface could be made: {error}")
    _stay_behind()
    _serve(ways)


if __name__ == "__main__":
    main()
