"""Executes in compiled code (``fabric/native/calls.hpp``), which begins slices itself and tells when a call is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncline.fabric import Fabric
from syncline.runtime.call import CollectiveCall
from syncline.runtime.clock import Clock
from syncline.runtime.dataflow import Dataflow
from syncline.runtime.dataflows import Dataflows
from syncline.runtime.python_slice_executor import PythonSliceExecutor
from syncline.runtime.slice_executor import Execution, SliceExecutor
from syncline.runtime.tags import SLICE_TAGS
from syncline.schedule import Layout, Schedule

if TYPE_CHECKING:
    from syncline.fabric import native_peer_transport
    from syncline.fabric.native_peer_transport import NativeTransport

MAX_KEPT = 1024
"""Layouts, and dataflows for them, that are kept for the next call of their kind."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A layout for compiled code; it keeps what it is filed under alive, so that no id is used again."""

    schedule: Schedule
    layout: Layout
    compiled: native_peer_transport.Layout


class NativeSliceExecutor:
    """Executes calls on a native transport; those of numbers that compiled code does not add are executed in Python.

    Each of the two sides has the bound for itself.
    """

    def __init__(
        self,
        native_transport: NativeTransport,
        members: Sequence[int],
        dataflows: Dataflows,
        in_python: PythonSliceExecutor,
        *,
        max_inflight_bytes: int,
    ) -> None:
        from syncline.fabric import native_peer_transport  # it is there, since there is a native transport

        self._native = native_peer_transport
        self._native_transport = native_transport
        self._members = list(members)
        self._dataflows = dataflows
        self._in_python = in_python
        self._pool = native_peer_transport.TemporaryPool(2 * max_inflight_bytes)
        self._executor = native_peer_transport.SliceExecutor(native_transport, self._pool, max_inflight_bytes)
        self._layouts: dict[tuple[int, int, str], _Compiled] = {}
        self._compiled: dict[int, tuple[Dataflow, native_peer_transport.Dataflow]] = {}

    def __repr__(self) -> str:
        return f"<NativeSliceExecutor: {self.num_active_slices} slices, {self._pool.used_bytes} bytes of temporaries>"

    @property
    def num_active_slices(self) -> int:
        """Slices under way, now."""
        return self._executor.num_active_slices + self._in_python.num_active_slices

    @property
    def inflight_bytes(self) -> int:
        """Bytes of the slices under way, now."""
        return self._executor.inflight_bytes + self._in_python.inflight_bytes

    @property
    def temporary_bytes(self) -> int:
        """Bytes of temporaries, in use or kept, now."""
        return self._pool.used_bytes + self._pool.kept_bytes + self._in_python.temporary_bytes

    def open(
        self, call: CollectiveCall, *, number: int, tag: int, signature: int, on_over: Callable[[], None]
    ) -> Execution:
        """Return an execution that has not begun."""
        if call.reduction.op != "sum" or not self._native.can_add(call.reduction.dtype):
            return self._in_python.open(call, number=number, tag=tag, signature=signature, on_over=on_over)
        execution = NativeExecution(on_over)
        execution.run = self._native.CallRun(
            self._executor,
            self._compiled_layout(call),
            call.buffer,
            tag=tag,
            tag_step=SLICE_TAGS,
            signature=signature,
            urgency=call.urgency,
            connection_class=call.connection_class,
            number=number,
            on_done=execution.done,
        )
        return execution

    def heard_s(self, peer: int) -> float:
        """Return when a message of ``peer`` last arrived, by the loop's clock; 0 if none did."""
        return max(self._native_transport.heard_s(self._members[peer]), self._in_python.heard_s(peer))

    def _compiled_layout(self, call: CollectiveCall) -> native_peer_transport.Layout:
        """Return the call's layout for compiled code. Training makes the same calls at each step, so it is kept."""
        key = (id(call.schedule), id(call.layout), call.reduction.dtype)
        known = self._layouts.get(key)
        if known is None:
            if len(self._layouts) >= MAX_KEPT:
                self._layouts.clear()
                self._compiled.clear()
            itemsize = call.reduction.itemsize
            compiled = self._native.Layout(
                [self._compile(self._dataflows.of_slice(call.schedule, offsets)) for offsets in call.layout.slices],
                [[offset * itemsize for offset in offsets] for offsets in call.layout.slices],
                call.reduction.dtype,
            )
            known = self._layouts[key] = _Compiled(call.schedule, call.layout, compiled)
        return known.compiled

    def _compile(self, dataflow: Dataflow) -> native_peer_transport.Dataflow:
        known = self._compiled.get(id(dataflow))
        if known is None:
            known = self._compiled[id(dataflow)] = dataflow, self._native.Dataflow(dataflow, self._members)
        return known[1]


class NativeExecution:
    """All slices of one call on their way."""

    __slots__ = ("_on_over", "is_over", "run")

    run: native_peer_transport.CallRun

    def __init__(self, on_over: Callable[[], None]) -> None:
        self._on_over = on_over
        self.is_over = False

    @property
    def has_more(self) -> bool:
        """Whether there are slices that were not begun."""
        return self.run.has_more

    def start(self) -> None:
        """Begin as many slices as there is room for; the others follow."""
        self.run.start()

    def stop(self) -> None:
        """Withdraw: after this nothing is written to the buffer any more, whatever arrives."""
        self.is_over = True
        self.run.stop()

    def awaited_peers(self) -> set[int]:
        """Return who has not delivered yet what may be delivered now."""
        return self.run.awaited_peers()

    def open_peers(self) -> set[int]:
        """Return the ranks that slices under way still have to exchange messages with (-1: none, but work is left)."""
        return self.run.open_peers()

    def done(self) -> None:
        """Pass on that every slice has ended, unless the execution was stopped meanwhile."""
        if not self.is_over:
            self.is_over = True
            self._on_over()


def open_slice_executor(
    fabric: Fabric,
    members: Sequence[int],
    dataflows: Dataflows,
    clock: Clock,
    *,
    max_inflight_bytes: int,
    on_crash: Callable[[Exception], None],
) -> SliceExecutor:
    """Return what executes the calls of an engine on ``fabric``, whose rank k is rank ``members[k]`` of the job."""
    in_python = PythonSliceExecutor(fabric, dataflows, clock, max_inflight_bytes=max_inflight_bytes, on_crash=on_crash)
    if fabric.native_transport is None:
        return in_python
    return NativeSliceExecutor(
        fabric.native_transport, members, dataflows, in_python, max_inflight_bytes=max_inflight_bytes
    )
