"""Epochs: who the members of a job are, from one change to the next; and what a user says of such a job."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from syncline.arguments import Count, check_fields, checked
from syncline.variables import process_variables, switch, whole_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """The members of a job, and how often they have changed; ranks are places in ``members``.

    >>> from syncline.members import Epoch
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """How a training survives the loss of ranks: ``distribute(..., elastic=Elastic(min_ranks=2))``.

    ``min_ranks``: with fewer the job stops, with :class:`QuorumLostError` on every rank that is left. Whatever it is, a
    part of the job goes on only with more than half of the last members, or with half and the lowest of them.

    ``checkpoint``: where ``save_checkpoint`` writes, a folder that all ranks see. If the state of some parameters is
    lost (with ``Sharded()`` that of any rank, with ``Sharded(spares=1)`` that of an owner and its spare), all ranks go
    back to the newest checkpoint there at the end of the step, and ``optimizer.iteration`` goes back too.

    Raises :class:`ConfigurationError` for less than 1.

    >>> model, optimizer = syncline.distribute(
    ...     model, optimizer, syncline.AllReduce(), elastic=syncline.Elastic(min_ranks=1)
    ... )
    """

    min_ranks: Count = 1
    checkpoint: str | Path | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    @checked
    def choose(cls, value: Elastic | bool | None) -> Elastic | None:
        """Return what ``distribute(elastic=...)`` was given as settings; None if the job is not elastic.

        If nothing was said, it is what ``syncline run --elastic --min-ranks`` tells, in two variables.
        """
        if value is None:
            return cls._of_variables(process_variables())
        if isinstance(value, Elastic):
            return value
        return cls() if value else None

    @classmethod
    def _of_variables(cls, values: Mapping[str, str]) -> Elastic | None:
        is_elastic = switch("SYNCLINE_ELASTIC", values.get("SYNCLINE_ELASTIC") or "off")
        min_ranks = whole_number(values, "SYNCLINE_MIN_RANKS", 1)
        return cls(min_ranks=min_ranks) if is_elastic else None
