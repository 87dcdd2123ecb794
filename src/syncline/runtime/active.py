"""A call under way on this rank: which slices run, what is still missing, and which begins next."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from syncline.runtime.call import CollectiveCall, Description
from syncline.runtime.clock import Timer
from syncline.runtime.slices import Run
from syncline.runtime.tags import first_tag

Done = Callable[[BaseException | None], None]


@dataclass(slots=True, kw_only=True, eq=False)
class ActiveCall:
    """What the engine knows of one call. ``number`` is its running number in its stream."""

    call: CollectiveCall
    number: int
    order: int
    """Running number over all streams, as this rank made its calls."""
    peers: frozenset[int]
    """All ranks that this one exchanges messages with."""
    description: Description
    on_done: Done
    started_s: float
    started_ns: int
    num_slices: int
    signature: int
    is_agreed: bool
    """Whether the rank before is known to have made the same call."""
    next_slice: int = 0
    largest_slice_bytes: int = 0
    """Of those that were begun."""
    runs: set[Run] = field(default_factory=set)
    timer: Timer | None = None
    awaited: dict[int, frozenset[int]] = field(default_factory=dict)
    """For each rank that said so, whom it waits for."""

    @property
    def has_more(self) -> bool:
        """Whether there are slices that were not begun."""
        return self.next_slice < self.num_slices

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do or to learn."""
        return self.is_agreed and not self.runs and not self.has_more

    def next_tag(self) -> int:
        """Return the first tag of the slice that begins next."""
        return first_tag(self.call.stream, self.number, self.next_slice)

    def needs(self, peer: int, predecessor: int) -> bool:
        """Whether anything is still to be exchanged with ``peer``."""
        if peer == predecessor and not self.is_agreed:
            return True
        if self.has_more and peer in self.peers:
            return True
        return any(peer in run.open_peers() for run in self.runs)

    def awaited_peers(self, predecessor: int) -> frozenset[int]:
        """Return who has not delivered: data, or else the memory of what was sent, or else the agreement."""
        peers = {peer for run in self.runs for peer in run.awaited_peers()}
        if not peers:
            peers = {peer for run in self.runs for peer in run.open_peers()} - {-1}
        if not self.is_agreed:
            peers.add(predecessor)
        return frozenset(peers)

    def stop(self) -> None:
        """Withdraw every slice, so that nothing is written to the buffer any more."""
        if self.timer is not None:
            self.timer.cancel()
        for run in self.runs:
            run.stop()
        self.runs.clear()
        self.next_slice = self.num_slices


class SliceOrder:
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
        self._starved: deque[ActiveCall] = deque()
        self._queue: list[tuple[int, int, ActiveCall]] = []
        self._inflight_bytes: dict[ActiveCall, int] = {}

    @property
    def inflight_bytes(self) -> int:
        """Bytes of the slices under way, of all classes."""
        return sum(self._inflight_bytes.values())

    def add(self, active: ActiveCall) -> None:
        """Take a call of which no slice has begun."""
        if active.has_more:
            self._starved.append(active)
            heapq.heappush(self._queue, (active.call.urgency, active.order, active))

    def began(self, active: ActiveCall, run: Run) -> None:
        """Count a slice that begins."""
        self._inflight_bytes[active] = self._inflight_bytes.get(active, 0) + run.num_bytes
        active.largest_slice_bytes = max(active.largest_slice_bytes, run.num_bytes)

    def ended(self, active: ActiveCall, run: Run) -> None:
        """Count a slice that ended."""
        self._inflight_bytes[active] -= run.num_bytes
        if not active.runs:
            del self._inflight_bytes[active]
            if active.has_more:
                self._starved.append(active)

    @property
    def has_more(self) -> bool:
        """Whether some call may have slices that were not begun."""
        while self._queue and not self._queue[0][2].has_more:
            heapq.heappop(self._queue)
        return bool(self._queue or self._starved)

    def next(self) -> ActiveCall | None:
        """Return the call of which a slice may begin now; None if there is none."""
        while self._starved:
            active = self._starved.popleft()
            if active.has_more and not active.runs:
                return active
        if self.has_more and self._queue:
            active = self._queue[0][2]
            if self._has_room(active.call):
                return active
        return None

    def _has_room(self, call: CollectiveCall) -> bool:
        ahead = beside = 0
        for active, num_bytes in self._inflight_bytes.items():
            if active.call.connection_class > call.connection_class:
                continue
            if active.call.urgency <= call.urgency:
                ahead += num_bytes
            else:
                beside += max(num_bytes - active.largest_slice_bytes, 0)
        return ahead < self._max_inflight_bytes and ahead + beside < 2 * self._max_inflight_bytes
