"""What the protocol tells the one who drives it to do. The protocol itself does no I/O and no arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from syncline.updates.clustered.messages import Agreed, Contribution, Envelope, Participants, Payload
from syncline.updates.clustered.record_schedule import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a message, with its payload if it has one."""

    peer: int
    envelope: Envelope


@dataclass(frozen=True, slots=True, kw_only=True)
class Enter:
    """This rank now holds ``agreed``: apply it, and provide what the next record needs."""

    record: Record
    agreed: Agreed = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Exchange ``payload`` with the other participants, and report :meth:`Node.finish_outer_round`."""

    record: Record
    participants: Participants
    samples: tuple[float, ...]
    """Of each participant, in their order."""
    payload: Payload = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    """Give up the outer round that runs: its participants are no longer those that are alive."""

    record: Record
    participants: Participants


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """This rank cannot go on; ``accused`` are the ranks at fault."""

    reason: str
    accused: tuple[int, ...]


Instruction = Send | Enter | Run | Abandon | Stop


class Arithmetic(Protocol):
    """How payloads are reckoned with; passed in, so that tests can reckon with symbols."""

    def mean(self, record: Record, contributions: Mapping[int, Contribution]) -> Payload:
        """Return the mean of gradients, weighted by samples, added in rank order."""
