"""Who executes the slices of a call: compiled code over TCP, or the reference in Python, which runs on any transport.

The reference (:mod:`syncline.runtime.python_slice_executor`) serves the fabric in memory, and rounds between
servers of ``Clustered``. The fabric over TCP puts compiled code in its place
(:meth:`syncline.fabric.Transport.open_executor`), which does the same, to the bit: an engine cannot tell which it has.

The messages of calls are numbered by 64 bits that no two messages in flight between two ranks share:

    stream (16 bits) | running number in the stream (18, wraps around) | slice (16) | message of the slice (14)

A running number may wrap because a rank cannot get 2**18 calls ahead of another: each call ends only after the rank
before has made it too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from syncline.errors import ConfigurationError

SLICE_TAGS = 1 << 14
"""From the first tag of a slice to that of the next."""
CALL_TAGS = SLICE_TAGS << 16
"""From the first tag of a call to that of the next."""
NUM_STREAMS = 1 << 16
NUMBER_BITS = 18
NUMBER_MASK = (1 << NUMBER_BITS) - 1
NUM_SLICES = CALL_TAGS // SLICE_TAGS
"""Slices of a call, at most."""


def first_tag(stream: int, number: int, slice_number: int) -> int:
    """Return the tag of message 0 of a slice; message k has k more."""
    return ((stream << NUMBER_BITS) | (number & NUMBER_MASK)) * CALL_TAGS + slice_number * SLICE_TAGS


def check_tags_fit(*, label: str, stream: int, num_slices: int, num_messages: int) -> None:
    """Raise if the messages of a call cannot all be numbered."""
    if not 0 <= stream < NUM_STREAMS:
        raise ConfigurationError(f"{label}: a stream is a number from 0 to {NUM_STREAMS - 1}, not {stream}")
    if num_slices > NUM_SLICES:
        raise ConfigurationError(f"{label}: {num_slices} slices are more than {NUM_SLICES}; cut larger slices")
    if num_messages > SLICE_TAGS:
        raise ConfigurationError(
            f"{label}: {num_messages} messages between two ranks in one slice are more than {SLICE_TAGS}; "
            "choose a planner with fewer"
        )


class Kind(IntEnum):
    """What an operation does."""

    SEND = 0
    COPY = 1
    LAND = 2
    APPLY = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation on the atoms [first, last); ``peer`` and ``index`` name its message (not for an apply)."""

    kind: Kind
    first: int
    last: int
    peer: int = -1
    index: int = -1
    then: tuple[int, ...] = ()
    """Operations that wait for this one."""
    applies: tuple[int, ...] = ()
    """For a landing: the applies that use it."""
    before: tuple[int, ...] = ()
    """For an apply: the landings whose ranks precede the own one, in rank order."""
    after: tuple[int, ...] = ()
    """For an apply: the landings whose ranks follow, in rank order."""
    replaces: bool = False
    """For an apply: overwrite the range with its only landing, in place of adding."""


class Dataflow(NamedTuple):
    """The operations of a rank, and how many others each waits for."""

    operations: tuple[Operation, ...]
    num_waits: tuple[int, ...]
    first: tuple[int, ...]
    """What can begin at once: receives before sends, so that what is sent finds its place."""


Slices = tuple[tuple[Dataflow, Sequence[int]], ...]
"""What a rank does with each slice of a call, and the elements at which the slice's atoms begin and end."""


class Reduction(Protocol):
    """Adds one range of bytes to another of the same length, where adding stands for :attr:`op`.

    Ranges are contiguous and hold whole elements. It is called on the communication loop's thread, or on threads that
    wait for a call of theirs, and keeps nothing.

    >>> reduction = numpy_reduction("float32", "max")
    >>> reduction.dtype, reduction.op, reduction.itemsize
    ('float32', 'max', 4)
    """

    @property
    def dtype(self) -> str:
        """The name of the number type; ranks whose names differ have called different things."""

    @property
    def op(self) -> str:
        """How two numbers become one: "sum", "max", "min" or "product"."""

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""

    def add(self, into: memoryview, other: memoryview) -> None:
        """Add ``other`` to ``into``, element by element."""

    def add_both(self, into: memoryview, first: memoryview, second: memoryview) -> None:
        """Make ``into`` the sum of two, in this order; it may be one of them."""


class SlicedCall(NamedTuple):
    """A call as an executor takes it; there is something to move."""

    slices: Slices
    """The same object for each call of its kind: what is made of it can be kept."""
    buffer: memoryview
    reduction: Reduction
    urgency: int
    connection_class: int
    number: int
    """Counts the calls of this rank as it made them, over all streams."""
    tag: int
    """The first of its :data:`CALL_TAGS`."""
    signature: int
    on_over: Callable[[], None]
    """Called once, when all slices have ended, unless the execution was stopped before."""
    on_mismatch: Callable[[int, int, int], None]
    """Told (peer, tag, received signature) of a message of another signature or size than was expected."""


class Execution(Protocol):
    """All slices of one call on their way."""

    @property
    def is_over(self) -> bool:
        """Whether every slice has ended."""

    @property
    def has_more(self) -> bool:
        """Whether there are slices that were not begun."""

    def start(self) -> None:
        """Begin as many slices as there is room for; the others follow."""

    def stop(self) -> None:
        """Withdraw: after this nothing is written to the buffer any more, whatever arrives."""

    def awaited_peers(self) -> set[int]:
        """Return who has not delivered yet what may be delivered now."""

    def open_peers(self) -> set[int]:
        """Return the ranks that slices under way still have to exchange messages with (-1: none, but work is left)."""


class SliceExecutor(Protocol):
    """Executes the calls of one engine; what is compiled begins the most urgent first, and so many bytes at once."""

    def open(self, call: SlicedCall) -> Execution:
        """Return an execution that has not begun."""

    def heard_s(self, peer: int) -> float:
        """Return when a message of ``peer`` last arrived, by the loop's clock; 0 if none did."""
