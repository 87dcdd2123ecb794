"""A call under way on this rank: what is known of it, and what is still missing."""

from __future__ import annotations

from dataclasses import dataclass, field

from syncline.fabric.slice_executor import Execution
from syncline.runtime.call import Call, Description
from syncline.runtime.clock import Timer
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
