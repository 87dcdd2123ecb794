"""Who walks a call's slices: :class:`SliceRun` on any fabric, or compiled code where the fabric has compiled wires.

Both do the same, to the bit. What differs is that Python hears of a compiled slice when it has ended, and of none of
its messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from syncline.fabric import Fabric
from syncline.runtime.call import CollectiveCall
from syncline.runtime.clock import Clock
from syncline.runtime.dataflow import Dataflow
from syncline.runtime.dataflows import Dataflows
from syncline.runtime.pool import TemporaryPool
from syncline.runtime.slicerun import SliceRun
from syncline.schedule import Layout, Schedule

if TYPE_CHECKING:
    from syncline.fabric import native_wire
    from syncline.fabric.native_wire import Exchange

MAX_PREPARED = 4096


class Run(Protocol):
    """One slice of one call on its way."""

    num_bytes: int

    def start(self) -> None:
        """Begin what waits for nothing."""

    def stop(self) -> None:
        """Withdraw: after this nothing is written to the buffer any more, whatever arrives."""

    def awaited_peers(self) -> set[int]:
        """Return who has not delivered yet what may be delivered now."""

    def open_peers(self) -> set[int]:
        """Return the ranks that messages still have to be exchanged with."""


class SliceOwner(Protocol):
    """Who is told how a slice goes."""

    def slice_done(self, run: Run) -> None:
        """Take note that every operation of ``run`` has ended."""

    def slice_crashed(self, error: Exception) -> None:
        """Take note that our own code failed; the slice will not go on."""


class Slices(Protocol):
    """Opens the slices of one engine."""

    leave_at_once: bool
    """Whether the first messages of a slice have left when its ``start`` returns."""

    @property
    def temporary_bytes(self) -> int:
        """Bytes of temporaries, in use or kept, now."""

    def open(self, call: CollectiveCall, slice_number: int, *, signature: int, tag: int) -> Run:
        """Return a slice that has not begun."""

    def heard_s(self, peer: int) -> float:
        """Return when a message of ``peer`` last arrived, by the loop's clock; 0 if none did."""


class PythonSlices:
    """Slices in Python, on any fabric."""

    leave_at_once = False

    def __init__(
        self, fabric: Fabric, dataflows: Dataflows, owner: SliceOwner, clock: Clock, *, max_kept_bytes: int
    ) -> None:
        self._fabric = fabric
        self._dataflows = dataflows
        self._owner = owner
        self._clock = clock
        self._pool = TemporaryPool(max_kept_bytes)
        self._heard_s: dict[int, float] = {}

    def __repr__(self) -> str:
        return f"<PythonSlices: {self._pool.used_bytes} bytes of temporaries in use>"

    @property
    def temporary_bytes(self) -> int:
        """Bytes of temporaries, in use or kept, now."""
        return self._pool.used_bytes + self._pool.kept_bytes

    def open(self, call: CollectiveCall, slice_number: int, *, signature: int, tag: int) -> SliceRun:
        """Return a slice that has not begun."""
        return SliceRun(
            call,
            self._dataflows.of_slice(call.schedule, call.layout.slices[slice_number]),
            slice_number,
            signature=signature,
            tag=tag,
            fabric=self._fabric,
            pool=self._pool,
            owner=self._owner,
            on_heard=self._note_heard,
        )

    def heard_s(self, peer: int) -> float:
        """Return when a message of ``peer`` last arrived, by the loop's clock; 0 if none did."""
        return self._heard_s.get(peer, 0.0)

    def _note_heard(self, peer: int) -> None:
        self._heard_s[peer] = self._clock.time()


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What is known of a slice before any call; it keeps what it is filed under alive, so that no id is used again."""

    schedule: Schedule
    layout: Layout
    slice: native_wire.Slice | None
    """None if its numbers are added in Python."""
    num_bytes: int


class NativeSlices:
    """Slices in compiled code; those of numbers that it cannot add are walked in Python."""

    leave_at_once = True

    def __init__(
        self,
        exchange: Exchange,
        members: Sequence[int],
        dataflows: Dataflows,
        in_python: PythonSlices,
        owner: SliceOwner,
        *,
        max_kept_bytes: int,
    ) -> None:
        from syncline.fabric import native_wire  # it is there, since there is an exchange

        self._native = native_wire
        self._exchange = exchange
        self._members = list(members)
        self._dataflows = dataflows
        self._in_python = in_python
        self._owner = owner
        self._pool = native_wire.TemporaryPool(max_kept_bytes)
        self._compiled: dict[int, tuple[Dataflow, native_wire.Dataflow]] = {}
        self._prepared: dict[tuple[int, int, int, str], _Prepared] = {}

    def __repr__(self) -> str:
        return f"<NativeSlices: {self._pool.used_bytes} bytes of temporaries in use>"

    @property
    def temporary_bytes(self) -> int:
        """Bytes of temporaries, in use or kept, now."""
        return self._pool.used_bytes + self._pool.kept_bytes + self._in_python.temporary_bytes

    def open(self, call: CollectiveCall, slice_number: int, *, signature: int, tag: int) -> Run:
        """Return a slice that has not begun."""
        # Training makes the same calls at each step: what can be known of a slice before is kept.
        key = (id(call.schedule), id(call.layout), slice_number, call.reduction.dtype)
        prepared = self._prepared.get(key) or self._prepare(key, call)
        if prepared.slice is None:
            return self._in_python.open(call, slice_number, signature=signature, tag=tag)
        run = NativeRun(self._owner, num_bytes=prepared.num_bytes)
        run.walk = self._native.SliceRun(
            self._exchange,
            prepared.slice,
            self._pool,
            call.buffer,
            tag=tag,
            signature=signature,
            urgency=call.urgency,
            connection_class=call.connection_class,
            on_done=run.done,
        )
        return run

    def heard_s(self, peer: int) -> float:
        """Return when a message of ``peer`` last arrived, by the loop's clock; 0 if none did."""
        return max(self._exchange.heard_s(self._members[peer]), self._in_python.heard_s(peer))

    def _prepare(self, key: tuple[int, int, int, str], call: CollectiveCall) -> _Prepared:
        if len(self._prepared) >= MAX_PREPARED:
            self._prepared.clear()
        offsets = call.layout.slices[key[2]]
        itemsize = call.reduction.itemsize
        compiled = None
        if self._native.can_add(call.reduction.dtype):
            dataflow = self._compile(self._dataflows.of_slice(call.schedule, offsets))
            compiled = self._native.Slice(dataflow, [offset * itemsize for offset in offsets], call.reduction.dtype)
        prepared = _Prepared(call.schedule, call.layout, compiled, num_bytes=(offsets[-1] - offsets[0]) * itemsize)
        self._prepared[key] = prepared
        return prepared

    def _compile(self, dataflow: Dataflow) -> native_wire.Dataflow:
        known = self._compiled.get(id(dataflow))
        if known is None:
            if len(self._compiled) >= MAX_PREPARED:
                self._compiled.clear()
            known = self._compiled[id(dataflow)] = dataflow, self._native.Dataflow(dataflow, self._members)
        return known[1]


class NativeRun:
    """One slice that compiled code walks."""

    __slots__ = ("_is_over", "_owner", "num_bytes", "walk")

    walk: native_wire.SliceRun

    def __init__(self, owner: SliceOwner, *, num_bytes: int) -> None:
        self._owner = owner
        self._is_over = False
        self.num_bytes = num_bytes

    def start(self) -> None:
        """Begin what waits for nothing."""
        self.walk.start()

    def stop(self) -> None:
        """Withdraw: after this nothing is written to the buffer any more, whatever arrives."""
        self._is_over = True
        self.walk.stop()

    def awaited_peers(self) -> set[int]:
        """Return who has not delivered yet what may be delivered now."""
        return self.walk.awaited_peers()

    def open_peers(self) -> set[int]:
        """Return the ranks that messages still have to be exchanged with."""
        return self.walk.open_peers()

    def done(self) -> None:
        """Tell the owner, unless the slice was stopped meanwhile."""
        if not self._is_over:
            self._is_over = True
            self._owner.slice_done(self)


def open_slices(
    fabric: Fabric,
    members: Sequence[int],
    dataflows: Dataflows,
    owner: SliceOwner,
    clock: Clock,
    *,
    max_kept_bytes: int,
) -> Slices:
    """Return who walks the slices of an engine on ``fabric``, whose rank k is rank ``members[k]`` of the job."""
    in_python = PythonSlices(fabric, dataflows, owner, clock, max_kept_bytes=max_kept_bytes)
    if fabric.exchange is None:
        return in_python
    return NativeSlices(fabric.exchange, members, dataflows, in_python, owner, max_kept_bytes=max_kept_bytes)
