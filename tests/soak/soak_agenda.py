"""What is to be done to a job when, in the order of time."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable


class Agenda:
    """What is to be done when, in the order of time."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def add(self, at_s: float, what: Callable[[], None]) -> None:
        """Do ``what`` at a time of the machine's clock."""
        heapq.heappush(self._entries, (at_s, next(self._numbers), what))

    def run_due(self) -> float:
        """Do what is due; return for how many seconds nothing else is."""
        while self._entries and self._entries[0][0] <= time.monotonic():
            heapq.heappop(self._entries)[2]()
        return max(0.0, self._entries[0][0] - time.monotonic()) if self._entries else 3600.0

    def run_all(self) -> None:
        """Do all that is left now: what was broken is mended."""
        while self._entries:
            heapq.heappop(self._entries)[2]()
