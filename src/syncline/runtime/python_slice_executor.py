"""Executes slices in Python: those of each call, begun one after another as there is room. This is the reference."""

from __future__ import annotations

from collections.abc import Callable

from syncline.fabric import Transport
from syncline.fabric.slice_executor import SlicedCall
from syncline.runtime.clock import Clock
from syncline.runtime.slice_order import SliceOrder
from syncline.runtime.slicerun import SliceRun


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
        self.temporary_bytes = 0
        self.on_crash = on_crash
        self.order: SliceOrder[PythonExecution] = SliceOrder(max_inflight_bytes)
        self._clock = clock
        self._is_beginning = False
        self._heard_s: dict[int, float] = {}
        self.num_active_slices = 0

    def __repr__(self) -> str:
        return f"<PythonSliceExecutor: {self.num_active_slices} slices, {self.temporary_bytes} temporary bytes in use>"

    @property
    def inflight_bytes(self) -> int:
        """Bytes of the slices under way, now."""
        return self.order.inflight_bytes

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
            self.num_active_slices += 1
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
        self.runs: set[SliceRun] = set()

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
        self._executor.num_active_slices -= len(self.runs)
        self.runs.clear()

    def awaited_peers(self) -> set[int]:
        """Return who has not delivered yet what may be delivered now."""
        return {peer for run in self.runs for peer in run.awaited_peers()}

    def open_peers(self) -> set[int]:
        """Return the ranks that slices under way still have to exchange messages with (-1: none, but work is left)."""
        return {peer for run in self.runs for peer in run.open_peers()}

    def next_run(self) -> SliceRun:
        """Return the next slice; it has not begun."""
        run = SliceRun(self._call, self._next_slice, self._executor, on_end=self._slice_ended)
        self._next_slice += 1
        self.runs.add(run)
        return run

    def _slice_ended(self, run: SliceRun) -> None:
        self.runs.discard(run)
        self._executor.num_active_slices -= 1
        self._executor.order.ended(self, run.num_bytes)
        if self.is_over:
            self._call.on_over()
        self._executor.begin_slices()
