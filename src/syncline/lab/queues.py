"""The queue in front of each direction of a link: its rate, its length, and its priorities, as `tc` commands.

HTB holds the rate, or a token bucket. What waits for it stands in a first-in-first-out queue that is measured in bytes
or in packets, one for each priority; what finds it full is lost (tail drop). Why these lengths:
`docs/decisions/0003-the-lab-s-queues.md`; why other kinds: `docs/decisions/0030-switches-of-other-kinds.md`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from syncline.errors import LabError

Shaper = Literal["htb", "tbf"]

MIN_BYTES_PER_S = 1000.0
_FRAME_BYTES = 1514  # an Ethernet frame without its checksum, which the kernel does not count either
_MAX_QUEUE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """How long queues are, and which marks are served first.

    ``dscp_by_priority`` lists DSCP values, the most urgent first; with none there is one queue for everything. A packet
    with another mark waits with the last. Raises :class:`LabError` for more than 8, for equal ones, above 63, and with
    the shaper ``tbf``, which has one queue.

    ``queue_packets`` counts packets in place of bytes; the kernel hands on up to 64 KiB as one packet, so as many may
    be a hundred KiB or several MiB. ``tbf`` cuts packets that are larger than the burst into frames, which costs
    processor time, and forgets what a timer that fires late leaves unused beyond the burst; ``htb`` does neither.

    >>> settings = QueueSettings(dscp_by_priority=(46, 8))
    >>> settings.queue_bytes(125e6, is_host=False)  # 20 ms of 1 Gbit/s
    2500000
    """

    shaper: Shaper = "htb"
    burst_s: float = 0.001
    min_burst_bytes: int = 16 * 1024
    switch_queue_s: float = 0.02
    min_switch_queue_bytes: int = 256 * 1024
    host_queue_bytes: int = 16 * 1024 * 1024
    queue_packets: int | None = None
    dscp_by_priority: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        values = self.dscp_by_priority
        if len(set(values)) != len(values) or not all(0 <= value <= 63 for value in values) or len(values) > 8:
            raise LabError(f"priorities are at most 8 different DSCP values of 0 to 63, not {values!r}")
        if values and self.shaper == "tbf":
            raise LabError("a token bucket has one queue, so it has no priorities; leave them out, or use other queues")

    def burst_bytes(self, bytes_per_s: float) -> int:
        """Bytes that may pass at once after a pause, at a rate in bytes per second: a timer may fire late."""
        return max(self.min_burst_bytes, math.ceil(bytes_per_s * self.burst_s))

    def queue_bytes(self, bytes_per_s: float, *, is_host: bool) -> int:
        """Bytes that may wait: a switch has a buffer of fixed time, a host as much as its sockets put there."""
        if is_host:
            return self.host_queue_bytes
        return min(_MAX_QUEUE_BYTES, max(self.min_switch_queue_bytes, math.ceil(bytes_per_s * self.switch_queue_s)))


QUEUE_KINDS: Mapping[str, QueueSettings] = MappingProxyType(
    {
        "default": QueueSettings(),
        "token-bucket": QueueSettings(
            shaper="tbf",
            burst_s=0.0,
            min_burst_bytes=32 * 1024,
            switch_queue_s=0.0,
            min_switch_queue_bytes=500_000,
            host_queue_bytes=500_000,
        ),
        "short": QueueSettings(switch_queue_s=0.005, min_switch_queue_bytes=128 * 1024),
        "long": QueueSettings(switch_queue_s=0.2),
        "packets": QueueSettings(queue_packets=64),
    }
)
"""Kinds of switches by name. ``short`` is the least with which one flow fills a link here."""


def choose_queues(kind: str) -> QueueSettings:
    """Return the queues of a kind; :class:`LabError` names the kinds there are.

    >>> choose_queues("long").queue_bytes(25e6, is_host=False)  # 200 ms of 200 Mbit/s
    5000000
    """
    if kind not in QUEUE_KINDS:
        raise LabError(f"queues must be of {', '.join(QUEUE_KINDS)}, got {kind!r}")
    return QUEUE_KINDS[kind]


DEFAULT_DSCP_BY_PRIORITY = (46, 34, 18, 8)
"""Expedited forwarding, two classes of assured forwarding, and bulk."""


def limit_commands(interface: str, bytes_per_s: float, settings: QueueSettings, *, is_host: bool) -> Iterator[str]:
    """Yield the `tc` commands that limit what leaves ``interface``; none where the rate does not limit."""
    if math.isinf(bytes_per_s):
        return
    if bytes_per_s < MIN_BYTES_PER_S:
        raise LabError(
            f"a link of {bytes_per_s:g} bytes per second is too slow to emulate; the lab's slowest is 8 kbit/s"
        )
    rate = f"{round(bytes_per_s * 8)}bit"
    burst = settings.burst_bytes(bytes_per_s)
    limit = settings.queue_bytes(bytes_per_s, is_host=is_host)
    if settings.shaper == "tbf":
        yield f"qdisc add dev {interface} root handle 1: tbf rate {rate} burst {burst} limit {limit}"
        return
    leaf = f"bfifo limit {limit}" if settings.queue_packets is None else f"pfifo limit {settings.queue_packets}"
    num_classes = max(1, len(settings.dscp_by_priority))
    yield f"qdisc add dev {interface} root handle 1: htb default {9 + num_classes:x}"
    yield _class(interface, "1:", "1:1", f"rate {rate} ceil {rate} burst {burst} cburst {burst}")
    for priority in range(num_classes):
        minor = f"{10 + priority:x}"
        shares = f"rate {rate} ceil {rate}" if num_classes == 1 else f"rate 8kbit ceil {rate}"
        yield _class(interface, "1:1", f"1:{minor}", f"{shares} burst {burst} cburst {burst} prio {priority}")
        yield f"qdisc add dev {interface} parent 1:{minor} handle {minor}0: {leaf}"
    for priority, dscp in enumerate(settings.dscp_by_priority):
        match = f"match ip dsfield {dscp << 2:#04x} 0xfc"
        yield f"filter add dev {interface} parent 1: protocol ip prio 1 u32 {match} flowid 1:{10 + priority:x}"


def _class(interface: str, parent: str, class_id: str, rest: str) -> str:
    return f"class add dev {interface} parent {parent} classid {class_id} htb {rest} quantum {4 * _FRAME_BYTES}"
