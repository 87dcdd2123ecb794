"""One rank's collectives in shared memory: which calls are made there, in what order, and what is counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from syncline.fabric import PeerStalls
from syncline.observe import NullTrace, Trace
from syncline.runtime import failures
from syncline.runtime.call import Call, CollectiveCall, trace_call
from syncline.runtime.control import Failure
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
    give_up: Callable[[Failure], None]
    """End all calls, here and on the other ranks."""
    crash: Callable[[Exception], None]
    describe_rank: Callable[[int], str]
    host_of: Callable[[int], str]
    stalls: PeerStalls
    """Which ranks do not train, though they live."""
    members: Sequence[int]
    """The job's numbers of the ranks."""


class SharedMemoryCollectives:
    """Takes the user's calls; a small one that its caller waits for is made in shared memory if all agree.

    Calls are made in the order in which they come. While a thread meets the others, those of other threads, which never
    wait here, are put off until it is done; so every rank numbers the calls of a program alike. A call that is handed
    to the engine has its whole deadline there.
    """

    def __init__(self, segment: Segment, links: EngineLinks, *, trace: Trace | NullTrace) -> None:
        self._segment = segment
        self._links = links
        self._trace = trace
        self._others = [rank for rank in range(segment.world_size) if rank != segment.rank]
        self._parts = Parts(segment.rank, payload_bytes=segment.payload_bytes)
        self._lock = threading.Lock()
        self._number = 0
        self._num_skipped = 0
        """Calls made here since the last one that was handed over."""
        self._is_meeting = False
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
        """Make ``call`` here if its caller waits for it (``is_awaited``) and all ranks agree, else with the engine."""
        part = self._parts.of(call) if is_awaited and isinstance(call, CollectiveCall) else None
        with self._lock:
            if self._is_meeting:
                self._put_off.append((call, work))
                return
            part = self._begin(part)
            number = self._number
        if part is None:
            self._hand_over(call, work)
            return
        assert isinstance(call, CollectiveCall), "no other call has a part"
        try:
            self._meet(number, call, work, part)
        finally:
            self._segment.finish(number)
            self._end_meeting()

    def _begin(self, part: Part | None) -> Part | None:
        """Give a call its number; return its part if it is put up here, and tell the others if not."""
        self._number += 1
        if part is None or self._is_troubled() or not self._segment.is_free(self._number):
            self._segment.pass_by(self._number)
            return None
        self._is_meeting = True
        self._num_skipped += 1
        return part

    def _meet(self, number: int, call: CollectiveCall, work: Work, part: Part) -> None:
        start_ns, start_s, stalls = self._trace.now_ns(), time.monotonic(), self._links.stalls
        operation = part.operation
        operation.put(call, self._segment.payload(self._segment.rank, number))
        self._segment.put_up(number, part.signature)
        call.place_own_part(self._segment.rank)  # the others need not wait for that
        outcome = meet(
            self._segment,
            self._others,
            number,
            part.signature,
            deadline_s=start_s + call.timeout_s,
            now_s=time.monotonic,
            is_troubled=self._is_troubled,
            is_stalled=lambda rank: rank in stalls.stalled and time.monotonic() - start_s >= stalls.limit_s,
        )
        if outcome is Outcome.MET and self._take(number, call, operation):
            self._count(call, operation)
            trace_call(self._trace, call, start_ns)
            work.finish(None)
            return
        if outcome is Outcome.LATE:
            self._links.give_up(self._late(number, call, time.monotonic() - start_s))
        self._num_skipped -= 1
        self._hand_over(call, work)

    def _take(self, number: int, call: CollectiveCall, operation: Operation) -> bool:
        """Make the result; after a fault of ours the engine, which then ends all calls, tells why."""
        try:
            operation.take(call.buffer, lambda rank: self._segment.payload(rank, number), call.reduction)
        except Exception as error:
            self._links.crash(error)
            return False
        return True

    def _hand_over(self, call: Call, work: Work) -> None:
        call.place_own_part(self._segment.rank)
        num_skipped, self._num_skipped = self._num_skipped, 0
        self._links.start(call, work, num_skipped)

    def _end_meeting(self) -> None:
        """Begin what was put off, before the caller can make its next call."""
        with self._lock:
            self._is_meeting = False
            put_off, self._put_off = self._put_off, []
            for _ in put_off:
                self._begin(None)
        for call, work in put_off:
            self._hand_over(call, work)

    def _is_troubled(self) -> bool:
        return self._has_lost or self._links.has_failed()

    def _late(self, number: int, call: CollectiveCall, waited_s: float) -> Failure:
        absent = missing(self._segment, self._others, number)
        present = [self._links.members[rank] for rank in range(self._segment.world_size) if rank not in absent]
        accused = [
            failures.accuse(
                self._links.describe_rank(rank), waited_s, call, present, still_s=self._links.stalls.still_s(rank)
            )
            for rank in absent
        ]
        rank = min(absent, default=self._segment.rank)
        return failures.late(call, accused, rank=rank, host=self._links.host_of(rank))

    def _count(self, call: CollectiveCall, operation: Operation) -> None:
        kind = call.schedule.collective.value
        self.num_calls[kind] = self.num_calls.get(kind, 0) + 1
        self.call_bytes[kind] = self.call_bytes.get(kind, 0) + call.buffer.nbytes
        for rank in self._others:
            self._sent_bytes[rank] += operation.sent_bytes[rank]
            self._received_bytes[rank] += operation.received_bytes(rank)
