"""A call under way on this rank: which slices run, what is still missing, and which begins next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from syncline.runtime.call import CollectiveCall, Description
from syncline.runtime.clock import Clock, Timer
from syncline.runtime.slicerun import SliceRun
from syncline.runtime.tags import first_tag

Done = Callable[[BaseException | None], None]

PATIENCE_S = 0.020


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
    runs: set[SliceRun] = field(default_factory=set)
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
    """Which call's next slice begins: the most urgent call's that has any left, if there is room for it.

    A call has room while the slices under way of calls that are as urgent or more make up less than
    ``max_inflight_bytes``, and all together less than twice that: what is less urgent was begun before it was there and
    cannot be called back, but is overtaken on the wire. What is under way in a less urgent connection class does not
    count at all. So the bound holds for each class by itself, and of many calls that are made at once the less urgent
    ones do not occupy processors and links before their turn.

    That alone could make ranks wait for each other forever: they may make calls of different streams in different
    orders, and if all that one rank has room for is a call that another has no room for, and the other way round, no
    slice ends any more. So when there was no progress for ``patience_s`` (no message has arrived, no slice has ended),
    each call without a slice under way begins one. Then nothing can stand still for good:

    - Let call c, made on all ranks, have slices left, and let s be the first of them that is unfinished on any rank. On
      each rank all slices of c before s have ended, and slices of a call begin in order; so s has ended there, or it is
      under way, or no slice of c is under way.
    - While nothing moves anywhere, every rank runs out of patience, and begins s where no slice of c is under way.
    - Then s is under way or ended on all ranks, so all its messages have a sender and a receiver, and it moves.

    ``look_again`` is called when patience may be over.
    """

    def __init__(
        self,
        max_inflight_bytes: int,
        clock: Clock,
        look_again: Callable[[], None],
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._max_inflight_bytes = max_inflight_bytes
        self._clock = clock
        self._look_again = look_again
        self._patience_s = patience_s
        self._timer: Timer | None = None
        self._queue: list[tuple[int, int, ActiveCall]] = []
        self._without: dict[ActiveCall, None] = {}
        """Calls with slices left and none under way."""
        self._inflight_bytes: dict[tuple[int, int], int] = {}
        """By connection class and urgency."""
        self._progress_s = clock.time()

    @property
    def inflight_bytes(self) -> int:
        """Bytes of the slices under way, of all classes."""
        return sum(self._inflight_bytes.values())

    def add(self, active: ActiveCall) -> None:
        """Take a call of which no slice has begun."""
        if active.has_more:
            self._without[active] = None
            heapq.heappush(self._queue, (active.call.urgency, active.order, active))

    def progressed(self) -> None:
        """Note that something has moved."""
        self._progress_s = self._clock.time()

    def began(self, active: ActiveCall, run: SliceRun) -> None:
        """Count a slice that begins."""
        self._without.pop(active, None)
        kind = (active.call.connection_class, active.call.urgency)
        self._inflight_bytes[kind] = self._inflight_bytes.get(kind, 0) + run.num_bytes

    def ended(self, active: ActiveCall, run: SliceRun) -> None:
        """Count a slice that ended."""
        kind = (active.call.connection_class, active.call.urgency)
        self._inflight_bytes[kind] -= run.num_bytes
        if not self._inflight_bytes[kind]:
            del self._inflight_bytes[kind]
        if active.has_more and not active.runs:
            self._without[active] = None
        self.progressed()

    @property
    def has_more(self) -> bool:
        """Whether some call may have slices that were not begun."""
        while self._queue and not self._queue[0][2].has_more:
            heapq.heappop(self._queue)
        return bool(self._queue)

    def next(self) -> ActiveCall | None:
        """Return the call of which a slice may begin now; None if there is none."""
        if not self.has_more:
            return None
        active = self._queue[0][2]
        if self._has_room(active.call):
            self.progressed()
            return active
        if not self._without:
            return None
        if self._clock.time() - self._progress_s >= self._patience_s:
            return next(iter(self._without))
        if self._timer is None:
            self._timer = self._clock.call_later(self._patience_s, self._on_timer)
        return None

    def _on_timer(self) -> None:
        self._timer = None
        self._look_again()

    def _has_room(self, call: CollectiveCall) -> bool:
        ahead = total = 0
        for (connection_class, urgency), num_bytes in self._inflight_bytes.items():
            if connection_class <= call.connection_class:
                total += num_bytes
                ahead += num_bytes if urgency <= call.urgency else 0
        return ahead < self._max_inflight_bytes and total < 2 * self._max_inflight_bytes
