"""The control connection to a peer: small frames, ahead of all data.

Requests, grants, credit, heartbeats and the control messages of the layer above. Whatever is queued within one turn of
the loop leaves in one ``sendmsg``.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from syncline.fabric.connection import Connection
from syncline.fabric.frame_checks import FrameKeys
from syncline.fabric.frames import (
    CONTROL_CLASS,
    DATA_TYPES,
    HEADER_BYTES,
    Frame,
    FrameError,
    FrameType,
    check_payload,
    decode_header,
    encode_header,
)
from syncline.fabric.protocol import MAX_CONTROL_BYTES
from syncline.fabric.tick import TickEnd

INBOX_BYTES = 128 << 10
"""Room for what arrives at once; no frame is larger."""
MAX_FRAMES_AT_ONCE = 512
"""Buffers in one ``sendmsg`` (the kernel allows 1024)."""


class ControlConnection(Connection):
    """Sends and receives control frames; ``on_frame`` takes each that arrives, with its payload."""

    acknowledged_bytes = 16 << 10
    beat_bytes = 4 << 10  # or each acknowledgement would be answered by another

    def __init__(
        self,
        sock: socket.socket,
        tick_end: TickEnd,
        *,
        on_frame: Callable[[Frame, bytes], None],
        on_broken: Callable[[Exception], None],
        on_acknowledge: Callable[[int, int], None] = lambda _class, _position: None,
        keys: FrameKeys | None = None,
    ) -> None:
        super().__init__(sock, tick_end, on_broken=on_broken, on_acknowledge=on_acknowledge, keys=keys)
        self._on_frame = on_frame
        self._queue: list[bytes] = []
        self._inbox = memoryview(bytearray(INBOX_BYTES))
        self._num_inbox_bytes = 0

    def send(
        self,
        kind: FrameType,
        *,
        tag: int = 0,
        signature: int = 0,
        message_bytes: int = 0,
        offset: int = 0,
        payload: bytes = b"",
    ) -> None:
        """Queue a frame; it leaves when this tick of the loop, or the next, ends."""
        if self.is_closed:
            return
        header = encode_header(
            kind,
            CONTROL_CLASS,
            tag=tag,
            signature=signature,
            message_bytes=message_bytes,
            offset=offset,
            payload=payload,
            checks=self._sending,
        )
        self._queue.append(header)
        if payload:
            self._queue.append(payload)
        self._tick_end.write_soon(self)

    def _refill(self) -> bool:
        if not self._queue:
            return False
        for part in self._queue[:MAX_FRAMES_AT_ONCE]:
            self.stream.append(part)
            self.overhead_bytes += len(part)
        del self._queue[:MAX_FRAMES_AT_ONCE]
        return True

    def _on_refill_sent(self) -> None:
        pass

    def _interrupt(self) -> None:
        self._num_inbox_bytes = 0

    def _read(self) -> None:
        num_bytes = self._socket.recv_into(self._inbox[self._num_inbox_bytes :])
        if not num_bytes:
            raise EOFError
        self.overhead_bytes += num_bytes
        self._num_inbox_bytes += num_bytes
        self._take_frames()

    def _take_frames(self) -> None:
        """Handle every whole frame that is here and keep the rest, a part of one frame, for later."""
        inbox, start, stop = self._inbox, 0, self._num_inbox_bytes
        while stop - start >= HEADER_BYTES:
            frame = decode_header(inbox[start : start + HEADER_BYTES], self._receiving)
            if (frame.type in DATA_TYPES and frame.type != FrameType.END) or frame.connection_class != CONTROL_CLASS:
                raise FrameError(f"frame type {frame.type} of class {frame.connection_class} on the control connection")
            if frame.chunk_bytes > MAX_CONTROL_BYTES:
                raise FrameError(f"control frame of {frame.chunk_bytes} bytes; {MAX_CONTROL_BYTES} are allowed")
            end = start + HEADER_BYTES + frame.chunk_bytes
            if end > stop:
                break
            payload = bytes(inbox[start + HEADER_BYTES : end])
            check_payload(frame, payload, self._receiving)
            start = end
            if frame.type != FrameType.HEARTBEAT or not frame.signature:
                self.received_position += HEADER_BYTES + frame.chunk_bytes
            self._on_frame(frame, payload)
            if self.is_closed:
                return
        inbox[: stop - start] = inbox[start:stop]
        self._num_inbox_bytes = stop - start
