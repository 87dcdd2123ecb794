"""What travels between a worker and a server shard: a record in a head of fixed size, then the bucket.

    Push, End, Hello       worker to server: the bucket in its own number type
    Reply, ReplyAverage    server to worker: the bucket in the type in which gradients are summed

They are what one state machine says and the other is told (:mod:`.events`). Messages of one direction have one size,
whatever they say, so that a receive can be posted before it is known what will come. Beside them ranks tell each other
notes: small records, ahead of all buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch

from syncline.fabric import BULK
from syncline.runtime.port import Port
from syncline.tensors.memory import bytes_of
from syncline.updates.flat import aligned, sum_dtype
from syncline.updates.messaging.driver import LeftBehind
from syncline.updates.messaging.mailbox import MessageStream, decode_record, encode_record
from syncline.updates.overlapped.events import End, Hello, Push, Reply, ReplyAverage

Told = Push | End | Hello | Reply | ReplyAverage
HEAD_BYTES, RANK_BYTES = 256, 12
"""Room for the text of a record, and for each rank of whose pushes it says how many were dropped."""

UP, DOWN = range(2)
"""Kinds of messages on a bucket's stream: to its server, and from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """One bucket, as its messages have it; equal on every rank."""

    index: int
    stream: int
    """Its messages' tags belong to this stream."""
    connection_class: int
    num_elements: int
    dtype: torch.dtype
    world_size: int

    def open_messages(self, port: Port, *, epoch: int) -> MessageStream:
        """Return the bucket's messages, after those of collectives; ``epoch`` counts the servers that it has had.

        What a server sent before it left is received after that too: the last averages come so.
        """
        return MessageStream(
            port,
            self.stream,
            urgency=BULK + self.index,
            connection_class=self.connection_class,
            epoch=epoch,
            even_if_lost=True,
        )

    def make_up(self) -> Message:
        """Return room for a message from a worker."""
        return Message(self, self.dtype)

    def make_down(self) -> Message:
        """Return room for a message from the server."""
        return Message(self, sum_dtype(self.dtype))


class Message:
    """A record and a bucket, one after another in memory."""

    def __init__(self, layout: BucketLayout, dtype: torch.dtype) -> None:
        self._num_elements = layout.num_elements
        self._head_bytes = aligned(HEAD_BYTES + RANK_BYTES * layout.world_size)
        self._bytes = torch.empty(self._head_bytes + layout.num_elements * dtype.itemsize, dtype=torch.uint8)
        self.memory = bytes_of(self._bytes)
        self.values = self.values_as(dtype)

    def values_as(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the bucket's elements as ``dtype``, which must not be larger than the one it was made for."""
        stop = self._head_bytes + self._num_elements * dtype.itemsize
        return self._bytes[self._head_bytes : stop].view(dtype)

    def write(self, record: Told) -> None:
        """Let ``record`` be what it says."""
        self.memory[: self._head_bytes] = encode_record(record).ljust(self._head_bytes)

    def read(self) -> Told:
        """Return what it says; raises ValueError if that is no record."""
        record: Told = decode_record(bytes(self.memory[: self._head_bytes]), get_args(Told), "the overlapped update")[0]
        return record


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


Note = Stopped | Question | Answer | Nonfinite | LeftBehind
