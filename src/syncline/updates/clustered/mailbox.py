"""Messages of the protocol on the fabric: a head of fixed size, the rest of a long text, and the payload.

Each pair of ranks has its own running number, and a message is delivered when all of it is there, in the order in which
its sender sent it. A payload lands in memory of its own, so a message that is refused spoils nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

from syncline.runtime.port import BULK_CLASS, Port
from syncline.runtime.tags import NUMBER_MASK, first_tag
from syncline.updates.clustered.messages import Agreed, Contribution, Envelope
from syncline.updates.clustered.vector import Vector, VectorShape

HEAD_BYTES = 1024
MAX_TEXT_BYTES = 1 << 20
_LENGTHS = struct.Struct("<IB")
HEAD, REST, PAYLOAD = range(3)
HEAD_URGENCY = -1
PAYLOAD_URGENCY = 0


@dataclass(slots=True)
class _Inbox:
    """What comes from one peer."""

    peer: int
    number: int = 0
    text: bytes = b""


class Mailbox:
    """Sends and receives envelopes. On the loop's thread alone."""

    def __init__(
        self,
        port: Port,
        *,
        stream: int,
        shape: VectorShape,
        on_message: Callable[[int, Envelope], None],
        on_nonsense: Callable[[int, str], None],
    ) -> None:
        self._port = port
        self._stream = stream
        self._shape = shape
        self._on_message = on_message
        self._on_nonsense = on_nonsense
        self._next = dict.fromkeys(range(port.world_size), 0)
        self.sent_bytes = dict.fromkeys(range(port.world_size), 0)

    def open(self) -> None:
        """Begin to receive from everyone."""
        for peer in range(self._port.world_size):
            if peer != self._port.rank:
                self._await_head(_Inbox(peer))

    @property
    def num_sent_bytes(self) -> int:
        """Bytes that were sent to anyone."""
        return sum(self.sent_bytes.values())

    def send(self, peer: int, envelope: Envelope) -> int:
        """Send a message, and return its bytes; its payload must not change any more."""
        text = envelope.encode()
        payload: Vector | None = getattr(envelope.message, "payload", None)
        number = self._next[peer]
        self._next[peer] = number + 1
        head = bytearray(HEAD_BYTES)
        num_vectors = 0 if payload is None else payload.shape.num_bytes // self._shape.num_bytes
        _LENGTHS.pack_into(head, 0, len(text), num_vectors)
        room = HEAD_BYTES - _LENGTHS.size
        head[_LENGTHS.size : _LENGTHS.size + min(len(text), room)] = text[:room]
        self._port.send(peer, self._tag(number, HEAD), memoryview(head), urgency=HEAD_URGENCY)
        if len(text) > room:
            rest = memoryview(bytearray(text[room:]))
            self._port.send(peer, self._tag(number, REST), rest, urgency=HEAD_URGENCY)
        if payload is not None:
            self._port.send(
                peer, self._tag(number, PAYLOAD), payload.memory, urgency=PAYLOAD_URGENCY, connection_class=BULK_CLASS
            )
        num_bytes = HEAD_BYTES + max(0, len(text) - room) + (payload.shape.num_bytes if payload else 0)
        self.sent_bytes[peer] += num_bytes
        return num_bytes

    def _await_head(self, inbox: _Inbox) -> None:
        head = memoryview(bytearray(HEAD_BYTES))

        def received() -> None:
            num_bytes, num_vectors = _LENGTHS.unpack_from(head)
            inbox.text = bytes(head[_LENGTHS.size : _LENGTHS.size + num_bytes])
            missing = num_bytes - len(inbox.text)
            if num_bytes > MAX_TEXT_BYTES:
                self._on_nonsense(inbox.peer, f"a text of {num_bytes} bytes")
            elif missing > 0:
                self._await_rest(inbox, missing, num_vectors=num_vectors)
            else:
                self._await_payload(inbox, num_vectors=num_vectors)

        self._receive(inbox, HEAD, head, received)

    def _await_rest(self, inbox: _Inbox, num_bytes: int, *, num_vectors: int) -> None:
        rest = memoryview(bytearray(num_bytes))

        def received() -> None:
            inbox.text += bytes(rest)
            self._await_payload(inbox, num_vectors=num_vectors)

        self._receive(inbox, REST, rest, received)

    def _await_payload(self, inbox: _Inbox, *, num_vectors: int) -> None:
        if not num_vectors:
            self._deliver(inbox, None)
            return
        vector = self._shape.times(num_vectors).empty()
        self._receive(inbox, PAYLOAD, vector.memory, lambda: self._deliver(inbox, vector))

    def _deliver(self, inbox: _Inbox, payload: Vector | None) -> None:
        try:
            envelope = Envelope.decode(inbox.text)
        except ValueError as error:
            self._on_nonsense(inbox.peer, str(error))
            return
        if payload is not None and isinstance(envelope.message, Contribution | Agreed):
            envelope = replace(envelope, message=replace(envelope.message, payload=payload))
        inbox.number += 1
        self._await_head(inbox)
        self._on_message(inbox.peer, envelope)

    def _receive(self, inbox: _Inbox, lane: int, destination: memoryview, received: Callable[[], None]) -> None:
        urgency = PAYLOAD_URGENCY if lane == PAYLOAD else HEAD_URGENCY
        tag = self._tag(inbox.number, lane)
        self._port.receive(inbox.peer, tag, destination, urgency=urgency, on_received=received)

    def _tag(self, number: int, lane: int) -> int:
        return first_tag(self._stream, number & NUMBER_MASK, lane)
