"""Executes slices in Python: all those of a call begin at once. This is the reference.

A callback for each message, and no coroutine: what arrives goes on at once. Within a slice each operation begins when
nothing it waits for is left.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable
from functools import partial

from syncline.fabric import Transport
from syncline.fabric.slice_executor import SLICE_TAGS, Kind, Operation, SlicedCall


class _SliceRun:
    """Executes the dataflow of one slice of ``call``; calls ``on_end`` once, when every operation has ended."""

    def __init__(
        self, call: SlicedCall, slice_number: int, host: PythonSliceExecutor, *, on_end: Callable[[], None]
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
            self._on_end()

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


class PythonSliceExecutor:
    """Executes calls on any transport, and bounds nothing; ``on_crash`` is told if our own code fails."""

    def __init__(self, transport: Transport, clock: AbstractEventLoop, on_crash: Callable[[Exception], None]) -> None:
        self.transport = transport
        self.on_crash = on_crash
        self._clock = clock
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


class PythonExecution:
    """All slices of one call on their way."""

    has_more = False
    """All slices begin at once."""

    def __init__(self, executor: PythonSliceExecutor, call: SlicedCall) -> None:
        self._call = call
        self._runs = {
            number: _SliceRun(call, number, executor, on_end=partial(self._slice_ended, number))
            for number in range(len(call.slices))
        }

    @property
    def is_over(self) -> bool:
        """Whether every slice has ended."""
        return not self._runs

    def start(self) -> None:
        """Begin all slices."""
        for run in tuple(self._runs.values()):
            run.advance(run.dataflow.first)

    def stop(self) -> None:
        """Withdraw: after this nothing is written to the buffer any more, whatever arrives."""
        for run in self._runs.values():
            run.stop()
        self._runs.clear()

    def awaited_peers(self) -> set[int]:
        """Return who has not delivered yet what may be delivered now."""
        return {peer for run in self._runs.values() for peer in run.awaited_peers()}

    def open_peers(self) -> set[int]:
        """Return the ranks that messages still have to be exchanged with (-1: none, but work is left)."""
        return {peer for run in self._runs.values() for peer in run.open_peers()}

    def _slice_ended(self, number: int) -> None:
        self._runs.pop(number, None)
        if self.is_over:
            self._call.on_over()
