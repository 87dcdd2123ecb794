"""What a fleet's communication has done, as frozen records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from syncline.fabric import MEMORY_CLASS, ConnectionStatistics, Fabric, FabricStatistics
from syncline.runtime.engine import Engine
from syncline.runtime.shared_memory import SharedMemoryCollectives
from syncline.topology import DirectedLink, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatistics:
    """All counters of one rank. Sums over ranks give the fleet's: each rank counts what it has sent itself.

    >>> statistics = fleet.statistics()
    >>> statistics.num_pending_calls, statistics.queued_bytes
    (0, 0)
    """

    fabric: FabricStatistics
    """Bytes and messages per peer and connection class."""
    link_bytes: Mapping[DirectedLink, int]
    """Payload that this rank has put on each link of the topology, by the routes of what was really sent."""
    calls: Mapping[str, int]
    """Completed calls per collective."""
    call_bytes: Mapping[str, int]
    """Bytes of the buffers of these calls."""
    waited_s: Mapping[str, float]
    """Seconds that the training thread has waited, per phase (``"forward"``, ``"backward"`` ...)."""
    bucket_classes: tuple[tuple[int, ...], ...]
    """For each model, in the order of ``distribute()``: the connection class of each of its buckets, now."""
    num_pending_calls: int
    num_active_slices: int
    inflight_bytes: int
    """Bytes of the slices under way, now."""
    temporary_bytes: int
    """Memory of temporaries, in use or kept for reuse, now."""
    epoch: int = 0
    """How often the members of the job have changed."""
    updates: tuple[object, ...] = ()
    """What the update rule of each model counts (:class:`OverlappedStatistics` ...), for rules that count anything."""

    @property
    def queued_bytes(self) -> int:
        """Payload that waits to be sent, now."""
        return sum(connection.queued_bytes for connection in self.fabric.connections)


def take_statistics(
    fabric: Fabric,
    engine: Engine,
    shared_memory: Sequence[SharedMemoryCollectives],
    *,
    topology: Topology,
    waited_s: Mapping[str, float],
    bucket_classes: tuple[tuple[int, ...], ...],
) -> FleetStatistics:
    """Return what all parts of a communicator have counted."""
    moved = fabric.statistics()
    counts = [(engine.num_calls, engine.call_bytes)]
    for segment in shared_memory:
        moved = with_traffic(moved, segment.traffic())
        counts.append((segment.num_calls, segment.call_bytes))
    return FleetStatistics(
        fabric=moved,
        link_bytes=MappingProxyType(link_bytes(moved, topology)),
        calls=add_counts(calls for calls, _ in counts),
        call_bytes=add_counts(num_bytes for _, num_bytes in counts),
        waited_s=waited_s,
        bucket_classes=bucket_classes,
        num_pending_calls=engine.num_pending_calls,
        num_active_slices=engine.num_active_slices,
        inflight_bytes=engine.inflight_bytes,
        temporary_bytes=engine.temporary_bytes,
    )


def add_counts(counts: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    """Return the sums of counters of the same names."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return MappingProxyType(dict(total))


def with_traffic(fabric: FabricStatistics, segment: Mapping[int, tuple[int, int, int]]) -> FabricStatistics:
    """Add what went over the segment, as memory that was copied within the machine.

    ``segment``: for each peer the number of messages, and the bytes that it read of this rank's and this rank of its.
    """
    entries = tuple(
        ConnectionStatistics(
            peer=peer,
            connection_class=MEMORY_CLASS,
            sent_bytes=sent_bytes,
            sent_messages=num_messages,
            received_bytes=received_bytes,
            received_messages=num_messages,
            overhead_bytes=0,
            queued_bytes=0,
        )
        for peer, (num_messages, sent_bytes, received_bytes) in segment.items()
    )
    return replace(fabric, connections=fabric.connections + entries)


def link_bytes(fabric: FabricStatistics, topology: Topology) -> dict[DirectedLink, int]:
    """Return the payload that a rank's fabric has put on each link, its own data classes and control alike."""
    totals: dict[DirectedLink, int] = {}
    for connection in fabric.connections:
        if not connection.sent_bytes:
            continue
        for link in topology.route(fabric.rank, connection.peer):
            totals[link] = totals.get(link, 0) + connection.sent_bytes
    return totals
