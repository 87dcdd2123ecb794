"""A buffer pool: the memory of stages, allocated once and used in turn, and a ledger of how much of it is in use."""

from __future__ import annotations

import threading

import torch


class Ledger:
    """Counts live bytes and their peak; from any thread."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count bytes that are in use from now on; negative ones no more."""
        with self._lock:
            self.live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class BufferPool:
    """At most ``num_buffers`` pieces of memory of ``num_bytes`` each; any thread may take one that is known to be free.

    Fresh pages cost more than a copy into them, so buffers are kept.
    """

    def __init__(self, *, num_buffers: int, num_bytes: int) -> None:
        self.num_buffers, self.num_bytes = num_buffers, num_bytes
        self.ledger = Ledger()
        self._free: list[torch.Tensor] = []
        self._num_made = 0
        self._lock = threading.Lock()
        self._taken: dict[int, int] = {}

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return a room (bytes), of which ``num_bytes`` are used."""
        assert num_bytes <= self.num_bytes, "buffers are as large as the largest stage"
        with self._lock:
            if not self._free:
                assert self._num_made < self.num_buffers, "stages are dropped before others get their buffers"
                self._num_made += 1
                self._free.append(torch.empty(self.num_bytes, dtype=torch.uint8))
            room = self._free.pop()
            self._taken[id(room)] = num_bytes
            self.ledger.add(num_bytes)
            return room

    def give_back(self, room: torch.Tensor) -> None:
        """Take a room back; nobody reads it any more."""
        with self._lock:
            self.ledger.add(-self._taken.pop(id(room)))
            self._free.append(room)
