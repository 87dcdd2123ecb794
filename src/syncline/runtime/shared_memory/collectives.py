"""One rank's collectives in shared memory: which calls are made there, in what order, and what is counted."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from syncline.errors import FabricClosedError
from syncline.fabric import PeerStalls
from syncline.observe import NullTrace, Trace
from syncline.runtime.call import Call, CollectiveCall, trace_call
from syncline.runtime.shared_memory.barrier import Outcome, meet, missing
from syncline.runtime.shared_memory.operation import Operation, Part, Parts
from syncline.runtime.shared_memory.segment import Segment
from syncline.runtime.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLinks:
    """What the collectives need from around it; all may be called from any thread."""

    start: Callable[[Call, Work, int], None]
    """Hand a call to the engine, after what it was handed before; so many were made here since."""
    has_failed: Callable[[], bool]
    late: Callable[[Call, Sequence[int], Sequence[int], float], None]
    """End all calls, here and on the other ranks: some have not come to a call in so many seconds."""
    crash: Callable[[Exception], None]
    stalls: PeerStalls
    """Which ranks do not train, though they live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PutUp:
    """A call that this rank has put up, and in which it has not met the others yet."""

    number: int
    call: CollectiveCall
    work: Work
    part: Part
    start_ns: int
    start_s: float


class SharedMemoryCollectives:
    """Takes the calls of one stream; a small one that its caller waits for is made in shared memory if all agree.

    Calls are made in the order in which they come. While a thread meets the others, those of other threads, which never
    wait here, are put off until it is done; so every rank numbers the calls of a program alike. A call that is handed
    to the engine has its whole deadline there.

    With ``is_for_all`` small calls that nobody waits for yet are put up as well; the thread that waits for one later,
    or asks whether it is done, meets the others in it (:meth:`make`).
    """

    def __init__(
        self, segment: Segment, links: EngineLinks, *, trace: Trace | NullTrace, is_for_all: bool = False
    ) -> None:
        self._segment = segment
        self._links = links
        self._trace = trace
        self._is_for_all = is_for_all
        self._others = [rank for rank in range(segment.world_size) if rank != segment.rank]
        self._parts = Parts(segment.rank, payload_bytes=segment.payload_bytes)
        self._lock = threading.Lock()
        """Held for moments: while calls are numbered, put up, and handed over in the order of their numbers."""
        self._turn = threading.Lock()
        """Held by the thread that meets the others."""
        self._number = 0
        self._num_skipped = 0
        """Calls made here since the last one that was handed over."""
        self._meeting: _PutUp | None = None
        self._put_off: list[tuple[Call, Work]] = []
        self._has_lost = False
        self.num_calls: dict[str, int] = {}
        self.call_bytes: dict[str, int] = {}
        self._sent_bytes = dict.fromkeys(self._others, 0)
        self._received_bytes = dict.fromkeys(self._others, 0)

    def __repr__(self) -> str:
        return f"<SharedMemoryCollectives at {self._segment!r}: {sum(self.num_calls.values())} calls>"

    def on_lost(self, _peer: int, _error: Exception) -> None:
        """Take note that some rank is lost, or has left, or that this one is closing."""
        self._has_lost = True

    def traffic(self) -> Mapping[int, tuple[int, int, int]]:
        """Return for each other rank the number of calls, the bytes that it read here, and those read of its."""
        num_calls = sum(self.num_calls.values())
        return {rank: (num_calls, self._sent_bytes[rank], self._received_bytes[rank]) for rank in self._others}

    def submit(self, call: Call, work: Work, *, is_awaited: bool) -> None:
        """Make ``call`` here if it is small, its caller waits for it and all ranks agree, else with the engine."""
        is_wanted = is_awaited or self._is_for_all
        part = self._parts.of(call) if is_wanted and isinstance(call, CollectiveCall) else None
        with self._lock:
            if self._meeting is not None:
                work.make_by_waiting(self.make if self._is_for_all else None)
                self._put_off.append((call, work))
                return
            if not self._begin(call, work, part):
                return
        if is_awaited:
            with work.waiting():
                self.make(work, math.inf)

    def make(self, work: Work, limit_s: float) -> None:
        """Meet the others in the call that is put up, on a thread that waits for ``work``, for at most ``limit_s``.

        That call, or one that was put off behind it, is ``work``'s; when this returns earlier, the engine has it.
        """
        if not self._turn.acquire(timeout=min(max(limit_s, 0.0), threading.TIMEOUT_MAX)):
            return
        try:
            if self._meeting is not None and work.is_made_by_waiting:
                self._meet(self._meeting, limit_s)
        finally:
            self._turn.release()

    def _begin(self, call: Call, work: Work, part: Part | None) -> bool:
        """Give a call its number; put it up here and return True, or hand it to the engine, and tell the others."""
        self._number += 1
        if part is None or self._is_troubled() or not self._segment.is_free(self._number):
            self._segment.pass_by(self._number)
            self._hand_over(call, work)
            return False
        assert isinstance(call, CollectiveCall), "no other call has a part"
        start_ns, start_s = self._trace.now_ns(), time.monotonic()
        part.operation.put(call, self._segment.payload(self._segment.rank, self._number))
        self._segment.put_up(self._number, part.signature)
        call.place_own_part(self._segment.rank)  # the others need not wait for that
        self._meeting = _PutUp(number=self._number, call=call, work=work, part=part, start_ns=start_ns, start_s=start_s)
        work.make_by_waiting(self.make)
        self._num_skipped += 1
        return True

    def _meet(self, meeting: _PutUp, limit_s: float) -> None:
        number, call, stalls = meeting.number, meeting.call, self._links.stalls
        outcome, is_made = None, False
        try:
            outcome = meet(
                self._segment,
                self._others,
                number,
                meeting.part.signature,
                deadline_s=meeting.start_s + call.timeout_s,
                now_s=time.monotonic,
                is_troubled=self._is_troubled,
                is_stalled=lambda rank: rank in stalls.stalled and time.monotonic() - meeting.start_s >= stalls.limit_s,
                until_s=time.monotonic() + limit_s,
            )
            is_made = outcome is Outcome.MET and self._take(number, call, meeting.part.operation)
            if outcome is Outcome.LATE:
                absent = missing(self._segment, self._others, number)
                present = [rank for rank in range(self._segment.world_size) if rank not in absent]
                self._links.late(call, absent, present, time.monotonic() - meeting.start_s)
        finally:
            if outcome is not Outcome.UNDER_WAY:
                self._segment.finish(number)
                self._end_meeting(meeting, is_made=is_made)
        if is_made:
            self._count(call, meeting.part.operation)
            trace_call(self._trace, call, meeting.start_ns)
            meeting.work.end(None)

    def _take(self, number: int, call: CollectiveCall, operation: Operation) -> bool:
        """Make the result; after a fault of ours the engine, which then ends all calls, tells why."""
        try:
            operation.take(call.buffer, lambda rank: self._segment.payload(rank, number), call.reduction)
        except Exception as error:
            self._links.crash(error)
            return False
        return True

    def _hand_over(self, call: Call, work: Work) -> None:
        """Let the engine make a call; with the lock held, so that it has them in the order of their numbers."""
        call.place_own_part(self._segment.rank)
        num_skipped, self._num_skipped = self._num_skipped, 0
        work.make_by_waiting(None)
        try:
            self._links.start(call, work, num_skipped)
        except FabricClosedError as error:  # which whoever waits is told, be it this thread or another
            work.end(error)

    def _end_meeting(self, meeting: _PutUp, *, is_made: bool) -> None:
        """Hand over the call if it was not made here, and what was put off, before any call that comes now."""
        with self._lock:
            self._meeting = None
            if not is_made:
                self._num_skipped -= 1
                self._hand_over(meeting.call, meeting.work)
            put_off, self._put_off = self._put_off, []
            for call, work in put_off:
                self._begin(call, work, None)

    def _is_troubled(self) -> bool:
        return self._has_lost or self._links.has_failed()

    def _count(self, call: CollectiveCall, operation: Operation) -> None:
        kind = call.schedule.collective.value
        self.num_calls[kind] = self.num_calls.get(kind, 0) + 1
        self.call_bytes[kind] = self.call_bytes.get(kind, 0) + call.buffer.nbytes
        for rank in self._others:
            self._sent_bytes[rank] += operation.sent_bytes[rank]
            self._received_bytes[rank] += operation.received_bytes(rank)
