"""Executes slices in compiled code (``native/slice_executor.hpp``), which begins them and tells when all is over.

The engine hears of an execution when it is over, and Python of none of its slices and messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from syncline.fabric import _native
from syncline.fabric.slice_executor import (
    CALL_TAGS,
    SLICE_TAGS,
    Dataflow,
    Execution,
    Reduction,
    SlicedCall,
    SliceExecutor,
    Slices,
)

MAX_KEPT = 1024
"""Layouts, and dataflows for them, that are kept for the next call of their kind."""

Mismatched = Callable[[int, int, int], None]
"""Told (peer, tag, received signature)."""


class CompiledSliceExecutor:
    """Executes calls on a native transport; those whose reduction is not compiled are left to ``reference``.

    Each of the two has the bound for itself. Rank k of a call is ``ranks[k]`` of the native transport, which tells of a
    mismatch who stands in ``mismatched`` for the call, by its first tag in units of CALL_TAGS.
    """

    def __init__(
        self,
        native_transport: _native.NativeTransport,
        reference: SliceExecutor,
        ranks: Sequence[int],
        *,
        mismatched: dict[int, Mismatched],
    ) -> None:
        self._native_transport = native_transport
        self._reference = reference
        self._ranks = list(ranks)
        self.mismatched = mismatched
        self.max_inflight_bytes = reference.max_inflight_bytes
        self._pool = _native.TemporaryPool(2 * self.max_inflight_bytes)
        self._executor = _native.SliceExecutor(native_transport, self._pool, self.max_inflight_bytes)
        self._layouts: dict[tuple[int, str, str], tuple[Slices, _native.Layout]] = {}
        self._dataflows: dict[int, tuple[Dataflow, _native.Dataflow]] = {}

    def __repr__(self) -> str:
        in_use = f"{self._pool.used_bytes} temporary bytes in use"
        return f"<CompiledSliceExecutor: {self.num_active_slices} slices, {in_use}>"

    @property
    def num_active_slices(self) -> int:
        """Slices under way, now."""
        return self._executor.num_active_slices + self._reference.num_active_slices

    @property
    def inflight_bytes(self) -> int:
        """Bytes of the slices under way, now."""
        return self._executor.inflight_bytes + self._reference.inflight_bytes

    @property
    def temporary_bytes(self) -> int:
        """Bytes of temporaries, in use or kept, now."""
        return self._pool.used_bytes + self._pool.kept_bytes + self._reference.temporary_bytes

    def open(self, call: SlicedCall) -> Execution:
        """Return an execution that has not begun."""
        if not _native.can_add(call.reduction.dtype, call.reduction.op):
            return self._reference.open(call)
        return CompiledExecution(self, call)

    def heard_s(self, peer: int) -> float:
        """Return when a message of ``peer`` last arrived, by the loop's clock; 0 if none did."""
        return max(self._native_transport.heard_s(self._ranks[peer]), self._reference.heard_s(peer))

    def compile(self, call: SlicedCall, on_done: Callable[[], None]) -> _native.CallRun:
        """Return ``call`` as compiled code runs it."""
        return _native.CallRun(
            self._executor,
            self._layout(call.slices, call.reduction),
            call.buffer,
            tag=call.tag,
            tag_step=SLICE_TAGS,
            signature=call.signature,
            urgency=call.urgency,
            connection_class=call.connection_class,
            number=call.number,
            on_done=on_done,
        )

    def place_of(self, rank: int) -> int:
        """Return which rank of the calls a rank of the native transport is."""
        return self._ranks.index(rank)

    def _layout(self, slices: Slices, reduction: Reduction) -> _native.Layout:
        """Return the slices for compiled code. Training makes the same calls at each step, so they are kept.

        What an entry is filed under is kept alive in it, so that no id is used again.
        """
        key = id(slices), reduction.dtype, reduction.op
        known = self._layouts.get(key)
        if known is None:
            if len(self._layouts) >= MAX_KEPT:
                self._layouts.clear()
                self._dataflows.clear()
            dataflows = [self._dataflow(dataflow) for dataflow, _ in slices]
            offsets = [[offset * reduction.itemsize for offset in offsets] for _, offsets in slices]
            layout = _native.Layout(dataflows, offsets, reduction.dtype, reduction.op)
            known = self._layouts[key] = slices, layout
        return known[1]

    def _dataflow(self, dataflow: Dataflow) -> _native.Dataflow:
        known = self._dataflows.get(id(dataflow))
        if known is None:
            known = self._dataflows[id(dataflow)] = dataflow, _native.Dataflow(dataflow, self._ranks)
        return known[1]


class CompiledExecution:
    """All slices of one call on their way."""

    __slots__ = ("_call", "_executor", "_run", "is_over")

    def __init__(self, executor: CompiledSliceExecutor, call: SlicedCall) -> None:
        self._executor = executor
        self._call = call
        self._run = executor.compile(call, self._done)
        self.is_over = False

    @property
    def has_more(self) -> bool:
        """Whether there are slices that were not begun."""
        return self._run.has_more

    def start(self) -> None:
        """Begin as many slices as there is room for; the others follow."""
        self._executor.mismatched[self._call.tag // CALL_TAGS] = self._mismatched
        self._run.start()

    def stop(self) -> None:
        """Withdraw: after this nothing is written to the buffer any more, whatever arrives."""
        self._end()
        self._run.stop()

    def awaited_peers(self) -> set[int]:
        """Return who has not delivered yet what may be delivered now."""
        return self._run.awaited_peers()

    def open_peers(self) -> set[int]:
        """Return the ranks that slices under way still have to exchange messages with (-1: none, but work is left)."""
        return self._run.open_peers()

    def _done(self) -> None:
        if not self.is_over:  # else it was stopped meanwhile
            self._end()
            self._call.on_over()

    def _end(self) -> None:
        self.is_over = True
        self._executor.mismatched.pop(self._call.tag // CALL_TAGS, None)

    def _mismatched(self, rank: int, tag: int, received: int) -> None:
        self._call.on_mismatch(self._executor.place_of(rank), tag, received)
