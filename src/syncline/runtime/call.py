"""A collective as it is asked for: what every rank must ask for alike, and what each may choose for itself."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import numpy as np

from syncline.errors import ConfigurationError
from syncline.observe import Trace
from syncline.runtime.reduction import Reduction
from syncline.schedule import Collective, Layout, Schedule


class BasicSettings(TypedDict, total=False):
    """What a caller may say of any call: how it is called in errors and traces, and how it is treated."""

    stream: int
    """Calls match by their running number in it; the communicator's own if it is not given."""
    label: str
    """The collective's name, if it is not given."""
    step: int | None
    urgency: int
    """Lower goes first; 0 if it is not given."""
    connection_class: int
    timeout_s: float | None
    """None: the communicator's."""
    is_awaited: bool
    """The caller does nothing else until the call ends, so it may end before the method returns."""


class CallSettings(BasicSettings, total=False):
    """What a caller may say of any collective."""

    op: str
    """What the caller makes of the numbers, such as "weighted mean"; the reduction's if it is not given."""
    elements: str
    """The caller's number type, where the reduction is of plain bytes."""


DETAILS = " -- "
"""What follows it in a :class:`Description` belongs at the end of an error."""
PARTS = " in parts of "
"""What precedes the sizes of unequal parts there, in rank order and in the unit of the whole."""
MOST_PARTS = 32
"""Of which a description tells: it is cut after so many characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(ABC):
    """What all ranks do together, once.

    Ranks match their calls by (``stream``, running number in that stream), so calls of different streams may be made in
    different orders on different ranks. Stream 0 is the user's. A lower ``urgency`` goes first; ``urgency``,
    ``connection_class`` and ``timeout_s`` are each rank's own affair, all else must agree.
    """

    stream: int
    label: str
    timeout_s: float
    urgency: int = 0
    connection_class: int = 0
    step: int | None = None

    @property
    def what(self) -> str:
        """``"all_gather of bucket 4, step 118"``."""
        return self.label if self.step is None else f"{self.label}, step {self.step}"

    @property
    @abstractmethod
    def kind(self) -> str:
        """``"all_gather"``: calls are counted by it."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Size of this rank's memory that takes part."""

    @abstractmethod
    def needed_by(self, rank: int) -> Collection[int]:
        """Return who cannot end the call without ``rank``."""

    @abstractmethod
    def place_own_part(self, rank: int) -> None:
        """Put what ``rank`` brings where it belongs; nothing happens if it is there."""

    @abstractmethod
    def describe(self) -> Description:
        """Describe it to the other ranks."""

    def check_deadline(self) -> None:
        """Raise :class:`ConfigurationError` if it could never be done in time."""
        if self.timeout_s <= 0:
            raise ConfigurationError(f"{self.what}: a deadline lies in the future, not {self.timeout_s} s away")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall(Call):
    """One collective on one buffer, in place.

    ``buffer`` holds ``layout.num_elements`` elements as writable bytes and is the engine's until the call ends.

    >>> from syncline.schedule import Collective
    >>> (alone,) = communicators_in_memory(1)
    >>> schedule = alone.plan(Collective.ALL_REDUCE, num_bytes=12)
    >>> settings = {"reduction": numpy_reduction("float32"), "label": "gradients", "timeout_s": 10.0}
    >>> layout, buffer = alone.layout(schedule, num_elements=3, itemsize=4), memoryview(bytearray(12))
    >>> call = CollectiveCall(stream=0, schedule=schedule, layout=layout, buffer=buffer, **settings)
    >>> call.numbers; alone.close()
    '3 x float32'
    """

    schedule: Schedule
    layout: Layout
    buffer: memoryview
    reduction: Reduction
    parts: tuple[int, ...] = ()
    """The elements of each rank's part, where parts are in rank order and not equal; empty: as equal as can be."""
    own_part: memoryview | None = None
    """What this rank brings to an all-gather, if it is not in the buffer yet; unchanged until the call ends."""
    op: str = ""
    """What the caller makes of the numbers, such as "weighted mean"; empty: what the reduction does."""
    elements: str = ""
    """The caller's number type, where the reduction is of plain bytes; empty: the reduction's."""

    def __post_init__(self) -> None:
        needed_bytes = self.layout.num_elements * self.reduction.itemsize
        if self.buffer.nbytes != needed_bytes or self.buffer.readonly or self.buffer.format != "B":
            raise ConfigurationError(
                f"{self.what}: the buffer must be {needed_bytes} writable bytes ({self.layout.num_elements} x "
                f"{self.reduction.dtype}), not {self.buffer.nbytes} {'read-only ' * self.buffer.readonly}bytes of "
                f"format {self.buffer.format!r}; give memoryview(array).cast('B')"
            )
        self.check_deadline()

    @property
    def kind(self) -> str:
        """The collective's name."""
        return self.schedule.collective.value

    @property
    def num_bytes(self) -> int:
        """Size of the buffer."""
        return self.buffer.nbytes

    def needed_by(self, rank: int) -> Collection[int]:
        """Return the ranks that receive something from ``rank`` in the schedule."""
        transfers = self.schedule.transfers
        return [int(peer) for peer in np.unique(transfers.dst[transfers.src == rank])]

    def own_range(self, rank: int) -> tuple[int, int]:
        """Return the bytes of the buffer that are the part of ``rank``, where parts are in rank order."""
        num_ranks, itemsize = self.schedule.num_ranks, self.reduction.itemsize
        if self.parts:
            start = sum(self.parts[:rank])
            return start * itemsize, (start + self.parts[rank]) * itemsize
        start, stop = (place * self.layout.num_elements // num_ranks * itemsize for place in (rank, rank + 1))
        return start, stop

    def place_own_part(self, rank: int) -> None:
        """Put what ``rank`` brings where it belongs; nothing happens if it is there."""
        if self.own_part is not None:
            start, stop = self.own_range(rank)
            self.buffer[start:stop] = self.own_part

    @property
    def numbers(self) -> str:
        """What the buffer holds: ``"3 x float32"``, or ``"12 bytes of bool"`` where they move as plain bytes."""
        if self.elements:
            return f"{self.buffer.nbytes} bytes of {self.elements}"
        return f"{self.layout.num_elements} x {self.reduction.dtype}"

    @property
    def meaning(self) -> str:
        """What becomes of the numbers, such as ``"weighted mean"``; empty if they are only moved."""
        is_reduced = self.schedule.collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
        return self.op or (self.reduction.op if is_reduced else "")

    @property
    def num_slices(self) -> int:
        """Number of slices; none if there is nothing to move."""
        return len(self.layout.slices) if self.layout.num_elements else 0

    def describe(self) -> Description:
        """Describe it by what is moved, what becomes of it, and on which ways."""
        meaning = f"{self.meaning}; " if self.meaning and self.meaning != self.label else ""
        where = f" from rank {self.schedule.root}" if self.schedule.collective is Collective.BROADCAST else ""
        if self.parts:
            where = f"{PARTS}{', '.join(map(str, self.parts[:MOST_PARTS]))}"
        return Description(
            identity=f"{self.kind} {self.numbers} {self.meaning} {self.schedule.digest} {self.layout.digest}",
            text=f"{self.kind} of {self.numbers}{where} ({meaning}{self.what[:200]})"
            f"{DETAILS}schedule {self.schedule.planner} {self.schedule.digest[:8]}, layout {self.layout.digest}",
        )


class Description(NamedTuple):
    """What a call tells the other ranks: ``identity`` must be equal on all of them, ``text`` is for people.

    What of ``text`` helps few of them stands behind :data:`DETAILS`.
    """

    identity: str
    text: str

    @property
    def signature(self) -> int:
        """32 bits that every message of the call carries."""
        return zlib.crc32(self.identity.encode())


def trace_call(trace: Trace, call: Call, start_ns: int, **args: object) -> None:
    """Record that ``call`` went on from ``start_ns`` until now."""
    if trace.enabled:
        about = {"bytes": call.num_bytes, "connection_class": call.connection_class}
        step = {} if call.step is None else {"step": call.step}
        trace.span(call.label, "communication", start_ns, trace.now_ns(), **about, **step, **args)
