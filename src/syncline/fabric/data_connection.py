"""A data connection to a peer: messages in chunks, the most urgent first, straight from and into their memory.

Sending: a heap of messages by (urgency, sequence) is looked at again for each batch of at most one chunk, so an urgent
message waits for no more than that. Receiving: one ``recvmsg_into`` fills the rest of a payload in its destination and
then the next header; no byte is copied in Python.
"""

from __future__ import annotations

import heapq
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from syncline.fabric.connection import BUDGET_BYTES, Connection
from syncline.fabric.frame_checks import FrameKeys
from syncline.fabric.frames import (
    DATA_TYPES,
    HEADER_BYTES,
    Frame,
    FrameError,
    FrameType,
    check_payload,
    decode_header,
    encode_header,
)
from syncline.fabric.options import MAX_CHUNK_BYTES, FabricOptions
from syncline.fabric.protocol import BULK, BULK_BYTES
from syncline.fabric.tick import TickEnd

WAKE_BYTES = 32 << 10
"""In the middle of a chunk, the kernel wakes us for no less, or for the rest if that is less: a slow link delivers a
packet at a time, and the processor belongs to the training."""
MAX_FRAMES_AT_ONCE = 64
"""Small messages that one ``sendmsg`` takes together."""


@dataclass(slots=True, kw_only=True, eq=False)
class Outgoing:
    """A message that is being sent."""

    tag: int
    payload: memoryview
    num_bytes: int
    signature: int
    urgency: int
    order: int
    is_eager: bool
    on_sent: Callable[[], None] | None
    limit_bytes: int = 0
    """How far it may be sent now."""
    sent_bytes: int = 0
    is_queued: bool = False
    is_leaving: bool = False
    """It is sent up to its limit, but for what the kernel has not taken yet."""
    is_discarded: bool = False

    def __lt__(self, other: Outgoing) -> bool:
        return (self.urgency, self.order) < (other.urgency, other.order)


class ChunkReceiver(Protocol):
    """Who says where a chunk goes."""

    def begin_chunk(self, frame: Frame) -> memoryview | None:
        """Return where the payload of ``frame`` goes, None to throw it away; FrameError if it is not allowed."""

    def end_chunk(self, frame: Frame) -> None:
        """Take note that the payload is there and sound."""


class DataConnection(Connection):
    """One class of data to and from one peer."""

    def __init__(
        self,
        sock: socket.socket,
        tick_end: TickEnd,
        *,
        connection_class: int,
        chunk_bytes: int,
        receiver: ChunkReceiver,
        on_message_sent: Callable[[Outgoing], None],
        on_end: Callable[[], None],
        on_broken: Callable[[Exception], None],
        keys: FrameKeys | None = None,
    ) -> None:
        super().__init__(sock, tick_end, on_broken=on_broken, keys=keys)
        self.connection_class = connection_class
        self._chunk_bytes = chunk_bytes
        self._receiver = receiver
        self._on_message_sent = on_message_sent
        self._on_end = on_end
        self._heap: list[Outgoing] = []
        self._finishing: list[Outgoing] = []
        self._wants_end = False
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._num_header_bytes = 0
        self._frame: Frame | None = None
        self._chunk = memoryview(b"")
        self._num_chunk_bytes = 0
        self._wakes_at_bytes = 1
        self._scratch: memoryview | None = None
        self.sent_bytes = 0
        self.sent_messages = 0
        self.received_bytes = 0
        self.received_messages = 0

    def use(self, options: FabricOptions) -> None:
        """Send in chunks of this size and with these marks from now on."""
        self._chunk_bytes = options.chunk_bytes
        super().use(options)

    def push(self, message: Outgoing) -> None:
        """Send ``message`` up to its limit."""
        if not message.is_queued:
            message.is_queued = True
            heapq.heappush(self._heap, message)
            self.schedule_write()

    def end(self) -> None:
        """Send END when everything else is sent."""
        self._wants_end = True
        self.schedule_write()

    def redirect(self, tag: int) -> None:
        """Let the rest of a chunk of ``tag`` that is arriving go to waste; its destination is not touched again."""
        frame = self._frame
        if frame is None or frame.tag != tag:
            return
        done = self._num_chunk_bytes
        self._receiving.add(self._chunk[:done])
        self._chunk = self._waste(frame.chunk_bytes)[: len(self._chunk) - done]
        self._num_chunk_bytes = 0

    def _refill(self) -> bool:
        heap, room = self._heap, self._chunk_bytes
        if heap and heap[0].urgency >= BULK:
            room = max(room, BULK_BYTES + HEADER_BYTES)
        buffers: list[bytes | memoryview] = []
        num_bytes = 0
        while heap and room > 0 and len(buffers) < 2 * MAX_FRAMES_AT_ONCE:
            message = heap[0]
            if buffers and message.limit_bytes - message.sent_bytes > room:
                break  # a chunk of its own, rather than a crumb now
            # What is sent without asking is never divided, also where chunks became smaller while it waited.
            stop = message.limit_bytes if message.is_eager else min(message.limit_bytes, message.sent_bytes + room)
            chunk = message.payload[message.sent_bytes : stop]
            buffers.append(self._header_of(message, chunk))
            if chunk:
                buffers.append(chunk)
            message.sent_bytes += len(chunk)
            room -= len(chunk) + HEADER_BYTES
            num_bytes += len(chunk) + HEADER_BYTES
            self.sent_bytes += len(chunk)
            self.overhead_bytes += HEADER_BYTES
            if message.sent_bytes == message.limit_bytes:
                message.is_queued = False
                message.is_leaving = True
                self._finishing.append(heapq.heappop(heap))
        if not buffers and self._wants_end:
            self._wants_end = False
            buffers.append(encode_header(FrameType.END, self.connection_class, checks=self._sending))
            num_bytes = HEADER_BYTES
        self._buffers = buffers
        self._buffers_bytes = num_bytes
        return bool(buffers)

    def _header_of(self, message: Outgoing, chunk: memoryview) -> bytes:
        return encode_header(
            FrameType.EAGER if message.is_eager else FrameType.DATA,
            self.connection_class,
            tag=message.tag,
            signature=message.signature,
            message_bytes=message.num_bytes,
            offset=message.sent_bytes,
            payload=chunk,
            checks=self._sending,
        )

    def _on_refill_sent(self) -> None:
        finishing, self._finishing = self._finishing, []
        for message in finishing:
            message.is_leaving = False
        for message in finishing:
            if message.sent_bytes == message.num_bytes:
                self.sent_messages += 1
            self._on_message_sent(message)

    def _read(self) -> None:
        try:
            self._read_within_budget()
        finally:
            if not self.is_closed:
                self._choose_wake_up()

    def _read_within_budget(self) -> None:
        budget = BUDGET_BYTES
        while budget > 0 and not self.is_closed:
            wanted, num_bytes = self._receive_once()
            if not num_bytes:
                raise EOFError
            budget -= num_bytes
            if self._frame is not None and self._num_chunk_bytes == len(self._chunk):
                self._end_chunk(self._frame)
            if self._frame is None and self._num_header_bytes == HEADER_BYTES and not self.is_closed:
                self._begin_chunk()
            if num_bytes < wanted:
                return

    def _choose_wake_up(self) -> None:
        """Sleep until a good part of the chunk is there; a header is waited for by the byte."""
        rest = len(self._chunk) - self._num_chunk_bytes if self._frame is not None else 1
        wakes_at_bytes = max(1, min(rest, WAKE_BYTES))
        if wakes_at_bytes != self._wakes_at_bytes:
            self._wakes_at_bytes = wakes_at_bytes
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wakes_at_bytes)

    def _receive_once(self) -> tuple[int, int]:
        """Read into the rest of the payload and the header behind it; return what was asked for and what came."""
        if self._frame is None:
            rest = self._header[self._num_header_bytes :]
            num_bytes = self._socket.recv_into(rest)
            self._num_header_bytes += num_bytes
            return len(rest), num_bytes
        rest = self._chunk[self._num_chunk_bytes :]
        num_bytes = self._socket.recvmsg_into((rest, self._header))[0]
        self._num_chunk_bytes += min(num_bytes, len(rest))
        self._num_header_bytes = max(num_bytes - len(rest), 0)
        return len(rest) + HEADER_BYTES, num_bytes

    def _begin_chunk(self) -> None:
        self._num_header_bytes = 0
        frame = decode_header(self._header, self._receiving)
        if frame.type not in DATA_TYPES or frame.connection_class != self.connection_class or self.has_ended:
            raise FrameError(
                f"frame type {frame.type} of class {frame.connection_class} on a connection of class "
                f"{self.connection_class}{' after its end' if self.has_ended else ''}"
            )
        self.overhead_bytes += HEADER_BYTES
        self._num_chunk_bytes = 0
        self._frame = frame
        if frame.type == FrameType.END:
            self._chunk = self._header[:0]
            self.has_ended = True
        else:
            chunk = self._receiver.begin_chunk(frame)
            self._chunk = self._waste(frame.chunk_bytes) if chunk is None else chunk
        if not frame.chunk_bytes:
            self._end_chunk(frame)

    def _end_chunk(self, frame: Frame) -> None:
        check_payload(frame, self._chunk, self._receiving)
        self._frame = None
        self._chunk = self._header[:0]
        if frame.type == FrameType.END:
            self._on_end()
            return
        self.received_bytes += frame.chunk_bytes
        if frame.offset + frame.chunk_bytes == frame.message_bytes:
            self.received_messages += 1
        self._receiver.end_chunk(frame)

    def _waste(self, num_bytes: int) -> memoryview:
        if self._scratch is None:
            self._scratch = memoryview(bytearray(MAX_CHUNK_BYTES))
        return self._scratch[:num_bytes]
