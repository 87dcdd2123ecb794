"""Fetching messages out of the memory of ranks on the same machine, the most urgent first.

The work of one iteration of the loop is bounded, so that connections and timers have their turn in between.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

from syncline.fabric.callbacks import call_back

STEP_BYTES = 1 << 20
"""What is copied before the loop has its turn: about 0.1 ms."""


class Fetcher:
    """A queue of copies, ordered by (urgency, arrival) over all peers.

    A *step* copies at most a number of bytes that it is told and returns how many remain.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: list[tuple[int, int, Callable[[int], int]]] = []
        self._order = 0
        self._is_scheduled = False

    def __repr__(self) -> str:
        return f"<Fetcher: {len(self._queue)} messages>"

    def add(self, urgency: int, step: Callable[[int], int]) -> None:
        """Copy soon, after what is more urgent."""
        self._order += 1
        heapq.heappush(self._queue, (urgency, self._order, step))
        self._schedule()

    def close(self) -> None:
        """Forget what is queued."""
        self._queue.clear()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._is_scheduled = False
        if not self._queue:
            return
        urgency, order, step = heapq.heappop(self._queue)
        call_back(lambda: self._step(urgency, order, step))
        if self._queue:
            self._schedule()

    def _step(self, urgency: int, order: int, step: Callable[[int], int]) -> None:
        if step(STEP_BYTES):
            heapq.heappush(self._queue, (urgency, order, step))
