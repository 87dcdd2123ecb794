"""What a connection sends: its frames, one after the other, kept until the peer has them.

A socket that broke has a successor, and what the peer has not got is sent again there: the same bytes, from the end of
the last frame that arrived whole. Positions count the bytes of the stream, so they are the sequence number of each
frame, though no frame carries one. Payload is copied when it is first sent: whoever sends it may change it before the
peer has it, and a send that waited for the peer would cost each step a round trip.
"""

from __future__ import annotations

from collections import deque


class SendStream:
    """Positions: ``[start, sent)`` is with the kernel and not acknowledged, ``[sent, end)`` is to be sent.

    >>> stream = SendStream()
    >>> stream.append(b"first"), stream.append(b"second")
    (None, None)
    >>> stream.drop_sent(8); stream.unsent
    [<memory at 0x...>]
    >>> stream.rewind(5), bytes(stream.unsent[0]), stream.resent_bytes
    (True, b'second', 3)
    """

    def __init__(self) -> None:
        self._kept: deque[bytes] = deque()
        self._first = 0
        """Position of the first byte of what is kept, at or before ``start``."""
        self._start = self._sent = self._end = 0
        self.unsent: list[bytes | memoryview] = []
        self.resent_bytes = 0
        """How much was sent more than once."""

    def __repr__(self) -> str:
        return f"<SendStream: {self.kept_bytes} bytes are kept, {self._end - self._sent} to be sent>"

    @property
    def kept_bytes(self) -> int:
        """How much is sent, or to be sent, and not acknowledged."""
        return self._end - self._start

    def append(self, part: bytes) -> None:
        """Send ``part``, which ends with a frame or is followed by the rest of it."""
        self._kept.append(part)
        self.unsent.append(part)
        self._end += len(part)

    def drop_sent(self, num_bytes: int) -> None:
        """Take note that the kernel took the first bytes of what is unsent."""
        self._sent += num_bytes
        self.unsent = _without_first(self.unsent, num_bytes)

    def acknowledge(self, position: int) -> bool:
        """Forget everything before ``position``, which the peer has; False if that was never sent."""
        if position > self._sent:
            return False
        self._start = max(self._start, position)
        while self._kept and self._first + len(self._kept[0]) <= self._start:
            self._first += len(self._kept.popleft())
        return True

    def rewind(self, position: int) -> bool:
        """Send everything from ``position`` on, of which the peer has nothing; False if that is not here."""
        if not self._start <= position <= self._sent:
            return False
        self.resent_bytes += self._sent - position
        self._sent = position
        self.acknowledge(position)
        self.unsent = _without_first(list(self._kept), position - self._first)
        return True

    def clear(self) -> None:
        """Keep nothing any more."""
        self._kept.clear()
        self.unsent = []
        self._first = self._start = self._sent = self._end


def _without_first(parts: list[bytes | memoryview], num_bytes: int) -> list[bytes | memoryview]:
    """Return the parts without their first bytes; one that loses some becomes a view of its rest."""
    for place, part in enumerate(parts):
        if num_bytes < len(part):
            rest = parts[place:]
            if num_bytes:
                rest[0] = memoryview(part)[num_bytes:]
            return rest
        num_bytes -= len(part)
    return []
