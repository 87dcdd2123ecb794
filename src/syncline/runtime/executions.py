"""From calls to their executions: slices of a collective for the executor, or direct messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from syncline.errors import ConfigurationError
from syncline.fabric import Transport
from syncline.fabric.slice_executor import Execution, SlicedCall, SliceExecutor
from syncline.runtime.call import Call, CollectiveCall, Description
from syncline.runtime.dataflow import Dataflows
from syncline.runtime.direct import DirectCall, DirectExecution
from syncline.runtime.loop import Timer
from syncline.runtime.tags import check_tags_fit, first_tag
from syncline.runtime.work import Work


@dataclass(slots=True, kw_only=True, eq=False)
class ActiveCall:
    """What the engine knows of one call. ``number`` is its running number in its stream."""

    call: Call
    number: int
    peers: frozenset[int]
    """All ranks that this one exchanges messages with."""
    description: Description
    work: Work
    started_s: float
    started_ns: int
    is_agreed: bool
    """Whether the rank before is known to have made the same call."""
    execution: Execution | None = None
    """Its slices or messages; None if there is nothing to move."""
    timer: Timer | None = None
    awaited: dict[int, frozenset[int]] = field(default_factory=dict)
    """For each rank that said so, whom it waits for."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do or to learn."""
        return self.is_agreed and (self.execution is None or self.execution.is_over)

    def needs(self, peer: int, predecessor: int) -> bool:
        """Whether anything is still to be exchanged with ``peer``."""
        if peer == predecessor and not self.is_agreed:
            return True
        if self.execution is None or self.execution.is_over:
            return False
        return (self.execution.has_more and peer in self.peers) or peer in self.execution.open_peers()

    def awaited_peers(self, predecessor: int) -> frozenset[int]:
        """Return who has not delivered: data, or else the memory of what was sent, or else the agreement."""
        peers = (
            set() if self.execution is None else self.execution.awaited_peers() or self.execution.open_peers() - {-1}
        )
        if not self.is_agreed:
            peers.add(predecessor)
        return frozenset(peers)

    def stop(self) -> None:
        """Withdraw every slice, so that nothing is written to the buffer any more."""
        if self.timer is not None:
            self.timer.cancel()
        if self.execution is not None:
            self.execution.stop()


Mismatched = Callable[[ActiveCall, int, int, int], None]
"""Told (call, peer, tag, received signature)."""


class Executions:
    """Opens the executions of one engine's calls on its fabric; what the engine must know of them before, too."""

    def __init__(
        self,
        fabric: Transport,
        executor: SliceExecutor,
        *,
        on_over: Callable[[ActiveCall], None],
        on_mismatch: Mismatched,
    ) -> None:
        self._fabric = fabric
        self._executor = executor
        self._dataflows = Dataflows(fabric.rank)
        self._on_over = on_over
        self._on_mismatch = on_mismatch
        self._num_sliced = 0

    def check(self, call: Call) -> None:
        """Raise :class:`ConfigurationError` if ``call`` is not for these ranks, or its messages cannot be numbered."""
        num_slices = num_messages = 1
        if isinstance(call, CollectiveCall):
            self._check_ranks(call)
            num_slices, num_messages = call.num_slices, self._dataflows.facts(call.schedule).num_indices
        check_tags_fit(label=call.what, stream=call.stream, num_slices=num_slices, num_messages=num_messages)

    def _check_ranks(self, call: CollectiveCall) -> None:
        if call.schedule.num_ranks != self._fabric.world_size:
            raise ConfigurationError(
                f"{call.what}: the schedule is for {call.schedule.num_ranks} ranks but the job has "
                f"{self._fabric.world_size}; plan on the job's own topology"
            )

    def peers(self, call: Call) -> frozenset[int]:
        """Return all ranks that this one exchanges messages with in ``call``."""
        if isinstance(call, CollectiveCall):
            return self._dataflows.facts(call.schedule).peers
        assert isinstance(call, DirectCall), f"{call.what} is of no kind that can be run"
        return call.peers

    def open(self, active: ActiveCall) -> Execution | None:
        """Return what moves the bytes of a call, not begun yet; None if there is nothing to move."""
        call = active.call
        tag, signature = first_tag(call.stream, active.number, 0), active.description.signature
        on_over, on_mismatch = partial(self._on_over, active), partial(self._on_mismatch, active)
        if not active.peers:
            return None
        if isinstance(call, DirectCall):
            return DirectExecution(
                self._fabric, call, tag=tag, signature=signature, on_over=on_over, on_mismatch=on_mismatch
            )
        assert isinstance(call, CollectiveCall), f"{call.what} is of no kind that can be run"
        if not call.num_slices:
            return None
        self._num_sliced += 1
        sliced = SlicedCall(
            slices=self._dataflows.slices(call.schedule, call.layout),
            buffer=call.buffer,
            reduction=call.reduction,
            urgency=call.urgency,
            connection_class=call.connection_class,
            number=self._num_sliced,
            tag=tag,
            signature=signature,
            on_over=on_over,
            on_mismatch=on_mismatch,
        )
        return self._executor.open(sliced)
