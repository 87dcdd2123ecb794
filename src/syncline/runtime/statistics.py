"""What a fleet's communication has done, as frozen records."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from types import MappingProxyType

from syncline.fabric import Fabric, FabricStatistics, Progress
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
    """Seconds waited for other ranks, by where the training thread was ("forward", "backward" ...), or by reason."""
    own_s: Mapping[str, float]
    """Seconds of this rank's own in each phase, without the waits in it."""
    num_steps: int
    """Steps that are finished."""
    num_samples: int
    """Samples in them, as far as the user said."""
    loss: float
    """The last one that the user said; NaN without."""
    lacked_s: float
    """Seconds in which one of this rank's threads was ready to run, and had no processor."""
    steps_s: float
    """Seconds in them, from the first forward pass on; with process groups, from the end of the step before."""
    starting_s: float
    """Seconds from the connection of the ranks until the first step began."""
    total_s: float
    """Seconds since the ranks were connected."""
    bucket_classes: tuple[tuple[int, ...], ...]
    """For each model, in the order of ``distribute()``: the connection class of each of its buckets, now."""
    num_pending_calls: int
    epoch: int = 0
    """How often the members of the job have changed."""
    updates: tuple[object, ...] = ()
    """What the update rule of each model counts (:class:`OverlappedStatistics` ...), for rules that count anything."""

    @property
    def queued_bytes(self) -> int:
        """Payload that waits to be sent, now."""
        return sum(connection.queued_bytes for connection in self.fabric.connections)

    @property
    def goodput(self) -> float:
        """The part of the time since the ranks were connected that finished steps took."""
        return self.steps_s / self.total_s if self.total_s else 0.0

    def uplink_bytes(self) -> dict[str, int]:
        """Return what this rank has put on each link above it, up to the root; those within its machine are left out.

        >>> fleet.statistics().uplink_bytes()  # a job of one rank
        {}
        """
        above = {link.child: moved for link, moved in self.link_bytes.items() if link.direction == "up"}
        return {name: moved for name, moved in above.items() if not {" ", "/"} & set(name)}

    def metrics(self) -> dict[str, float]:
        """Return all of this as numbers by name: seconds end in ``_s``, bytes in ``_bytes``, all else is counted.

        >>> fleet.statistics().metrics()["steps"]
        0.0
        """
        connections = self.fabric.connections
        found: dict[str, float] = {
            "steps": self.num_steps,
            "goodput": self.goodput,
            "total_s": self.total_s,
            "steps_s": self.steps_s,
            "starting_s": self.starting_s,
            "between_steps_s": max(0.0, self.total_s - self.starting_s - self.steps_s),
            "waited_s": sum(self.waited_s.values()),
            "lacked_processor_s": self.lacked_s,
            "sent_bytes": self.fabric.sent_bytes,
            "received_bytes": self.fabric.received_bytes,
            "queued_bytes": self.queued_bytes,
            "resent_bytes": sum(one.resent_bytes for one in connections),
            "reconnects": sum(one.reconnects for one in connections),
            "pending_calls": self.num_pending_calls,
            "lost_ranks": len(self.fabric.lost_peers),
            "epoch": self.epoch,
        }
        if self.num_samples:
            found["samples"] = self.num_samples
        if not math.isnan(self.loss):
            found["loss"] = self.loss
        found |= {f"own_{phase}_s": seconds for phase, seconds in self.own_s.items()}
        found |= {f"waited_{_word(reason)}_s": seconds for reason, seconds in self.waited_s.items()}
        found |= {f"calls_{kind}": number for kind, number in self.calls.items()}
        found |= {f"uplink_{name}_bytes": moved for name, moved in self.uplink_bytes().items()}
        for update in self.updates:
            kind = _word(type(update).__name__.removesuffix("Statistics").lower())
            found |= {f"{kind}_{name}": value for name, value in _numbers(update)}
        return {name: float(value) for name, value in found.items()}


def _word(text: str) -> str:
    return re.sub(r"\W+", "_", text)


def _numbers(record: object) -> Iterator[tuple[str, float]]:
    """Yield the fields of a record that are numbers."""
    for field in fields(record) if is_dataclass(record) else ():
        value = getattr(record, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield field.name, value


def take_statistics(
    fabric: Fabric,
    engine: Engine,
    shared_memory: Sequence[SharedMemoryCollectives],
    *,
    topology: Topology,
    progress: Progress,
    bucket_classes: tuple[tuple[int, ...], ...],
) -> FleetStatistics:
    """Return what all parts of a communicator have counted."""
    moved = fabric.statistics()
    counts = [(engine.num_calls, engine.call_bytes)]
    for segment in shared_memory:
        moved = replace(moved, connections=(*moved.connections, *segment.traffic()))
        counts.append((segment.num_calls, segment.call_bytes))
    return FleetStatistics(
        fabric=moved,
        link_bytes=MappingProxyType(link_bytes(moved, topology)),
        calls=add_counts(calls for calls, _ in counts),
        call_bytes=add_counts(num_bytes for _, num_bytes in counts),
        waited_s=MappingProxyType(dict(progress.waited_s)),
        own_s=MappingProxyType(progress.own_s()[0]),
        num_steps=progress.num_steps,
        num_samples=progress.num_samples,
        loss=progress.loss,
        lacked_s=progress.shortage.seconds(),
        steps_s=progress.steps_s,
        starting_s=progress.starting_s,
        total_s=progress.total_s,
        bucket_classes=bucket_classes,
        num_pending_calls=engine.num_pending_calls,
    )


def add_counts(counts: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    """Return the sums of counters of the same names."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return MappingProxyType(dict(total))


def link_bytes(fabric: FabricStatistics, topology: Topology) -> dict[DirectedLink, int]:
    """Return the payload that a rank's fabric has put on each link, its own data classes and control alike."""
    totals: dict[DirectedLink, int] = {}
    for connection in fabric.connections:
        if connection.sent_bytes:
            for link in topology.route(fabric.rank, connection.peer):
                totals[link] = totals.get(link, 0) + connection.sent_bytes
    return totals
