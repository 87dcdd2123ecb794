"""The sending side of one peer: what goes at once, what is announced, and what the peer granted."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence

from syncline.fabric.callbacks import call_back
from syncline.fabric.control_connection import ControlConnection
from syncline.fabric.data_connection import DataConnection, Outgoing
from syncline.fabric.frames import HEADER_BYTES, FrameError, FrameType
from syncline.fabric.options import MAX_CLASSES
from syncline.fabric.shared_host import address_of

MAX_REQUESTS = 16384
"""Announced messages that wait for their grant at one peer; more than that wait here, unannounced."""


class Outbox:
    """Messages to one peer until their last byte is with the kernel."""

    def __init__(self, *, eager_bytes: int) -> None:
        self.eager_bytes = eager_bytes
        """Messages of at most this size go without asking."""
        self._control: ControlConnection | None = None
        self._data: Sequence[DataConnection] = ()
        self._credit_bytes = 0
        self._order = 0
        self._is_closed = False
        self._announced: dict[int, tuple[Outgoing, int]] = {}
        self._unannounced: list[tuple[int, int, Outgoing, int]] = []
        self._num_unsent = 0
        self._queued_bytes = [0] * MAX_CLASSES
        self.is_memory_readable = False
        """Whether the peer can copy messages out of this process's memory."""
        self.fetched_bytes = 0
        self.num_fetched = 0
        self.on_drained: Callable[[], None] | None = None

    @property
    def is_drained(self) -> bool:
        """Whether everything that was sent is with the kernel."""
        return not self._num_unsent

    def queued_bytes(self, connection_class: int) -> int:
        """Payload of one class that waits, for a grant or for the connection."""
        return self._queued_bytes[connection_class]

    def attach(self, control: ControlConnection, data: Sequence[DataConnection]) -> None:
        """Use these connections from now on."""
        self._control = control
        self._data = data

    def send(
        self,
        tag: int,
        payload: memoryview,
        *,
        signature: int,
        urgency: int,
        connection_class: int,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Send at once if the message is small and there is credit; else announce it.

        A class beyond those that are open goes with the last of them.
        """
        num_bytes = payload.nbytes
        connection_class = min(connection_class, len(self._data) - 1)
        self._order += 1
        message = Outgoing(
            tag=tag,
            payload=payload if payload.format == "B" and payload.ndim == 1 else payload.cast("B"),
            num_bytes=num_bytes,
            signature=signature,
            urgency=urgency,
            order=self._order,
            is_eager=num_bytes <= self.eager_bytes and num_bytes + HEADER_BYTES <= self._credit_bytes,
            on_sent=on_sent,
        )
        self._num_unsent += 1
        self._queued_bytes[connection_class] += num_bytes
        if message.is_eager:
            self._credit_bytes -= num_bytes + HEADER_BYTES
            message.limit_bytes = num_bytes
            self._data[connection_class].push(message)
        elif len(self._announced) < MAX_REQUESTS:
            self._announce(message, connection_class)
        else:
            heapq.heappush(self._unannounced, (urgency, self._order, message, connection_class))

    def on_credit(self, num_bytes: int) -> None:
        """Take note that the peer lets this much more be sent without asking."""
        self._credit_bytes += num_bytes

    def on_grant(self, tag: int, limit_bytes: int) -> None:
        """Send the announced message ``tag`` up to ``limit_bytes``."""
        message, connection_class = self._announced_message(tag)
        if not message.limit_bytes < limit_bytes <= message.num_bytes:
            raise FrameError(f"grant of message {tag:#x} up to byte {limit_bytes} of {message.num_bytes}")
        message.limit_bytes = limit_bytes
        if limit_bytes == message.num_bytes:
            self._withdraw(tag)
        self._data[connection_class].push(message)

    def on_discard(self, tag: int) -> None:
        """Send what was granted of ``tag`` and drop the rest: its receiver does not want it."""
        message, connection_class = self._announced_message(tag)
        self._withdraw(tag)
        message.is_discarded = True
        if not message.is_queued and not message.is_leaving:
            asyncio.get_running_loop().call_soon(self._finish, message, connection_class)

    def on_fetched(self, tag: int) -> None:
        """Take note that the peer has copied the whole of ``tag`` out of this process's memory."""
        message, connection_class = self._announced_message(tag)
        if not self.is_memory_readable or message.limit_bytes:
            raise FrameError(f"message {tag:#x} cannot have been copied")
        self._withdraw(tag)
        self.fetched_bytes += message.num_bytes
        self.num_fetched += 1
        self._finish(message, connection_class)

    def on_message_sent(self, connection_class: int, message: Outgoing) -> None:
        """Take note that what was granted of ``message`` is with the kernel."""
        if message.sent_bytes == message.num_bytes or message.is_discarded:
            self._finish(message, connection_class)

    def close(self) -> None:
        """Drop everything that is not sent."""
        self._announced.clear()
        self._unannounced.clear()
        self._queued_bytes = [0] * MAX_CLASSES
        self._is_closed = True
        self._num_unsent = 0
        if self.on_drained is not None:
            self.on_drained()

    def _finish(self, message: Outgoing, connection_class: int) -> None:
        if self._is_closed:
            return
        self._num_unsent -= 1
        self._queued_bytes[connection_class] -= message.num_bytes
        on_sent, message.on_sent = message.on_sent, None
        message.payload = memoryview(b"")
        if not self._num_unsent and self.on_drained is not None:
            self.on_drained()
        if on_sent is not None:
            call_back(on_sent)

    def _announce(self, message: Outgoing, connection_class: int) -> None:
        assert message.tag not in self._announced, f"message {message.tag:#x} is sent twice"
        assert self._control is not None
        self._announced[message.tag] = (message, connection_class)
        self._control.send(
            FrameType.REQUEST,
            tag=message.tag,
            signature=message.signature,
            message_bytes=message.num_bytes,
            offset=address_of(message.payload) if self.is_memory_readable and message.num_bytes else 0,
        )

    def _withdraw(self, tag: int) -> None:
        del self._announced[tag]
        if self._unannounced:
            _, _, message, connection_class = heapq.heappop(self._unannounced)
            self._announce(message, connection_class)

    def _announced_message(self, tag: int) -> tuple[Outgoing, int]:
        found = self._announced.get(tag)
        if found is None:
            raise FrameError(f"grant of message {tag:#x}, which was not announced")
        return found
