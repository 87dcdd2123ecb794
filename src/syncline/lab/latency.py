"""Links that have a latency or lose packets: a process passes packets on, as netem would, which kernels lack.

    python latency.py '[["ld0", "d0", 0.01, 0.002], ...]'

Each link is two TAP interfaces, which are made in the namespace in which this is started, and may go to others then.
What leaves one of them enters the other after the link's latency, in seconds, in order; what that one cannot take is
lost, as on a wire. So is the share of packets that the link loses, whatever its load. Each packet has a draw of its
own, from a generator whose seed is the name of the interface that it left: the third packet that is lost in one lab is
lost in each. The program ends when all interfaces are there, and leaves behind a process that serves them until it is
killed. Rates are limited where packets enter, by the queues of the lab. Nothing is imported but what Python has, so
that the program is there at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
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
_CHECKSUMS, _SEGMENTS = 0x01, 0x02 | 0x04
"""Left to do, TCP segments for IPv4 and IPv6 pass as one packet of up to 64 KiB, as between veth pairs. A link that
loses packets takes them one by one, as it would lose 45 at once."""
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


def _open_interface(name: str, offloads: int) -> int:
    """Make a TAP interface in this namespace; return what reads and writes its packets, without waiting."""
    descriptor = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = _TAP | _WITHOUT_INFORMATION | _WITH_OFFLOADS
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, offloads)
    return descriptor


@dataclass(slots=True)
class Way:
    """One direction of a link: where packets come from, where they go, and those that are on their way."""

    source: int
    sink: int
    latency_s: float
    loss_share: float
    generator: random.Random
    packets: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self) -> None:
        """Take all packets that have come, but those that are lost."""
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = os.read(self.source, _LARGEST_BYTES)
                if not self.loss_share or self.generator.random() >= self.loss_share:
                    self.packets.append((time.monotonic() + self.latency_s, packet))

    def deliver(self) -> None:
        """Pass on what has been on its way for as long as the link takes."""
        while self.packets and self.packets[0][0] <= time.monotonic():
            _, packet = self.packets.popleft()
            with contextlib.suppress(OSError):  # an interface that is down, or full
                os.write(self.sink, packet)


def _serve(ways: Mapping[int, Way]) -> None:
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
        for *names, latency_s, loss_share in json.loads(sys.argv[1]):
            offloads = _CHECKSUMS if loss_share else _CHECKSUMS | _SEGMENTS
            lower, upper = (_open_interface(name, offloads) for name in names)
            for source, sink, name in zip((lower, upper), (upper, lower), names, strict=True):
                ways[source] = Way(source, sink, latency_s, loss_share, random.Random(name))  # noqa: S311
    except OSError as error:
        sys.exit(f"no TAP interface could be made: {error}")
    _stay_behind()
    _serve(ways)


if __name__ == "__main__":
    main()
