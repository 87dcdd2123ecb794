"""What ranks tell one another of who is lost: small messages to all, beside those of the buckets (loop thread only)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial

from syncline.runtime.port import Port
from syncline.updates.overlapped.messages import MessageKind, tag

URGENCY = -1
_NOTE = struct.Struct("<IB")

OnNote = Callable[[int, int, bool], None]
"""Reporter, who is lost, and whether it lives but was left behind."""


class LossNotes:
    """Sends and receives notes on a bucket's stream."""

    def __init__(self, port: Port, *, stream: int, on_note: OnNote) -> None:
        self._port = port
        self._stream = stream
        self._on_note = on_note
        self._num_told = 0

    def open(self) -> None:
        """Listen to all others."""
        for peer in range(self._port.world_size):
            if peer != self._port.rank:
                self._await(peer, 0)

    def tell(self, lost: int, *, is_left_behind: bool) -> None:
        """Tell all others, also the one that is lost: it may live."""
        number, self._num_told = self._num_told, self._num_told + 1
        for peer in range(self._port.world_size):
            if peer != self._port.rank:
                note = memoryview(bytearray(_NOTE.pack(lost, is_left_behind)))
                self._port.send(peer, self._tag(number), note, urgency=URGENCY)

    def _await(self, peer: int, number: int) -> None:
        note = memoryview(bytearray(_NOTE.size))
        heard = partial(self._heard, peer, number, note)
        self._port.receive(peer, self._tag(number), note, urgency=URGENCY, on_received=heard)

    def _heard(self, peer: int, number: int, note: memoryview) -> None:
        self._await(peer, number + 1)
        lost, is_left_behind = _NOTE.unpack(note)
        self._on_note(peer, lost, bool(is_left_behind))

    def _tag(self, number: int) -> int:
        return tag(self._stream, MessageKind.NOTE, number, epoch=0)
