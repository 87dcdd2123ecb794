"""Which call's next slice begins, and whether it may: the bound on what is under way at once."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection
from typing import Generic, Protocol, TypeVar


class Sliced(Protocol):
    """A call that is cut into slices, as far as their order needs it."""

    urgency: int
    connection_class: int
    number: int
    """Running number of all calls of this rank, as it made them."""
    largest_slice_bytes: int
    """Of those that were begun."""

    @property
    def has_more(self) -> bool:
        """Whether there are slices that were not begun."""

    @property
    def runs(self) -> Collection[object]:
        """The slices under way."""


Call = TypeVar("Call", bound=Sliced)


class SliceOrder(Generic[Call]):
    """Which call's next slice begins: the most urgent call's, while there is room for it.

    There is room while the slices under way of calls that are as urgent or more make up less than
    ``max_inflight_bytes``. What is less urgent was begun before the call was there; it cannot be called back, but it is
    overtaken on the wire. A call that waited for it would go slice by slice, each alone on links that others fill. Not
    to let temporaries grow with each call that is more urgent than the last, all together make up less than twice the
    bound, one slice of each less urgent call left out. In a less urgent connection class nothing counts.

    Every call has at least one slice under way, whatever the bound says. Ranks may make calls of different streams in
    different orders; if the window of one rank were full of a call that another has no room for, and the other way
    round, both would wait forever.
    """

    def __init__(self, max_inflight_bytes: int) -> None:
        self._max_inflight_bytes = max_inflight_bytes
        self._starved: deque[Call] = deque()
        self._queue: list[tuple[int, int, Call]] = []
        self._inflight_bytes: dict[Call, int] = {}

    @property
    def inflight_bytes(self) -> int:
        """Bytes of the slices under way, of all classes."""
        return sum(self._inflight_bytes.values())

    def add(self, call: Call) -> None:
        """Take a call of which no slice has begun."""
        if call.has_more:
            self._starved.append(call)
            heapq.heappush(self._queue, (call.urgency, call.number, call))

    def began(self, call: Call, num_bytes: int) -> None:
        """Count a slice that begins."""
        self._inflight_bytes[call] = self._inflight_bytes.get(call, 0) + num_bytes
        call.largest_slice_bytes = max(call.largest_slice_bytes, num_bytes)

    def ended(self, call: Call, num_bytes: int) -> None:
        """Count a slice that ended."""
        self._inflight_bytes[call] -= num_bytes
        if not call.runs:
            del self._inflight_bytes[call]
            if call.has_more:
                self._starved.append(call)

    @property
    def has_more(self) -> bool:
        """Whether some call may have slices that were not begun."""
        while self._queue and not self._queue[0][2].has_more:
            heapq.heappop(self._queue)
        return bool(self._queue or self._starved)

    def next(self) -> Call | None:
        """Return the call of which a slice may begin now; None if there is none."""
        while self._starved:
            call = self._starved.popleft()
            if call.has_more and not call.runs:
                return call
        if self.has_more and self._queue:
            call = self._queue[0][2]
            if self._has_room(call):
                return call
        return None

    def _has_room(self, call: Call) -> bool:
        ahead = beside = 0
        for other, num_bytes in self._inflight_bytes.items():
            if other.connection_class > call.connection_class:
                continue
            if other.urgency <= call.urgency:
                ahead += num_bytes
            else:
                beside += max(num_bytes - other.largest_slice_bytes, 0)
        return ahead < self._max_inflight_bytes and ahead + beside < 2 * self._max_inflight_bytes
