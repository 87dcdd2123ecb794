"""Executes in Python: the slices of each call, begun one after another as there is room."""

from __future__ import annotations

from collections.abc import Callable

from syncline.fabric import Fabric
from syncline.runtime.call import CollectiveCall
from syncline.runtime.clock import Clock
from syncline.runtime.dataflows import Dataflows
from syncline.runtime.pool import TemporaryPool
from syncline.runtime.slice_order import SliceOrder
from syncline.runtime.slicerun import SliceRun
from syncline.runtime.tags import SLICE_TAGS


class PythonSliceExecutor:
    """Executes calls on any fabric; ``on_crash`` is told if our own code fails."""

    def __init__(
        self,
        fabric: Fabric,
        dataflows: Dataflows,
        clock: Clock,
        *,
        max_inflight_bytes: int,
        on_crash: Callable[[Exception], None],
    ) -> None:
        self.fabric = fabric
        self.dataflows = dataflows
        self.pool = TemporaryPool(2 * max_inflight_bytes)
        self.on_crash = on_crash
        self._clock = clock
        self._order: SliceOrder[PythonExecution] = SliceOrder(max_inflight_bytes)
        self._is_filling = False
        self._heard_s: dict[int, float] = {}
        self.num_active_slices = 0

    def __repr__(self) -> str:
        return f"<PythonSliceExecutor: {self.num_active_slices} slices, {self.pool.used_bytes} bytes of temporaries>"

    @property
    def inflight_bytes(self) -> int:
        """Bytes of the slices under way, now."""
        return self._order.inflight_bytes

    @property
    def temporary_bytes(self) -> int:
        """Bytes of temporaries, in use or kept, now."""
        return self.pool.used_bytes + self.pool.kept_bytes

    def open(
        self, call: CollectiveCall, *, number: int, tag: int, signature: int, on_over: Callable[[], None]
    ) -> PythonExecution:
        """Return an execution that has not begun."""
        return PythonExecution(self, call, number=number, tag=tag, signature=signature, on_over=on_over)

    def heard_s(self, peer: int) -> float:
        """Return when a message of ``peer`` last arrived, by the loop's clock; 0 if none did."""
        return self._heard_s.get(peer, 0.0)

    def note_heard(self, peer: int) -> None:
        """Take note that a message of ``peer`` has arrived."""
        self._heard_s[peer] = self._clock.time()

    def add(self, execution: PythonExecution) -> None:
        """Begin slices of ``execution``, now and later."""
        self._order.add(execution)
        self._fill()

    def slice_ended(self, execution: PythonExecution, run: SliceRun) -> None:
        """Go on with the next slice."""
        self.num_active_slices -= 1
        self._order.ended(execution, run.num_bytes)
        if execution.is_over:
            execution.on_over()
        self._fill()

    def _fill(self) -> None:
        """Begin a slice if there is room, and the next one when the messages of this one have left.

        All at once, the first slice would wait until the last one is set up. A slice that ends at once comes back here.
        """
        if self._is_filling:
            return
        self._is_filling = True
        while (execution := self._order.next()) is not None:
            run = execution.next_run()
            self.num_active_slices += 1
            self._order.began(execution, run.num_bytes)
            run.start()
            if self._order.has_more:
                self._clock.call_later(0.0, self._fill_on)
                return
        self._is_filling = False

    def _fill_on(self) -> None:
        self._is_filling = False
        self._fill()


class PythonExecution:
    """All slices of one call on their way."""

    def __init__(
        self,
        executor: PythonSliceExecutor,
        call: CollectiveCall,
        *,
        number: int,
        tag: int,
        signature: int,
        on_over: Callable[[], None],
    ) -> None:
        self._executor = executor
        self._call = call
        self._tag = tag
        self._signature = signature
        self._next_slice = 0
        self._num_slices = call.num_slices
        self.number = number
        self.urgency = call.urgency
        self.connection_class = call.connection_class
        self.largest_slice_bytes = 0
        self.runs: set[SliceRun] = set()
        self.on_over = on_over

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
        self._executor.add(self)

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
        number, executor = self._next_slice, self._executor
        run = SliceRun(
            self._call,
            executor.dataflows.of_slice(self._call.schedule, self._call.layout.slices[number]),
            number,
            signature=self._signature,
            tag=self._tag + number * SLICE_TAGS,
            fabric=executor.fabric,
            pool=executor.pool,
            owner=self,
        )
        self._next_slice += 1
        self.runs.add(run)
        return run

    def slice_done(self, run: SliceRun) -> None:
        """Take note that every operation of ``run`` has ended."""
        self.runs.discard(run)
        self._executor.slice_ended(self, run)

    def slice_crashed(self, error: Exception) -> None:
        """Take note that our own code failed; the slice will not go on."""
        self._executor.on_crash(error)

    def heard(self, peer: int) -> None:
        """Take note that a message of ``peer`` has arrived."""
        self._executor.note_heard(peer)
