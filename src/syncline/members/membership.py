"""Who is in a job, who is lost and since when, whether those who are left may go on, and who takes over from whom.

Each rank finds losses by itself and tells the others, who believe it or not (:mod:`~syncline.members.belief`). What is
known only grows, so all come to the same membership, whichever report comes first.

A rank cannot tell a death from a cut of the network, so those in reach go on only where they cannot do so elsewhere
too: with more than half of the members that have not left by themselves, or with exactly half of them and the lowest
among these. A user may ask for another part, or for a fixed number; with less than half, both sides of a cut go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from syncline.errors import DeadlineError, PeerLostError, UpdateError

LOSSES = (PeerLostError, DeadlineError)
"""What a collective ends with where a rank is lost, or does not come."""
HALF = 0.5
"""The smallest part of which no two parts of a job both go on."""


class QuorumLostError(UpdateError):
    """Fewer members live, or are in reach, than it takes to go on; ``missing`` are the ranks that are lost.

    ``step()`` raises it on the training thread, with :class:`Overlapped` and :class:`Clustered`: start again from a
    checkpoint (``distribute(..., save_on_failure=...)`` has written one).

    >>> from syncline.members import Membership, Quorum
    >>> membership = Membership((0, 1, 2))
    >>> membership.lose(1), membership.lose(2)
    (True, True)
    >>> membership.shortage(Quorum()).missing
    (1, 2)
    """

    def __init__(self, message: str, *, missing: tuple[int, ...]) -> None:
        super().__init__(message)
        self.missing = self.ranks_at_fault = missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum:
    """How many must live: this ``part`` of the members that have not left, and ``least`` of all."""

    part: float = HALF
    least: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LostRank:
    """How a rank was lost; ``since_s`` is in seconds of the membership's clock."""

    error: Exception | None
    has_left: bool
    since_s: float


@dataclass(slots=True)
class Membership:
    """What one rank knows of a job's members; the ranks that are lost may be more, such as those that only serve."""

    members: tuple[int, ...]
    losses: dict[int, LostRank] = field(default_factory=dict)
    """In the order in which they were found."""
    clock: Callable[[], float] = time.monotonic

    @property
    def lost(self) -> AbstractSet[int]:
        """The ranks that are lost; a live view."""
        return self.losses.keys()

    @property
    def living(self) -> tuple[int, ...]:
        """The members that are not known to be lost."""
        return tuple(rank for rank in self.members if rank not in self.losses)

    def lose(self, rank: int, error: Exception | None = None, *, has_left: bool = False) -> bool:
        """Note that ``rank`` is lost, or has left by itself; False if that is known."""
        known = self.losses.get(rank)
        if known is None:
            self.losses[rank] = LostRank(error=error, has_left=has_left, since_s=self.clock())
        else:  # others may have told of it
            self.losses[rank] = replace(known, error=known.error or error)
        return known is None

    def describe_lost(self, describe: Callable[[int], str]) -> str:
        """``"; lost before: rank 3 (host b1), 12.0 s ago"``, for the end of an error; empty if nobody is."""
        now_s = self.clock()
        told = [f"{describe(rank)}, {now_s - loss.since_s:.1f} s ago" for rank, loss in self.losses.items()]
        return f"; lost before: {'; '.join(told)}" if told else ""

    def shortage(
        self, quorum: Quorum, *, what: str = "ranks", describe: Callable[[int], str] = "rank {}".format
    ) -> QuorumLostError | None:
        """Return why those who are left cannot go on, if they cannot; ``what`` the members are called."""
        living = self.living
        base = [rank for rank in self.members if rank not in self.losses or not self.losses[rank].has_left]
        is_tie = quorum.part >= HALF and 2 * len(living) == len(base)
        if len(living) < quorum.part * len(base) or (is_tie and base[:1] != [*living[:1]]):
            fewer = f"fewer than the quorum of {quorum.part:g}"
            rule = "only more than half go on, or half with the lowest rank" if quorum.part == HALF else fewer
            missing = tuple(rank for rank in base if rank in self.losses)
            text = (
                f"{len(living)} of {len(base)} {what} are in reach: {describe_ranks(missing, describe)} lost, who may "
                f"live and go on elsewhere; {rule}; start again from a checkpoint"
            )
        elif len(living) < quorum.least:
            missing = tuple(rank for rank in self.members if rank in self.losses)
            text = (
                f"A global gradient needs {quorum.least} of {len(self.members)} {what}, but {len(living)} are left: "
                f"{describe_ranks(missing, describe)} lost; start again from a checkpoint, or with a smaller quorum"
            )
        else:
            return None
        return QuorumLostError(text, missing=missing)


def successor(order: Iterable[int], lost: Collection[int]) -> int | None:
    """Return who serves: the first of ``order``, in which all ranks agree, that lives; None if nobody does."""
    return next((rank for rank in order if rank not in lost), None)


def describe_ranks(ranks: Sequence[int], describe: Callable[[int], str]) -> str:
    """``"rank 1 (host a1) and rank 3 (host b1)"``."""
    names = [describe(rank) for rank in ranks]
    if len(names) <= 1:
        return "".join(names) or "nobody"
    return f"{', '.join(names[:-1])} and {names[-1]}"
