"""What a schedule costs on a topology: the model by which planners are compared.

The data runs through the schedule in n even slices, each slice through all steps by itself.

- A rank's communication loop handles one thing at a time: an overhead for each message that it sends or receives, and
  the bytes of these at ``rank_bytes_per_s``, those that it adds counted twice.
- One step of one slice takes as long as its busiest link (bytes / rate) or its busiest rank, whichever is longer, plus
  the longest route's latency, plus one message's overhead.
- The *first slice* takes the sum of its steps.
- Slices follow each other at the *period* of whatever is busiest over a whole slice, all steps together: a directed
  link or a rank.

    seconds = first slice + (n - 1) x period

With one slice this is the sum of the steps; with many it tends to the busiest link's bytes / rate. A link's rate is
taken times ``payload_share``: what TCP/IP and Ethernet headers leave of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from syncline.errors import ScheduleError
from syncline.schedule.draft import Draft
from syncline.schedule.schedule import Schedule
from syncline.schedule.traffic import Floats, LinkTable, shares, steps_of
from syncline.topology import DirectedLink, Topology

DEFAULT_SLICE_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Constants of the model; the defaults are those of CPython's event loop and of TCP on Ethernet of MTU 1500."""

    message_overhead_s: float = 30e-6
    payload_share: float = 1448 / 1514
    rank_bytes_per_s: float = 3e9

    def __post_init__(self) -> None:
        if not (self.message_overhead_s >= 0 and 0 < self.payload_share <= 1 and self.rank_bytes_per_s > 0):
            raise ScheduleError(
                f"a message's overhead is at least 0 s, a payload share in (0, 1], a rank's rate above 0; not {self}"
            )

    @classmethod
    def of_links_alone(cls) -> CostModel:
        """Return a model in which links cost what their rates say and nothing else costs anything."""
        return cls(message_overhead_s=0.0, payload_share=1.0, rank_bytes_per_s=math.inf)

    @classmethod
    def of_emulated_network(cls, num_ranks: int, num_processors: int) -> CostModel:
        """Return a model of ranks that share one machine's processors with each other and with the network itself.

        A rank then does what its share of a processor allows, the kernel's forwarding included, and what it receives is
        acknowledged on links that are as busy the other way. The constants were measured (docs/decisions/0007).
        """
        crowd = max(1.0, num_ranks / num_processors)
        return cls(message_overhead_s=1e-4 * crowd, payload_share=0.942, rank_bytes_per_s=2e9 / crowd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """How long a collective takes, and why.

    ``link_seconds`` says how long each directed link is busy; ``bottleneck`` is the busiest, or None if none limits.
    ``rank_seconds`` says how long the busiest rank's communication loop is.
    ``seconds`` = ``first_slice_s`` + (``num_slices`` - 1) x ``period_s``.
    """

    seconds: float
    first_slice_s: float
    period_s: float
    num_slices: int
    bottleneck: DirectedLink | None
    link_seconds: Mapping[DirectedLink, float]
    rank_seconds: float


def predict(
    schedule: Schedule | Draft,
    topology: Topology,
    num_bytes: int,
    slice_bytes: int = DEFAULT_SLICE_BYTES,
    *,
    cost: CostModel | None = None,
) -> Prediction:
    """Predict the time of one run of ``num_bytes`` in slices of at most ``slice_bytes``; the module says how."""
    if schedule.num_ranks != topology.num_ranks or num_bytes < 0 or slice_bytes < 1:
        raise ScheduleError(
            f"a prediction needs a schedule and a topology of as many ranks, at least 0 bytes and slices of 1 or more; "
            f"not {schedule.num_ranks} and {topology.num_ranks} ranks, {num_bytes} and {slice_bytes} bytes"
        )
    draft = schedule.draft if isinstance(schedule, Schedule) else schedule
    num_slices = max(1, -(-num_bytes // slice_bytes))
    return _Walk(draft, LinkTable.of(topology), num_bytes / num_slices, cost or CostModel()).predict(num_slices)


class _Walk:
    """Sends one slice through all steps and adds up what every link and every rank does for it."""

    def __init__(self, draft: Draft, table: LinkTable, slice_bytes: float, cost: CostModel) -> None:
        self._table = table
        self._cost = cost
        self._slice_bytes = slice_bytes
        self._s_per_byte = 1 / (table.bytes_per_s * cost.payload_share)
        self._link_s: Floats = np.zeros(len(table.links))
        self._rank_s: Floats = np.zeros(draft.num_ranks)
        self._first_slice_s = sum(self._step(draft, rows, moved) for rows, moved in _rows_with_shares(draft))

    def _step(self, draft: Draft, rows: slice, moved: Floats) -> float:
        src, dst = draft.transfers.src[rows], draft.transfers.dst[rows]
        link_s = self._table.load(src, dst, moved) * self._slice_bytes * self._s_per_byte
        s_per_share = self._slice_bytes / self._cost.rank_bytes_per_s
        sending_s = self._cost.message_overhead_s + moved * s_per_share
        receiving_s = sending_s + moved * s_per_share * draft.transfers.add[rows]
        rank_s = np.bincount(src, sending_s, draft.num_ranks) + np.bincount(dst, receiving_s, draft.num_ranks)
        self._link_s += link_s
        self._rank_s += rank_s
        busiest_s = max(float(link_s.max(initial=0.0)), float(rank_s.max()))
        return busiest_s + float(self._table.latencies(src, dst).max()) + self._cost.message_overhead_s

    def predict(self, num_slices: int) -> Prediction:
        busiest_link_s, busiest_rank_s = float(self._link_s.max(initial=0.0)), float(self._rank_s.max())
        period_s = max(busiest_link_s, busiest_rank_s)
        links = self._table.links
        return Prediction(
            seconds=self._first_slice_s + (num_slices - 1) * period_s,
            first_slice_s=self._first_slice_s,
            period_s=period_s,
            num_slices=num_slices,
            bottleneck=links[int(self._link_s.argmax())] if busiest_link_s > 0 else None,
            link_seconds=dict(zip(links, (self._link_s * num_slices).tolist(), strict=True)),
            rank_seconds=busiest_rank_s * num_slices,
        )


def _rows_with_shares(draft: Draft) -> list[tuple[slice, Floats]]:
    moved = shares(draft)
    return [(rows, moved[rows]) for rows in steps_of(draft.transfers)]
