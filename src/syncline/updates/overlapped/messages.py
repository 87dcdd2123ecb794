"""What travels between a worker and a server shard: a header of fixed size, then the bucket.

Messages of one direction have one size, whatever they say, so that a receive can be posted before it is known what will
come.

    PUSH, END, HELLO    worker to server: the bucket in its own number type
    SUM, AVERAGE        server to worker: the bucket in the type in which gradients are summed

Beside them ranks send each other notes: small records, as text.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from syncline.updates.flat import ALIGNMENT_BYTES, aligned
from syncline.updates.messaging.records import decode_record

_UP = struct.Struct("<IIIId")
_DOWN = struct.Struct("<IIIIII")


class Kind(IntEnum):
    """What a message is."""

    PUSH = 1
    END = 2
    HELLO = 3
    SUM = 4
    AVERAGE = 5


UP, DOWN, NOTES = range(3)
"""Kinds of messages on a bucket's stream: to its server, from it, and on that of the first bucket what ranks tell each
other beside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpHeader:
    """In front of what a worker sends.

    Of a PUSH, ``iteration`` counts within the period, of END and HELLO since the start of the training.
    """

    kind: Kind
    period: int
    round_number: int = 0
    iteration: int = 0
    weight: float = 0.0

    SIZE_BYTES = ALIGNMENT_BYTES

    def encode(self, into: memoryview) -> None:
        """Write the header at the beginning of ``into``."""
        _UP.pack_into(into, 0, self.kind, self.period, self.round_number, self.iteration, self.weight)

    @classmethod
    def decode(cls, message: memoryview) -> UpHeader:
        """Read the header of ``message``."""
        kind, period, round_number, iteration, weight = _UP.unpack_from(message)
        return cls(kind=Kind(kind), period=period, round_number=round_number, iteration=iteration, weight=weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class DownHeader:
    """In front of what a server sends.

    Of an AVERAGE, ``clock`` is the iteration since the start of the training.
    """

    kind: Kind
    period: int
    closed: int = 0
    clock: int = 0
    accepted: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    """For each rank, how many of its gradients this shard has dropped so far."""

    @staticmethod
    def size_bytes(*, window: int, world_size: int) -> int:
        """Return the room that a header takes."""
        return aligned(_DOWN.size + 4 * (window + world_size))

    def encode(self, into: memoryview) -> None:
        """Write the header at the beginning of ``into``."""
        sizes = (len(self.accepted), len(self.dropped))
        _DOWN.pack_into(into, 0, self.kind, self.period, self.closed, self.clock, *sizes)
        _pack_numbers(into, (*self.accepted, *self.dropped))

    @classmethod
    def decode(cls, message: memoryview) -> DownHeader:
        """Read the header of ``message``."""
        kind, period, closed, clock, num_accepted, num_dropped = _DOWN.unpack_from(message)
        numbers = struct.unpack_from(f"<{num_accepted + num_dropped}I", message, _DOWN.size)
        return cls(
            kind=Kind(kind),
            period=period,
            closed=closed,
            clock=clock,
            accepted=numbers[:num_accepted],
            dropped=numbers[num_accepted:],
        )


def _pack_numbers(into: memoryview, numbers: Sequence[int]) -> None:
    struct.pack_into(f"<{len(numbers)}I", into, _DOWN.size, *numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """To everyone: ``rank`` is lost, or it lives and is left behind; ``is_told`` if the sender believes another."""

    rank: int
    is_left_behind: bool
    is_told: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """To a server: this worker ended ``period``, which is averaged elsewhere."""

    period: int
    last_rounds: tuple[tuple[int, int], ...]
    """Of each bucket there (by number), the last round that it pushed for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """To a server: this worker waits, and asks for whom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """To a worker: who is missing for what comes next."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nonfinite:
    """To everyone: the own gradient of this rank at ``step`` is not finite, first in the parameter at ``position``.

    It is told before the gradient is pushed, so that who gets NaN from a server knows whence it came.
    """

    step: int
    position: int


Note = Lost | Stopped | Question | Answer | Nonfinite
_NOTES = {kind.__name__: kind for kind in (Lost, Stopped, Question, Answer, Nonfinite)}


def decode_note(text: bytes) -> tuple[Note, tuple[memoryview, ...]]:
    """Return the note that a text is, and no payloads; raises ValueError if it is none."""
    note, _ = decode_record(text, _NOTES, "the overlapped update")
    return note, ()
