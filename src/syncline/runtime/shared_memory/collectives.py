"""One rank's collectives in shared memory: which calls are made there, in what order, and what is counted.

Ranks agree through the segment alone to make a call there. Calls are made one after another and numbered alike on all
ranks. For call n a rank either *puts up* a slot header, with a signature of what it calls and its payload beside it, or
*passes by* and takes the engine; each chooses for itself (a large buffer, an asynchronous call, another thread). Both
raise its progress to n. A rank that put up its slot header waits until every other has begun call n, and then

- if all have a slot header for n with its own signature, the call is *met*: it reads their payloads and is done;
- else it goes *elsewhere*: it hands the call to the engine, where that of the others is or will be.

**All decide alike.** A slot header for n never changes after the progress says n, until its owner writes the one of
call n + 2 (below). If somebody passed by, nobody ever sees all headers, and everyone who put one up goes to the engine.
If two signatures differ, everyone sees one that is not its own, and the engine, which compares whole descriptions,
names both calls on every rank. Otherwise everyone meets. A rank that gives up instead (its deadline is over, or a rank
is lost) ends the whole communicator, here and on the others; it writes nothing more, so who met or meets nonetheless
has read what was put up, and no half-written buffer.

**Nothing is read too late.** The payload of call n is used again by call n + 2, and only if every other rank's progress
says that it is done with n (:meth:`Segment.is_free`); otherwise the rank passes by. Nobody's own buffer is ever read by
others, so a call that is over, well or not, has no reader left.

**Nothing is read too early.** Payload, slot header and progress are stored in this order, each word by one store with
release, and read in the reverse order by loads with acquire (``fabric/native/segment.hpp``).

**Nobody sleeps for ever.** A rank that waits for the progress of another sleeps on that very word, which only its owner
writes, and who wakes its sleepers after the store. It also looks up every LOOK_S, for a failure that only its own
communication thread can see: a rank that was killed or went silent, an error that another rank told.

**A call like one before** needs nothing of this rank but its contribution: compiled code puts it up, looks for the
others for a moment, and adds (:class:`KeptCall`). Where they have not come by then, the rule above takes over.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from syncline.errors import FabricClosedError
from syncline.fabric import PeerStalls
from syncline.observe import Trace
from syncline.runtime.call import Call, CollectiveCall, trace_call
from syncline.runtime.flight_recorder import CallRecord
from syncline.runtime.shared_memory.operation import PAYLOAD_BYTES, Operation, Part, Parts
from syncline.runtime.work import Work

if TYPE_CHECKING:
    from syncline.fabric import ConnectionStatistics, _native
    from syncline.runtime.shared_memory.segment import Segment

LOOK_S = 0.05


class Outcome(Enum):
    """How a meeting ends for one rank."""

    MET = "all ranks have put up the same call"
    ELSEWHERE = "some rank makes the call with the engine, or makes another"
    TROUBLED = "a rank is lost, or has failed"
    LATE = "some rank did not come in time"
    UNDER_WAY = "some rank has not come yet, and this one does not wait any longer for now"


_BLANK = memoryview(mmap.mmap(-1, PAYLOAD_BYTES))
"""What a call has for a buffer that is not made yet; nothing is written there, so it is no memory."""


class EngineLinks(NamedTuple):
    """What the collectives need from around it; all may be called from any thread."""

    note: Callable[[Call], CallRecord]
    """Take note of a call that begins."""
    begin: Callable[[Call, CallRecord], Work]
    """Return the work of a call that somebody waits for."""
    start: Callable[[Call, Work, int], None]
    """Hand a call to the engine, after what it was handed before; so many were made here since."""
    has_failed: Callable[[], bool]
    late: Callable[[Call, Sequence[int], Sequence[int], float], None]
    """End all calls, here and on the other ranks: some have not come to a call in so many seconds."""
    crash: Callable[[Exception], None]
    stalls: PeerStalls
    """Which ranks do not train, though they live."""


class PutUp(NamedTuple):
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

    def __init__(self, segment: Segment, links: EngineLinks, *, trace: Trace, is_for_all: bool = False) -> None:
        self._segment = segment
        self._links = links
        self._trace = trace
        self._is_for_all = is_for_all
        self.process = os.getpid()
        """The one that has the segment: a forked child does not."""
        self._others = [rank for rank in range(segment.world_size) if rank != segment.rank]
        self._parts = Parts(segment.rank, payload_bytes=segment.payload_bytes)
        self._lock = threading.Lock()
        """Held for moments: while calls are numbered, put up, and handed over in the order of their numbers."""
        self._turn = threading.Lock()
        """Held by the thread that meets the others."""
        self._num_skipped = 0
        """Calls made here since the last one that was handed over."""
        self._meeting: PutUp | None = None
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

    def traffic(self) -> Iterator[ConnectionStatistics]:
        """Yield what each other rank has read of this one here, and this one of it: calls, and messages."""
        from syncline.fabric import MEMORY_CLASS, ConnectionStatistics  # a start counts nothing

        num_calls = sum(self.num_calls.values())
        for rank in self._others:
            messages, num_bytes, received, received_bytes = self.inboxes.counts(rank)
            yield ConnectionStatistics(
                peer=rank,
                connection_class=MEMORY_CLASS,
                sent_messages=num_calls + messages,
                sent_bytes=self._sent_bytes[rank] + num_bytes,
                received_messages=num_calls + received,
                received_bytes=self._received_bytes[rank] + received_bytes,
            )

    @property
    def inboxes(self) -> _native.Inboxes:
        """What messages from rank to rank pass through."""
        return self._segment.inboxes

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

    def keep(
        self,
        kind: Callable[..., CollectiveCall],
        num_bytes: int,
        *,
        view: Callable[[Any], memoryview],
        finish: Callable[[Any], object] | None,
    ) -> KeptCall | None:
        """Prepare all-reduces of one ``kind``, of so many bytes; None if they are not for the segment."""
        if num_bytes > self._segment.payload_bytes:
            return None
        call = kind(buffer=_BLANK[:num_bytes])
        part = self._parts.of(call)
        if part is None or part.operation.terms is None:
            return None
        order = self._segment.order_of(call.reduction, part.operation.terms)
        return KeptCall(self, call, part, order, view, finish)

    def _begin(self, call: Call, work: Work, part: Part | None) -> bool:
        """Give a call its number; put it up here and return True, or hand it to the engine, and tell the others."""
        number = self._segment.number = self._segment.number + 1
        if part is None or self._is_troubled() or not self._segment.is_free(number):
            self._segment.pass_by(number)
            self._hand_over(call, work)
            return False
        assert isinstance(call, CollectiveCall), "no other call has a part"
        start_ns, start_s = self._trace.now_ns(), time.monotonic()
        part.operation.put(call, self._segment.payload(self._segment.rank, number))
        self._segment.put_up(number, part.signature)
        call.place_own_part(self._segment.rank)  # the others need not wait for that
        self._meet_in(PutUp(number=number, call=call, work=work, part=part, start_ns=start_ns, start_s=start_s))
        return True

    def _meet_in(self, meeting: PutUp) -> None:
        """Let whoever waits for a call that is put up meet the others in it; with the lock held."""
        self._meeting = meeting
        meeting.work.make_by_waiting(self.make)
        self._num_skipped += 1

    def _meet(self, meeting: PutUp, limit_s: float) -> None:
        number, call = meeting.number, meeting.call
        outcome, is_made = None, False
        try:
            outcome = self.await_others(meeting, until_s=time.monotonic() + limit_s)
            is_made = outcome is Outcome.MET and self._take(number, call, meeting.part.operation)
            if outcome is Outcome.LATE:
                absent = [rank for rank in self._others if self._segment.progress(rank) < 2 * number]
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

    def await_others(self, meeting: PutUp, *, until_s: float) -> Outcome:
        """Wait for the others in a call that this rank has put up; who is there at ``until_s`` comes again later.

        A rank that is stalled is late at once.
        """
        segment, begun = self._segment, 2 * meeting.number
        for rank in self._others:
            while (seen := segment.progress(rank)) < begun:
                # A rank that met us may leave at once: what it saw of the others is here before its loss is known.
                if self._is_troubled() and segment.progress(rank) < begun:
                    return Outcome.TROUBLED
                now_s = time.monotonic()
                left_s = meeting.start_s + meeting.call.timeout_s - now_s
                if left_s <= 0 or self._is_stalled(rank, now_s - meeting.start_s):
                    return Outcome.LATE
                if now_s >= until_s:
                    return Outcome.UNDER_WAY
                segment.wait(rank, seen, min(left_s, until_s - now_s, LOOK_S))
            if not segment.has_header(rank, meeting.number, meeting.part.signature):
                return Outcome.ELSEWHERE
        return Outcome.MET

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

    def _end_meeting(self, meeting: PutUp, *, is_made: bool) -> None:
        """Hand over the call if it was not made here, and what was put off, before any call that comes now."""
        with self._lock:
            self._meeting = None
            if not is_made:
                self._num_skipped -= 1
                self._hand_over(meeting.call, meeting.work)
            put_off, self._put_off = self._put_off, []
            for call, work in put_off:
                self._begin(call, work, None)

    def _is_stalled(self, rank: int, waited_s: float) -> bool:
        stalls = self._links.stalls
        return rank in stalls.stalled and waited_s >= stalls.limit_s

    def _is_troubled(self) -> bool:
        return self._has_lost or self._links.has_failed()

    def _count(self, call: CollectiveCall, operation: Operation) -> None:
        kind = call.schedule.collective.value
        self.num_calls[kind] = self.num_calls.get(kind, 0) + 1
        self.call_bytes[kind] = self.call_bytes.get(kind, 0) + call.buffer.nbytes
        for rank in self._others:
            self._sent_bytes[rank] += operation.sent_bytes[rank]
            self._received_bytes[rank] += operation.received_bytes(rank)


class AddressedMemory(Protocol):
    """A tensor, for code that does without PyTorch."""

    def data_ptr(self) -> int:
        """Where it begins."""


class KeptCall:
    """An all-reduce that is prepared once, and made by the thread that waits for it whenever it is called again.

    It is one entry of compiled code where the others have come, or come within some microseconds: no plan is looked up,
    no work is made and no thread is handed anything. Else it goes on as any call that is put up.
    """

    def __init__(
        self,
        collectives: SharedMemoryCollectives,
        call: CollectiveCall,
        part: Part,
        order: _native.SumOrder,
        view: Callable[[Any], memoryview],
        finish: Callable[[Any], object] | None,
    ) -> None:
        self._collectives = weakref.ref(collectives)  # which is gone, with its memory, when its communicator is closed
        self._call = call
        self._part = part
        self._order = order
        self._view = view
        self._finish = finish

    def make(self, buffer: AddressedMemory, timeout_s: float | None = None) -> bool:
        """Make it on ``buffer``; raises what a work's ``wait()`` does. ``timeout_s``: by default what it was kept with.

        False: nothing has begun, and the call must go the usual way.
        """
        own, began_ns = self._collectives(), time.time_ns()
        if own is None or own._trace.enabled or os.getpid() != own.process or own._is_troubled():
            return False
        if not own._lock.acquire(blocking=False):
            return False
        try:
            is_over = None
            if own._meeting is None:
                is_over = own._segment.make(self._part.signature, self._order, buffer.data_ptr(), self._call.num_bytes)
            if is_over is None:
                return False
            record = own._links.note(self._call)
            record.began_ns = began_ns
            if is_over:
                own._num_skipped += 1
                record.end(None)
                own._count(self._call, self._part.operation)
            else:
                work = self._go_on(own, record, self._view(buffer), timeout_s)
        finally:
            own._lock.release()
        if not is_over:
            with work.waiting():
                own.make(work, math.inf)
            work.wait()
        if self._finish is not None:
            self._finish(buffer)
        return True

    def _go_on(
        self, own: SharedMemoryCollectives, record: CallRecord, memory: memoryview, timeout_s: float | None
    ) -> Work:
        call = replace(self._call, buffer=memory, timeout_s=timeout_s or self._call.timeout_s)
        work = own._links.begin(call, record)
        start_ns, start_s, number = own._trace.now_ns(), time.monotonic(), own._segment.number
        own._meet_in(PutUp(number=number, call=call, work=work, part=self._part, start_ns=start_ns, start_s=start_s))
        return work
