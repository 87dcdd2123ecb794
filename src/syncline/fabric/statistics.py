"""What a fabric counted, as frozen records."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionStatistics:
    """Counters of one connection class to one peer. Bytes are payload; headers are counted apart."""

    peer: int
    connection_class: int
    sent_bytes: int
    sent_messages: int
    received_bytes: int
    received_messages: int
    overhead_bytes: int
    """Headers and control frames, both directions."""
    queued_bytes: int
    """Payload that waits to be sent, now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricStatistics:
    """All counters of one rank's fabric."""

    rank: int
    connections: tuple[ConnectionStatistics, ...]
    unexpected_bytes: int
    """Payload that arrived before its receive was posted and is held in pooled memory, now."""
    pending_receives: int
    refused_connections: int
    """Connections that were turned away: wrong secret, job, version, or no handshake at all."""
    lost_peers: tuple[int, ...]
    suspect_peers: tuple[int, ...] = ()
    """Peers that are silent now, for longer than ``suspect_s``."""

    @property
    def sent_bytes(self) -> int:
        """Payload bytes sent to all peers."""
        return sum(connection.sent_bytes for connection in self.connections)

    @property
    def received_bytes(self) -> int:
        """Payload bytes received from all peers."""
        return sum(connection.received_bytes for connection in self.connections)
