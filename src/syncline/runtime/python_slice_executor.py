"""Executes slices in Python: those of each call, begun one after another as there is room. This is the reference.

A callback for each message, and no coroutine: what arrives goes on at once. Within a slice each operation begins when
nothing it waits for is left.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from functools import partial

from syncline.fabric import Transport
from syncline.fabric.slice_executor import SLICE_TAGS, Kind, Operation, SlicedCall
from syncline.runtime.loop import Clock


class _SliceRun:
    """Executes the dataflow of one slice of ``call``; calls ``on_end`` once, when every operation has ended."""

    def __init__(
        self, call: SlicedCall, slice_number: int, host: PythonSliceExecutor, *, on_end: Callable[[_SliceRun], None]
    ) -> None:
        self._call = call
        self._buffer = call.buffer
        self.dataflow, self._offsets = call.slices[slice_number]
        self._operations = self.dataflow.operations
        self._itemsize = call.reduction.itemsize
        self._tag = call.tag + slice_number * SLICE_TAGS
        self._host = host
        self._transport = host.transport
        self._on_end = on_end
        self._waits = list(self.dataflow.num_waits)
        self._settled: list[int] = []
        self._temporaries: dict[int, memoryview] = {}
        self._uses: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._arrived: set[int] = set()
        self._cleared: set[int] = set()
        self._is_advancing = False
        self.is_stopped = False
        self.num_bytes = (self._offsets[-1] - self._offsets[0]) * self._itemsize
        self.open_operations = set(range(len(self._operations)))
        self.posted: set[int] = set()

    def advance(self, ready: tuple[int, ...] = ()) -> None:
        """Begin what is ready, and go on with what waited for the operations that have ended."""
        if self.is_stopped:
            return
        self._is_advancing = True
        try:
            for number in ready:
                self._begin(number)
            while self._settled:
                self._go_on(self._settled.pop())
        except Exception as error:
            self._host.on_crash(error)
            return
        self._is_advancing = False
        if not self.open_operations:
            self.is_stopped = True
            self._on_end(self)

    def stop(self) -> None:
        """Withdraw: after this nothing is written to the buffer any more, whatever arrives."""
        self.is_stopped = True
        for number in self.posted:
            operation = self._operations[number]
            self._transport.cancel(operation.peer, self._tag + operation.index)
        self.posted.clear()
        self._temporaries.clear()

    def awaited_peers(self) -> set[int]:
        """Return who has not delivered yet what may be delivered now."""
        return {self._operations[number].peer for number in self.posted}

    def open_peers(self) -> set[int]:
        """Return the ranks that messages still have to be exchanged with."""
        return {self._operations[number].peer for number in self.open_operations}

    def _begin(self, number: int) -> None:
        """Begin an operation that waits for nothing more."""
        operation = self._operations[number]
        start, stop = self._range(operation)
        if start == stop:
            self._settled.append(number)
        elif operation.kind is Kind.SEND:
            self._transport.send(
                operation.peer,
                self._tag + operation.index,
                self._buffer[start:stop],
                signature=self._call.signature,
                urgency=self._call.urgency,
                connection_class=self._call.connection_class,
                on_sent=partial(self._ended, number),
            )
        elif operation.kind is Kind.APPLY:
            self._cleared.add(number)
            self._apply(number, operation)
        else:
            self._post(number, operation, start, stop)

    def _post(self, number: int, operation: Operation, start: int, stop: int) -> None:
        if operation.kind is Kind.LAND:
            destination = self._temporaries[number] = memoryview(bytearray(stop - start))
            self._uses[number] = self._num_uses(operation)
        else:
            destination = self._buffer[start:stop]
        self.posted.add(number)
        self._transport.receive(
            operation.peer,
            self._tag + operation.index,
            destination,
            signature=self._call.signature,
            urgency=self._call.urgency,
            on_received=partial(self._ended, number),
            on_mismatch=partial(self._call.on_mismatch, operation.peer, self._tag + operation.index),
        )

    def _num_uses(self, operation: Operation) -> int:
        """Count the applies that will use a landing; one that is alone covers it, so it is not empty."""
        if len(operation.applies) == 1:
            return 1
        return sum(not self._is_empty(apply) for apply in operation.applies)

    def _ended(self, number: int) -> None:
        """Go on with what waited for a message that has left, or is there."""
        if number in self.posted:
            self.posted.discard(number)
            self._host.heard(self._operations[number].peer)
        self._settled.append(number)
        if not self._is_advancing:
            self.advance()

    def _go_on(self, number: int) -> None:
        operation = self._operations[number]
        self.open_operations.discard(number)
        for waiting in operation.then:
            self._waits[waiting] -= 1
            if not self._waits[waiting]:
                self._begin(waiting)
        if operation.applies:
            self._arrived.add(number)
            for apply in operation.applies:
                self._apply(apply, self._operations[apply])

    def _apply(self, number: int, operation: Operation) -> None:
        """Add as much as has arrived in order: a, b | own | c gives ((a + b) + own) + c.

        ``_used`` counts the contributions that are in, the own one among them, at its place.
        """
        if number not in self.open_operations or self._is_empty(number):
            return
        num_before = len(operation.before)
        used = self._apply_before(operation, self._used.get(number, 0))
        if used >= num_before and number in self._cleared:
            used = self._apply_after(operation, used)
            if used == num_before + 1 + len(operation.after):
                self._settled.append(number)
        self._used[number] = used

    def _apply_before(self, operation: Operation, used: int) -> int:
        """Sum what precedes the own value, in the first one's temporary; returns how many are used."""
        before = operation.before
        while used < len(before) and before[used] in self._arrived:
            if used:
                self._call.reduction.add(self._part(before[0], operation), self._part(before[used], operation))
                self._release(before[used])
            used += 1
        return used

    def _apply_after(self, operation: Operation, used: int) -> int:
        """Add what is summed so far to the own value, then what follows; returns how many are used."""
        start, stop = self._range(operation)
        own = self._buffer[start:stop]
        before, after = operation.before, operation.after
        if used == len(before):
            if before:
                self._add(own, before[0], operation)
            used += 1
        while (place := used - len(before) - 1) < len(after) and after[place] in self._arrived:
            self._add(own, after[place], operation)
            used += 1
        return used

    def _add(self, own: memoryview, landing: int, operation: Operation) -> None:
        part = self._part(landing, operation)
        if operation.replaces:
            own[:] = part
        else:
            self._call.reduction.add(own, part)
        self._release(landing)

    def _is_empty(self, number: int) -> bool:
        start, stop = self._range(self._operations[number])
        return start == stop

    def _range(self, operation: Operation) -> tuple[int, int]:
        """Return the bytes of the buffer that an operation is about."""
        return self._offsets[operation.first] * self._itemsize, self._offsets[operation.last] * self._itemsize

    def _part(self, landing: int, operation: Operation) -> memoryview:
        """Return the bytes of a landing that an apply is about."""
        origin, _ = self._range(self._operations[landing])
        start, stop = self._range(operation)
        return self._temporaries[landing][start - origin : stop - origin]

    def _release(self, landing: int) -> None:
        self._uses[landing] -= 1
        if not self._uses[landing]:
            del self._temporaries[landing]


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
        self._starved: deque[PythonExecution] = deque()
        self._queue: list[tuple[int, int, PythonExecution]] = []
        self._inflight_bytes: dict[PythonExecution, int] = {}

    @property
    def inflight_bytes(self) -> int:
        """Bytes of the slices under way, of all classes."""
        return sum(self._inflight_bytes.values())

    def add(self, call: PythonExecution) -> None:
        """Take a call of which no slice has begun."""
        if call.has_more:
            self._starved.append(call)
            heapq.heappush(self._queue, (call.urgency, call.number, call))

    def began(self, call: PythonExecution, num_bytes: int) -> None:
        """Count a slice that begins."""
        self._inflight_bytes[call] = self._inflight_bytes.get(call, 0) + num_bytes
        call.largest_slice_bytes = max(call.largest_slice_bytes, num_bytes)

    def ended(self, call: PythonExecution, num_bytes: int) -> None:
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

    def next(self) -> PythonExecution | None:
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

    def _has_room(self, call: PythonExecution) -> bool:
        ahead = beside = 0
        for other, num_bytes in self._inflight_bytes.items():
            if other.connection_class > call.connection_class:
                continue
            if other.urgency <= call.urgency:
                ahead += num_bytes
            else:
                beside += max(num_bytes - other.largest_slice_bytes, 0)
        return ahead < self._max_inflight_bytes and ahead + beside < 2 * self._max_inflight_bytes


class PythonSliceExecutor:
    """Executes calls on any transport; ``on_crash`` is told if our own code fails."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        *,
        max_inflight_bytes: int,
        on_crash: Callable[[Exception], None],
    ) -> None:
        self.transport = transport
        self.max_inflight_bytes = max_inflight_bytes
        self.on_crash = on_crash
        self.order = SliceOrder(max_inflight_bytes)
        self._clock = clock
        self._is_beginning = False
        self._heard_s: dict[int, float] = {}

    def open(self, call: SlicedCall) -> PythonExecution:
        """Return an execution that has not begun."""
        return PythonExecution(self, call)

    def heard_s(self, peer: int) -> float:
        """Return when a message of ``peer`` last arrived, by the loop's clock; 0 if none did."""
        return self._heard_s.get(peer, 0.0)

    def heard(self, peer: int) -> None:
        """Take note that a message of ``peer`` has arrived."""
        self._heard_s[peer] = self._clock.time()

    def begin_slices(self) -> None:
        """Begin slices while there is room. One that ends at once comes back here."""
        if self._is_beginning:
            return
        self._is_beginning = True
        while (execution := self.order.next()) is not None:
            run = execution.next_run()
            self.order.began(execution, run.num_bytes)
            run.advance(run.dataflow.first)
        self._is_beginning = False


class PythonExecution:
    """All slices of one call on their way."""

    def __init__(self, executor: PythonSliceExecutor, call: SlicedCall) -> None:
        self._executor = executor
        self._call = call
        self._next_slice = 0
        self._num_slices = len(call.slices)
        self.number = call.number
        self.urgency = call.urgency
        self.connection_class = call.connection_class
        self.largest_slice_bytes = 0
        self.runs: set[_SliceRun] = set()

    @property
    def has_more(self) -> bool:
        """Whether there are slices that were not begun."""
        return self._next_slice < self._num_slices

    @property
    def is_over(self) -> bool:
        """Whether every slice has ended."""
        return not self.runs and not self.has_more

    def start(self) -> None:
        """Begin as many slices as there is room for; the others follow."""
        self._executor.order.add(self)
        self._executor.begin_slices()

    def stop(self) -> None:
        """Withdraw: after this nothing is written to the buffer any more, whatever arrives."""
        self._next_slice = self._num_slices
        for run in self.runs:
            run.stop()
        self.runs.clear()

    def awaited_peers(self) -> set[int]:
        """Return who has not delivered yet what may be delivered now."""
        return {peer for run in self.runs for peer in run.awaited_peers()}

    def open_peers(self) -> set[int]:
        """Return the ranks that slices under way still have to exchange messages with (-1: none, but work is left)."""
        return {peer for run in self.runs for peer in run.open_peers()}

    def next_run(self) -> _SliceRun:
        """Return the next slice; it has not begun."""
        run = _SliceRun(self._call, self._next_slice, self._executor, on_end=self._slice_ended)
        self._next_slice += 1
        self.runs.add(run)
        return run

    def _slice_ended(self, run: _SliceRun) -> None:
        self.runs.discard(run)
        self._executor.order.ended(self, run.num_bytes)
        if self.is_over:
            self._call.on_over()
        self._executor.begin_slices()
