"""What travels between a worker and a server shard: a header of fixed size, then the bucket.

Messages of one direction have one size, whatever they say, so that a receive can be posted before it is known what will
come. They are numbered, and received in that order.

    PUSH, END, HELLO    worker to server: the bucket in its own number type
    SUM, AVERAGE        server to worker: the bucket in the type in which gradients are summed
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from syncline.runtime.tags import first_tag

ALIGNMENT_BYTES = 64
MAX_NAMED = 15
_UP = struct.Struct("<IIIIId")
_DOWN = struct.Struct("<IIIIIII")
_STOP = struct.Struct("<II")


class Kind(IntEnum):
    """What a message is."""

    PUSH = 1
    END = 2
    HELLO = 3
    SUM = 4
    AVERAGE = 5


class MessageKind(IntEnum):
    """Which way a message goes, and for what: part of its tag."""

    UP = 0
    DOWN = 1
    ASK = 2
    ANSWER = 3
    STOP = 4
    NOTE = 5


def tag(stream: int, kind: MessageKind, number: int, *, epoch: int) -> int:
    """Return the tag of message ``number`` of a lane; ``epoch`` counts the servers that the bucket has had."""
    return first_tag(stream, number, kind) + epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class UpHeader:
    """In front of what a worker sends.

    Of a PUSH, ``iteration`` counts within the period, of END and HELLO since the start of the training. Of an END,
    ``round_number`` is the part.
    """

    kind: Kind
    period: int
    round_number: int = 0
    iteration: int = 0
    last_part: int = 0
    weight: float = 0.0

    SIZE_BYTES = ALIGNMENT_BYTES

    def encode(self, into: memoryview) -> None:
        """Write the header at the beginning of ``into``."""
        _UP.pack_into(into, 0, self.kind, self.period, self.round_number, self.iteration, self.last_part, self.weight)

    @classmethod
    def decode(cls, message: memoryview) -> UpHeader:
        """Read the header of ``message``."""
        kind, period, round_number, iteration, last_part, weight = _UP.unpack_from(message)
        return cls(
            kind=Kind(kind),
            period=period,
            round_number=round_number,
            iteration=iteration,
            last_part=last_part,
            weight=weight,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DownHeader:
    """In front of what a server sends.

    Of an AVERAGE, ``closed`` is the part, and ``clock`` the iteration since the start of the training.
    """

    kind: Kind
    period: int
    closed: int
    clock: int = 0
    is_last: bool = False
    accepted: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    """For each rank, how many of its gradients this shard has dropped so far."""

    @staticmethod
    def size_bytes(*, window: int, world_size: int) -> int:
        """Return the room that a header takes."""
        size = _DOWN.size + 4 * (window + world_size)
        return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def encode(self, into: memoryview) -> None:
        """Write the header at the beginning of ``into``."""
        sizes = (len(self.accepted), len(self.dropped))
        _DOWN.pack_into(into, 0, self.kind, self.period, self.closed, self.clock, self.is_last, *sizes)
        _pack_numbers(into, (*self.accepted, *self.dropped))

    @classmethod
    def decode(cls, message: memoryview) -> DownHeader:
        """Read the header of ``message``."""
        kind, period, closed, clock, is_last, num_accepted, num_dropped = _DOWN.unpack_from(message)
        numbers = struct.unpack_from(f"<{num_accepted + num_dropped}I", message, _DOWN.size)
        return cls(
            kind=Kind(kind),
            period=period,
            closed=closed,
            clock=clock,
            is_last=bool(is_last),
            accepted=numbers[:num_accepted],
            dropped=numbers[num_accepted:],
        )


def _pack_numbers(into: memoryview, numbers: Sequence[int]) -> None:
    struct.pack_into(f"<{len(numbers)}I", into, _DOWN.size, *numbers)


def encode_stop(*, period: int, last_round: int) -> memoryview:
    """Return the message of a worker that ends a period which is averaged elsewhere."""
    return memoryview(bytearray(_STOP.pack(period, last_round)))


def decode_stop(message: memoryview) -> tuple[int, int]:
    """Return the period and the last round."""
    period, last_round = _STOP.unpack(message)
    return period, last_round


@dataclass(slots=True)
class Question:
    """One worker asks whom a shard waits for; the answer names at most ``MAX_NAMED`` ranks."""

    number: int = 0
    asked: memoryview = field(default_factory=lambda: memoryview(bytearray(8)))
    answered: memoryview = field(default_factory=lambda: memoryview(bytearray(4 + 4 * MAX_NAMED)))

    @staticmethod
    def encode_answer(ranks: Sequence[int]) -> memoryview:
        """Return the answer."""
        answer = bytearray(4 + 4 * MAX_NAMED)
        named = ranks[:MAX_NAMED]
        struct.pack_into(f"<{1 + len(named)}I", answer, 0, len(named), *named)
        return memoryview(answer)

    def decode_answer(self) -> tuple[int, ...]:
        """Return the ranks that the answer names."""
        (count,) = struct.unpack_from("<I", self.answered)
        return struct.unpack_from(f"<{count}I", self.answered, 4)
