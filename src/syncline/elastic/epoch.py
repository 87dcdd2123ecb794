"""Epochs: who the members of a job are, from one change to the next."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """The members of a job, and how often they have changed; ranks are places in ``members``.

    >>> from syncline.elastic import Epoch
    >>> epoch = Epoch(number=1, members=(0, 2, 3))
    >>> epoch.rank_of(3), epoch.world_size
    (2, 3)
    >>> 3 in epoch, 1 in epoch
    (True, False)
    """

    number: int
    """0 at the start."""
    members: tuple[int, ...]
    """Their numbers on the fabric, ascending: those at the start, as long as nobody has joined."""

    @property
    def world_size(self) -> int:
        """How many members there are."""
        return len(self.members)

    def __contains__(self, member: int) -> bool:
        """Whether ``member`` is one, without looking at all of them: it is asked for each report of as many ranks."""
        place = bisect_left(self.members, member)
        return self.members[place : place + 1] == (member,)

    def rank_of(self, member: int) -> int:
        """Return the rank that a member has in this epoch."""
        return self.members.index(member)


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipChange:
    """What ``optimizer.on_membership_change`` tells: a new epoch has begun.

    >>> change = syncline.MembershipChange(epoch=1, members=(0, 2), lost=(1,), joined=(), iteration=12)
    >>> f"{len(change.members)} go on from step {change.iteration}"
    '2 go on from step 12'
    """

    epoch: int
    """Number of the new epoch."""
    members: tuple[int, ...]
    """Who is in it: their numbers at the start of the job; rank k is ``members[k]``."""
    lost: tuple[int, ...]
    """Who has gone since the epoch before, by the same numbers."""
    joined: tuple[int, ...]
    """Who is new."""
    iteration: int
    """The first step that the new members have made together (``optimizer.iteration`` after it)."""
