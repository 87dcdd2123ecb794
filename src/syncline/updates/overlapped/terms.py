"""What all ranks agree on before the first push, and the memory of a message."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from syncline.fabric import BULK
from syncline.members import Quorum
from syncline.runtime.port import Port
from syncline.tensors.memory import bytes_of
from syncline.updates.flat import sum_dtype
from syncline.updates.messaging.mailbox import MessageStream
from syncline.updates.overlapped.messages import DownHeader, UpHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms of the exchange with servers, equal on every rank."""

    world_size: int
    workers: tuple[int, ...]
    servers: tuple[int, ...]
    quorum: int
    period: int
    """Iterations of a period."""
    window: int
    """Pushes of one worker that may be out for one bucket."""
    ends_on_tree: bool = False
    """Whether a period ends with a collective (see :mod:`.tree_mean`), not through the servers."""
    shrinks: bool = False
    """Whether the quorum is all workers that live; then periods end through the servers once a rank is lost."""

    @property
    def survival(self) -> Quorum:
        """How many workers must live for the others to go on."""
        return Quorum() if self.shrinks else Quorum(part=0.0, least=self.quorum)

    @property
    def keeps_start(self) -> bool:
        """Whether a worker may have to tell a server's successor what a period began with."""
        return self.shrinks or self.quorum < len(self.workers) or self.servers != self.workers


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTerms:
    """One bucket of them."""

    index: int
    stream: int
    """Its messages' tags belong to this stream."""
    connection_class: int
    num_elements: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of its parameters."""
        return self.num_elements * self.dtype.itemsize

    @property
    def urgency(self) -> int:
        """Of all its messages: after those of collectives, since no step waits for these."""
        return BULK + self.index

    def open_messages(self, port: Port, *, epoch: int) -> MessageStream:
        """Return the bucket's messages; ``epoch`` counts the servers that it has had.

        What a server sent before it left is received after that too: the last averages come so.
        """
        return MessageStream(
            port,
            self.stream,
            urgency=self.urgency,
            connection_class=self.connection_class,
            epoch=epoch,
            even_if_lost=True,
        )

    def make_up(self) -> Message:
        """Return room for a message from a worker."""
        return Message(UpHeader.SIZE_BYTES, self.num_elements, self.dtype)

    def make_down(self, terms: Terms) -> Message:
        """Return room for a message from the server."""
        header_bytes = DownHeader.size_bytes(window=terms.window, world_size=terms.world_size)
        return Message(header_bytes, self.num_elements, sum_dtype(self.dtype))


class Message:
    """A header and a bucket, one after another in memory."""

    def __init__(self, header_bytes: int, num_elements: int, dtype: torch.dtype) -> None:
        self._header_bytes = header_bytes
        self._num_elements = num_elements
        self._bytes = torch.zeros(header_bytes + num_elements * dtype.itemsize, dtype=torch.uint8)
        self.memory = bytes_of(self._bytes)
        self.values = self.values_as(dtype)

    def values_as(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the bucket's elements as ``dtype``, which must not be larger than the one it was made for."""
        stop = self._header_bytes + self._num_elements * dtype.itemsize
        return self._bytes[self._header_bytes : stop].view(dtype)
