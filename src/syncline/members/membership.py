"""Who is in a job, who is lost and since when, whether those who are left may go on, and who takes over from whom.

Each rank finds losses by itself and tells the others, who believe it or not. What is known only grows, so all come to
the same membership, whichever report comes first.

Ranks do not vote on who is lost. Of two that live and have lost each other, *the one of the higher number is lost*, for
all; so a teller is believed only of ranks above its own. And who has lost a rank below its own that lives, as far as is
known here, is the lost one of the two. Those who have heard that already give it up, and it takes them for lost in
turn; whoever has not heard it yet must not believe that. :func:`is_believed` is this rule, for everything that is told
of losses; :class:`News` keeps what is told one by one, as on a fabric, until the rank below is found lost here as well.

Who believes passes it on. A rank below the lost one does so in its own name; one above it, which would not be believed,
names the *accuser*, whose word it took. That is believed once the accuser is lost here: it cannot tell of it any more.
As long as it lives, it tells of it itself, or it is a lie.

A rank cannot tell a death from a cut of the network, so those in reach go on only where they cannot do so elsewhere
too: with more than half of the members that have not left by themselves, or with exactly half of them and the lowest
among these. A user may ask for another part, or for a fixed number; with less than half, both sides of a cut go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

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


class Quorum(NamedTuple):
    """How many must live: this ``part`` of the members that have not left, and ``least`` of all."""

    part: float = HALF
    least: int = 0


class LostRank(NamedTuple):
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
            self.losses[rank] = known._replace(error=known.error or error)
        return known is None

    @property
    def newest_loss(self) -> tuple[int, Exception] | None:
        """Who was lost last, and how, of those of whom that is known."""
        known = ((rank, loss.error) for rank, loss in reversed(self.losses.items()) if loss.error is not None)
        return next(known, None)

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


def is_believed(accuser: int, lost: int, *, found: Iterable[int] = (), known: Collection[int] = ()) -> bool:
    """Whether ``accuser`` is right that ``lost`` is, where ``known`` are known to be; ``found``: all that it accuses.

    >>> is_believed(1, 2), is_believed(2, 1), is_believed(2, 2)  # the last says that it ends itself
    (True, False, True)
    >>> is_believed(1, 2, found=[0, 2]), is_believed(1, 2, found=[0, 2], known={0})  # rank 0 lives, or it is dead
    (False, True)
    """
    return accuser <= lost and all(one in known for one in found if one < accuser)


class News:
    """What others have told one rank of losses.

    >>> news = News()
    >>> news.hear(2, 0, known=set()), news.hear(2, 3, known=set())  # rank 2 has lost 0, which lives; then it tells of 3
    (False, False)
    >>> list(news.find(known={0}))  # rank 0 is dead after all
    [(2, 3)]
    >>> news.hear(5, 4, accuser=1, known={0})  # rank 5 took the word of rank 1, which has not told it here
    False
    >>> list(news.find(known={0, 1}))
    [(1, 4)]
    """

    def __init__(self) -> None:
        self._found_below: dict[int, set[int]] = {}
        """Whom a teller accuses of the ranks below it."""
        self._kept: dict[tuple[int, int], int] = {}
        """On whose word a teller holds a rank for lost."""

    def hear(self, teller: int, lost: int, *, known: AbstractSet[int], accuser: int | None = None) -> bool:
        """Whether to believe ``teller`` now that ``lost`` is lost; ``known`` are those that are known to be.

        ``accuser`` is whose word the teller took, if not its own.
        """
        if accuser is None:
            accuser = teller
        if is_believed(accuser, lost):
            if self._counts(teller, accuser, lost, known):
                return True
            self._kept[teller, lost] = accuser
        elif accuser == teller:
            self._found_below.setdefault(teller, set()).add(lost)
        return False

    def find(self, *, known: AbstractSet[int]) -> Iterator[tuple[int, int]]:
        """Yield who accuses whom in what was kept and can be believed now, the lowest lost rank first.

        ``known`` may grow with each of them: what was told by a rank that is lost itself is not believed any more, as
        nobody who is left shares its view.
        """
        while True:
            self._kept = {told: accuser for told, accuser in self._kept.items() if known.isdisjoint(told)}
            found = [
                (lost, teller)
                for (teller, lost), accuser in self._kept.items()
                if self._counts(teller, accuser, lost, known)
            ]
            if not found:
                return
            lost, teller = min(found)
            yield self._kept.pop((teller, lost)), lost

    def _counts(self, teller: int, accuser: int, lost: int, known: AbstractSet[int]) -> bool:
        """Whether to believe the accuser now, if the word is its own or it cannot tell of it any more."""
        is_its_word = accuser == teller or accuser in known
        return is_its_word and is_believed(accuser, lost, found=self._found_below.get(accuser, ()), known=known)
