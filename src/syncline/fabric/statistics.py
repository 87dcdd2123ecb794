"""What a fabric counted, as frozen records; loaded when somebody reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassStatistics:
    """Counters of one connection class, summed over all peers. Bytes are payload; headers are counted apart."""

    connection_class: int
    sent_bytes: int
    sent_messages: int
    received_bytes: int
    received_messages: int
    overhead_bytes: int = 0
    """Headers and control frames, both directions."""
    queued_bytes: int = 0
    """Payload that waits to be sent, now."""
    reconnects: int = 0
    """How often a connection broke and was opened again."""
    resent_bytes: int = 0
    """Payload and headers that were sent again then."""
    lost_bytes: int = 0
    """What TCP sent again, as it was lost on its way."""
    busy_s: float = 0.0
    """Seconds in which TCP had something to send, and the peer room for it: what was sent in them tells a rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionStatistics(ClassStatistics):
    """The same counters of one connection, to one peer."""

    peer: int
    round_trip_s: float = 0.0
    """The shortest way there and back in the last minutes, from kernel to kernel; 0 where nobody tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricStatistics:
    """All counters of one rank's fabric: bytes and messages since it was opened, but where "now" is said.

    >>> async def send():
    ...     first, second = memory_fabrics(2)
    ...     first.send(1, 7, memoryview(b"four"), signature=1, urgency=0, connection_class=0)
    ...     await asyncio.sleep(0)
    ...     return first.statistics()
    >>> statistics = asyncio.run(send())
    >>> statistics.sent_bytes, statistics.by_class()[0].sent_messages
    (4, 1)
    """

    rank: int
    time_s: float
    """When they were read, by the loop's clock: two readings give rates."""
    connections: tuple[ConnectionStatistics, ...]
    unexpected_bytes: int
    """Payload that arrived before its receive was posted and is held in pooled memory, now."""
    pending_receives: int
    refused_connections: int
    """Connections that were turned away: wrong secret, job, version, or no handshake at all."""
    lost_peers: tuple[int, ...]
    suspect_peers: tuple[int, ...] = ()
    """Peers that are silent now, for three heartbeats or ``suspect_s``."""
    dropped_messages: int = 0
    """Messages that were thrown away, since they came in an epoch that was over."""

    def by_class(self) -> Mapping[int, ClassStatistics]:
        """Return the counters of each connection class: -1 is control, -2 what was copied within a machine."""
        names = [field.name for field in fields(ClassStatistics) if field.name != "connection_class"]
        found: dict[int, ClassStatistics] = {}
        for number in sorted({connection.connection_class for connection in self.connections}):
            here = [connection for connection in self.connections if connection.connection_class == number]
            sums = {name: sum(getattr(connection, name) for connection in here) for name in names}
            found[number] = ClassStatistics(connection_class=number, **sums)
        return found

    def round_trips(self) -> dict[int, float]:
        """Return the seconds to each peer and back, of those of which kernels tell."""
        found: dict[int, float] = {}
        for each in self.connections:
            if each.round_trip_s:
                found[each.peer] = min(each.round_trip_s, found.get(each.peer, each.round_trip_s))
        return found

    @property
    def sent_bytes(self) -> int:
        """Payload bytes sent to all peers."""
        return sum(connection.sent_bytes for connection in self.connections)

    @property
    def received_bytes(self) -> int:
        """Payload bytes received from all peers."""
        return sum(connection.received_bytes for connection in self.connections)
