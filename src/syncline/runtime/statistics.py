"""What a fleet's communication has done, as frozen records."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

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
        found = {
            _short(measure.short or name, value_of): value
            for name, measure in measures(self).items()
            for value_of, value in measure.values.items()
        }
        found["waited_s"] = sum(self.waited_s.values())
        for update in self.updates:
            kind = type(update).__name__.removesuffix("Statistics").lower()
            found |= {f"{kind}_{name}": value for name, value in _numbers(update)}
        return {name: float(value) for name, value in found.items()}


class Measure(NamedTuple):
    """One number, or one for each value of ``label``; what is counted only grows."""

    meaning: str
    values: Mapping[str, float]
    label: str = ""
    is_counted: bool = True
    short: str = ""
    """Its name in :meth:`FleetStatistics.metrics`, where that does not follow from the other."""


def measures(statistics: FleetStatistics) -> dict[str, Measure]:
    """Return what monitoring is told, by name; units and names follow Prometheus' rules."""

    def one(value: float) -> Mapping[str, float]:
        return {} if math.isnan(value) else {"": value}

    moved, connections = statistics.fabric, statistics.fabric.connections
    between_s = max(0.0, statistics.total_s - statistics.starting_s - statistics.steps_s)
    lost = "Ranks that are lost, or have left"
    lacked = "Seconds in which a thread was ready and had no processor"
    goodput = "Part of the time that finished steps took"
    return {
        "steps": Measure("Steps that are finished", one(statistics.num_steps)),
        "step_seconds": Measure("Seconds in finished steps", one(statistics.steps_s), short="steps_s"),
        "starting_seconds": Measure("Seconds until the first step began", one(statistics.starting_s)),
        "between_steps_seconds": Measure("Seconds between finished steps", one(between_s), is_counted=False),
        "connected_seconds": Measure(
            "Seconds since the ranks were connected", one(statistics.total_s), short="total_s"
        ),
        "own_seconds": Measure("Seconds of this rank's own in each phase", statistics.own_s, "phase"),
        "lacked_processor_seconds": Measure(lacked, one(statistics.lacked_s)),
        "samples": Measure("Samples, as far as the user said", one(statistics.num_samples)),
        "waited_seconds": Measure("Seconds waited for other ranks", statistics.waited_s, "reason"),
        "calls": Measure("Collectives that are over", statistics.calls, "call"),
        "call_bytes": Measure("Bytes of their buffers", statistics.call_bytes, "call"),
        "sent_bytes": Measure("Payload sent to other ranks", one(moved.sent_bytes)),
        "received_bytes": Measure("Payload received from other ranks", one(moved.received_bytes)),
        "uplink_bytes": Measure("Payload put on each link above this rank", statistics.uplink_bytes(), "link"),
        "reconnects": Measure(
            "Connections that broke and were opened again", one(sum(each.reconnects for each in connections))
        ),
        "resent_bytes": Measure("What was sent again then", one(sum(each.resent_bytes for each in connections))),
        "goodput_ratio": Measure(goodput, one(statistics.goodput), is_counted=False, short="goodput"),
        "loss": Measure("The last loss that the user said", one(statistics.loss), is_counted=False),
        "queued_bytes": Measure("Payload that waits to be sent", one(statistics.queued_bytes), is_counted=False),
        "pending_calls": Measure("Collectives under way", one(statistics.num_pending_calls), is_counted=False),
        "lost_ranks": Measure(lost, one(len(moved.lost_peers)), is_counted=False),
        "epoch": Measure("How often the members of the job have changed", one(statistics.epoch), is_counted=False),
    }


_UNITS = {"_seconds": "_s", "_bytes": "_bytes", "": ""}
"""As a measure's name ends with them, and as its short one does."""


def _short(name: str, value_of: str) -> str:
    """Return the name of one number by itself: ``own_forward_s`` is of ``own_seconds``."""
    unit = next(unit for unit in _UNITS if name.endswith(unit))
    word = re.sub("[' ]+", "_", value_of)
    return f"{name.removesuffix(unit)}{word and '_'}{word}{_UNITS[unit]}"


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
