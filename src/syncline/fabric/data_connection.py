"""A data connection to a peer: messages in chunks, the most urgent first, straight from and into their memory.

Sending: a heap of messages by (urgency, sequence) is looked at again for each chunk, so an urgent
message waits for no more than that. Receiving: a header, and then its payload straight into its destination. A chunk
that breaks off with its socket comes again, from its first byte, to the same destination.
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
    MAX_FLAGS,
    Frame,
    FrameError,
    FrameType,
    check_payload,
    decode_header,
    encode_header,
)
from syncline.fabric.options import MAX_CHUNK_BYTES, FabricOptions
from syncline.fabric.protocol import BULK, BULK_BYTES
from syncline.fabric.sockets import resent_segments
from syncline.fabric.tick import TickEnd

MAX_KEPT_BYTES = 64 << 20
"""What a connection keeps at most for a peer that does not acknowledge: more than kernels hold, at both ends."""


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
        on_acknowledge: Callable[[int, int], None] = lambda _class, _position: None,
        keys: FrameKeys | None = None,
    ) -> None:
        super().__init__(sock, tick_end, on_broken=on_broken, on_acknowledge=on_acknowledge, keys=keys)
        self.connection_class = connection_class
        self._chunk_bytes = chunk_bytes
        self._receiver = receiver
        self._on_message_sent = on_message_sent
        self._on_end = on_end
        self._heap: list[Outgoing] = []
        self._leaving: Outgoing | None = None
        self._wants_end = False
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._frame: Frame | None = None
        """Of the payload that is arriving; None while its header is."""
        self._chunk: memoryview | None = None
        """Where the whole of that payload goes; None: it is for nobody, or no longer."""
        self._interrupted: tuple[Frame, memoryview | None] | None = None
        """The frame that comes again, and where it goes."""
        self._target = self._header
        self._num_filled = 0
        self._scratch: memoryview | None = None
        self.sent_bytes = 0
        self.sent_messages = 0
        self._most_resent = 0
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
            self._tick_end.write_soon(self)

    def end(self) -> None:
        """Send END when everything else is sent."""
        self._wants_end = True
        self._tick_end.write_soon(self)

    def redirect(self, tag: int) -> None:
        """Let the rest of a chunk of ``tag`` that is arriving go to waste; its destination is not touched again."""
        if self._interrupted is not None and self._interrupted[0].tag == tag:
            self._interrupted = self._interrupted[0], None
        frame = self._frame
        if frame is None or frame.tag != tag:
            return
        self._chunk = None
        self._receiving.add(self._target[: self._num_filled])
        self._target = self._waste(len(self._target) - self._num_filled)
        self._num_filled = 0

    def _refill(self) -> bool:
        if self.stream.kept_bytes >= MAX_KEPT_BYTES:
            return False  # until the peer says that it has some of it
        if self._heap:
            self._fill_chunk(self._heap[0])
            return True
        if self._wants_end:
            self._wants_end = False
            self.stream.append(encode_header(FrameType.END, self.connection_class, checks=self._sending))
            return True
        return False

    def _fill_chunk(self, message: Outgoing) -> None:
        """Queue the next chunk of a message, or the whole of what is sent without asking: that is never divided."""
        room = max(self._chunk_bytes, BULK_BYTES) if message.urgency >= BULK else self._chunk_bytes
        stop = message.limit_bytes if message.is_eager else min(message.limit_bytes, message.sent_bytes + room)
        chunk = message.payload[message.sent_bytes : stop]
        self.stream.append(self._header_of(message, chunk))
        if chunk:
            self.stream.append(bytes(chunk))
        message.sent_bytes = stop
        self.sent_bytes += len(chunk)
        self.overhead_bytes += HEADER_BYTES
        if stop == message.limit_bytes:
            message.is_queued = False
            message.is_leaving = True
            self._leaving = heapq.heappop(self._heap)

    def _header_of(self, message: Outgoing, chunk: memoryview) -> bytes:
        return encode_header(
            FrameType.EAGER if message.is_eager else FrameType.DATA,
            self.connection_class,
            flags=0 if message.is_eager else self._num_resent(),
            tag=message.tag,
            signature=message.signature,
            message_bytes=message.num_bytes,
            offset=message.sent_bytes,
            payload=chunk,
            checks=self._sending,
        )

    def _num_resent(self) -> int:
        """Return how many segments this connection has lost since the last time; not those that came twice."""
        before, self._most_resent = self._most_resent, max(self._most_resent, resent_segments(self._socket))
        return min(MAX_FLAGS, self._most_resent - before)

    def _on_refill_sent(self) -> None:
        message, self._leaving = self._leaving, None
        if message is None:
            return
        message.is_leaving = False
        if message.is_queued:
            return  # more was granted while this chunk left, and that is still owed
        if message.sent_bytes == message.num_bytes:
            self.sent_messages += 1
        self._on_message_sent(message)

    def resume(self, sock: socket.socket, position: int) -> bool:
        """Go on with another socket, whose lost segments are counted anew."""
        self._most_resent = 0
        return super().resume(sock, position)

    def _interrupt(self) -> None:
        if self._frame is not None:
            self._interrupted = self._frame, self._chunk
        self._await_header()

    def _await_header(self) -> None:
        self._frame = self._chunk = None
        self._target = self._header
        self._num_filled = 0

    def _read(self) -> None:
        budget = BUDGET_BYTES
        while budget > 0 and not self.is_closed and not self.is_suspended:
            rest = self._target[self._num_filled :]
            num_bytes = self._socket.recv_into(rest)
            if not num_bytes:
                raise EOFError
            budget -= num_bytes
            self._num_filled += num_bytes
            if num_bytes < len(rest):
                return
            if self._frame is None:
                self._begin_chunk()
            else:
                self._end_chunk(self._frame)

    def _begin_chunk(self) -> None:
        frame = decode_header(self._header, self._receiving)
        if frame.type not in DATA_TYPES or frame.connection_class != self.connection_class or self.has_ended:
            raise FrameError(
                f"frame type {frame.type} of class {frame.connection_class} on a connection of class "
                f"{self.connection_class}{' after its end' if self.has_ended else ''}"
            )
        self.overhead_bytes += HEADER_BYTES
        self._num_filled = 0
        self._frame = frame
        if frame.type == FrameType.END:
            self._target = self._header[:0]
            self.has_ended = True
        else:
            self._chunk = self._destination(frame)
            self._target = self._waste(frame.chunk_bytes) if self._chunk is None else self._chunk
        if not frame.chunk_bytes:
            self._end_chunk(frame)

    def _destination(self, frame: Frame) -> memoryview | None:
        """Ask where a chunk goes, unless it comes again: then its receiver was asked before."""
        if self._interrupted is None:
            return self._receiver.begin_chunk(frame)
        before, chunk = self._interrupted
        if frame != before:
            raise FrameError(f"message {before.tag:#x} goes on with another frame than before its connection broke")
        self._interrupted = None
        return chunk

    def _end_chunk(self, frame: Frame) -> None:
        check_payload(frame, self._target, self._receiving)
        self._await_header()
        self.received_position += HEADER_BYTES + frame.chunk_bytes
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
