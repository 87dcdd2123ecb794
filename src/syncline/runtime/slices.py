"""Who walks a call's slices: :class:`SliceRun` on any fabric, or compiled code where the fabric has compiled wires.

Both do the same, to the bit. What differs is that Python hears of a compiled slice when it has ended, and of none of
its messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from syncline.fabric import Fabric
from syncline.runtime.call import CollectiveCall
from syncline.runtime.dataflow import Dataflow
from syncline.runtime.pool import TemporaryPool
from syncline.runtime.slicerun import SliceRun

if TYPE_CHECKING:
    from syncline.fabric.native_wire import NativeWiring, Plan
    from syncline.fabric.native_wire import SliceRun as Walk

MAX_PLANS = 4096


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

    def heard(self, peer: int) -> None:
        """Take note that a message of ``peer`` has arrived."""


class Slices(Protocol):
    """Opens the slices of one engine."""

    leave_at_once: bool
    """Whether the first messages of a slice have left when its ``start`` returns."""

    @property
    def temporary_bytes(self) -> int:
        """Bytes of temporaries, in use or kept, now."""

    def open(self, call: CollectiveCall, dataflow: Dataflow, slice_number: int, *, signature: int, tag: int) -> Run:
        """Return a slice that has not begun."""

    def heard_s(self, peer: int) -> float:
        """Return when a message of ``peer`` last arrived that nobody was told of; by the loop's clock."""


class PythonSlices:
    """Slices in Python, on any fabric."""

    leave_at_once = False

    def __init__(self, fabric: Fabric, owner: SliceOwner, *, max_kept_bytes: int) -> None:
        self._fabric = fabric
        self._owner = owner
        self._pool = TemporaryPool(max_kept_bytes)

    def __repr__(self) -> str:
        return f"<PythonSlices: {self._pool.used_bytes} bytes of temporaries in use>"

    @property
    def temporary_bytes(self) -> int:
        """Bytes of temporaries, in use or kept, now."""
        return self._pool.used_bytes + self._pool.kept_bytes

    def open(
        self, call: CollectiveCall, dataflow: Dataflow, slice_number: int, *, signature: int, tag: int
    ) -> SliceRun:
        """Return a slice that has not begun."""
        return SliceRun(
            call,
            dataflow,
            slice_number,
            signature=signature,
            tag=tag,
            fabric=self._fabric,
            pool=self._pool,
            owner=self._owner,
        )

    def heard_s(self, peer: int) -> float:  # noqa: ARG002 - the owner is told of every message
        """Return a time long ago: the owner is told of every message."""
        return 0.0


class NativeSlices:
    """Slices in compiled code; those of numbers that it cannot add are walked in Python."""

    leave_at_once = True

    def __init__(
        self,
        wiring: NativeWiring,
        members: Sequence[int],
        in_python: PythonSlices,
        owner: SliceOwner,
        max_kept_bytes: int,
    ) -> None:
        from syncline.fabric import native_wire  # it can be imported, since there are compiled wires

        self._native = native_wire
        self._wiring = wiring
        self._members = list(members)
        self._in_python = in_python
        self._owner = owner
        self._pool = native_wire.BlockPool(max_kept_bytes)
        self._plans: dict[int, tuple[Dataflow, Plan]] = {}  # by the dataflow's id, which lives as long

    def __repr__(self) -> str:
        return f"<NativeSlices: {self._pool.used_bytes} bytes of temporaries in use>"

    @property
    def temporary_bytes(self) -> int:
        """Bytes of temporaries, in use or kept, now."""
        return self._pool.used_bytes + self._pool.kept_bytes + self._in_python.temporary_bytes

    def open(self, call: CollectiveCall, dataflow: Dataflow, slice_number: int, *, signature: int, tag: int) -> Run:
        """Return a slice that has not begun."""
        if not self._native.can_add(call.reduction.dtype):
            return self._in_python.open(call, dataflow, slice_number, signature=signature, tag=tag)
        offsets = [offset * call.reduction.itemsize for offset in call.layout.slices[slice_number]]
        run = NativeRun(self._wiring, self._owner, num_bytes=offsets[-1] - offsets[0])
        run.walk = self._native.SliceRun(
            self._wiring.exchange,
            self._plan_of(dataflow),
            self._pool,
            call.buffer,
            offsets=offsets,
            dtype=call.reduction.dtype,
            tag=tag,
            signature=signature,
            urgency=call.urgency,
            connection_class=call.connection_class,
            on_done=run.done,
        )
        return run

    def heard_s(self, peer: int) -> float:
        """Return when a message of ``peer`` last arrived that nobody was told of; by the loop's clock."""
        member = self._members[peer]
        return 0.0 if member == self._wiring.rank else self._wiring.exchange.heard_s(member)

    def _plan_of(self, dataflow: Dataflow) -> Plan:
        known = self._plans.get(id(dataflow))
        if known is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            known = self._plans[id(dataflow)] = dataflow, self._native.Plan(dataflow, self._members)
        return known[1]


class NativeRun:
    """One slice that compiled code walks."""

    __slots__ = ("_is_over", "_owner", "_wiring", "num_bytes", "walk")

    walk: Walk

    def __init__(self, wiring: NativeWiring, owner: SliceOwner, *, num_bytes: int) -> None:
        self._wiring = wiring
        self._owner = owner
        self._is_over = False
        self.num_bytes = num_bytes

    def start(self) -> None:
        """Begin what waits for nothing."""
        self.walk.start()
        self._wiring.finish()

    def stop(self) -> None:
        """Withdraw: after this nothing is written to the buffer any more, whatever arrives."""
        self._is_over = True
        self.walk.stop()
        self._wiring.stir()

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


def open_slices(fabric: Fabric, members: Sequence[int], owner: SliceOwner, *, max_kept_bytes: int) -> Slices:
    """Return who walks the slices of an engine on ``fabric``, whose rank k is rank ``members[k]`` of the job."""
    in_python = PythonSlices(fabric, owner, max_kept_bytes=max_kept_bytes)
    if fabric.native is None:
        return in_python
    return NativeSlices(fabric.native, members, in_python, owner, max_kept_bytes)
