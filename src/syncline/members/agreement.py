"""The agreement on who goes on after a loss: one rank's part in it, as a state machine without I/O.

What each rank knows is a pair: the last epoch that anybody is known to have entered (``base``), and who is lost. Both
only grow, and every rank takes over what it hears, so all come to the same pair, whichever report comes first. It is
agreed when all members that are not in the lost set have reported the same pair; the new epoch has the next number,
and its members are those of the base that are not lost. A rank that has agreed is dragged into the next round by a
report that knows more than it agreed to.

A rank reports only while its training thread rests: then it finishes no call of the old epoch any more, and what it has
finished can be told to the others. A report that comes before interrupts the epoch's calls, so that it comes to rest.

A report says of each lost rank the lowest one that accuses it, and is believed of it or not
(:func:`~syncline.members.is_believed`). All see deaths for themselves. Two sides of a cut do not both go on: it takes a
quorum of the base's members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from syncline.errors import SynclineError, UpdateError, accusing
from syncline.members.epoch import Epoch
from syncline.members.membership import Membership, Quorum, QuorumLostError, describe_ranks, is_believed


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Why a rank is held lost."""

    accuser: int
    """The lowest rank that is known to accuse it."""
    has_left: bool = False
    """Whether all members had been told: then it goes on nowhere else, and counts towards no quorum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank tells the others while it rests."""

    base: Epoch
    """The last epoch that it knows anybody to have entered."""
    losses: Mapping[int, Loss]
    """All that were ever lost on this fabric."""
    first_free: int
    """The first stream that it has not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Effect: send ``report`` to these ranks."""

    peers: tuple[int, ...]
    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt:
    """Effect: end the calls of the current epoch, so that the training thread comes to rest; ``lost`` is one cause."""

    lost: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """Effect: enter ``epoch``; its calls use streams from ``first_stream`` on."""

    epoch: Epoch
    first_stream: int
    lost: Mapping[int, Loss]
    """Who has gone since the epoch before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Effect: this rank does not go on."""

    error: SynclineError


Effect = Tell | Interrupt | Go | Stop
_GIVEN_UP = "it has lost its connection to this rank, or takes it for hung"


@dataclass(slots=True, kw_only=True)
class Agreement:
    """One rank's part; every method takes an event and returns what is to be done, in this order.

    Ranks are numbers on the fabric. After a :class:`Stop` nothing more is said.

    >>> from syncline.members import Epoch
    >>> from syncline.members.agreement import Agreement
    >>> alone = Agreement(rank=0, epoch=Epoch(number=0, members=(0, 1)))
    >>> alone.lose(1)
    []
    >>> told, go = alone.rest(first_free=7)
    >>> told.peers, told.report.base.members  # so that it does not go on too, if it lives
    ((1,), (0,))
    >>> go.epoch.members, go.first_stream
    ((0,), 7)
    """

    rank: int
    epoch: Epoch
    min_ranks: int = 1
    describe: Callable[[int], str] = "rank {}".format
    losses: dict[int, Loss] = field(default_factory=dict)
    """All ranks that were ever lost on this fabric."""
    is_resting: bool = False
    is_over: bool = False
    heard: dict[int, Report] = field(default_factory=dict)
    """The last report of each rank since the last agreement."""
    base: Epoch = field(init=False)
    _first_free: int = 0
    _leaving: set[int] = field(default_factory=set)
    _awaited: set[int] = field(default_factory=set)
    """Those that live and have not said the same: a report changes the place of its sender alone."""
    _accused_by: set[int] = field(default_factory=set)
    """Who holds this rank for lost, as it has heard since the last agreement."""
    _has_learnt: bool = False
    """Somebody was found lost since the training thread rests, or the time was over last."""

    def __post_init__(self) -> None:
        self.base = self.epoch

    @property
    def living(self) -> tuple[int, ...]:
        """The members that are not held lost, as far as is known."""
        return tuple(rank for rank in self.base.members if rank not in self.losses)

    def lose(self, rank: int) -> list[Effect]:
        """Take note that this rank has lost ``rank``, or that it has left by itself."""
        if self.is_over or rank == self.rank:
            return []
        has_grown = self._take(rank, Loss(accuser=self.rank))
        for report in tuple(self.heard.values()):  # some of which may be believed only now
            has_grown |= self._believe(report)
        return self._settle(has_grown)

    def expect_leave(self, rank: int) -> None:
        """Take note that all members know that ``rank`` leaves: however its loss is found, it has left."""
        self._leaving.add(rank)

    def be_given_up(self, peer: int) -> list[Effect]:
        """Take note that ``peer`` has ended its connections to this rank because others told it to.

        So this rank is the lost one, and accuses nobody: who has not heard of it yet might believe that.
        """
        if self.is_over or self.rank not in self.base.members or peer not in self.living:
            return []
        return self._stop(self._fenced(peer, "others have lost their connection to this rank, or take it for hung"))

    def rest(self, *, first_free: int) -> list[Effect]:
        """Take note that the training thread rests: it waits for the agreement, and makes no call of the old epoch."""
        if self.is_over:
            return []
        self.is_resting, self._first_free, self._has_learnt = True, first_free, False
        return self._settle(True)

    def hear(self, peer: int, report: Report) -> list[Effect]:
        """Take the report of another rank."""
        if self.is_over:
            return []
        if report.base.number > self.base.number and self.rank not in report.base.members:
            return self._stop(self._fenced(peer, "the others have gone on without it"))
        if peer in self.losses:  # it lives, but the others have gone on, or will: let it know
            return [Tell(peers=(peer,), report=self._report())] if self.is_resting or self.epoch.number else []
        knew = self.base.number, len(self.losses)
        accused = report.losses.get(self.rank)
        if accused is not None:
            self._accused_by.add(accused.accuser)
            if self._is_believed(self.rank, report):
                return self._stop(self._fenced(accused.accuser, _GIVEN_UP))
        has_grown = report.base.number > self.base.number
        self.base = report.base if has_grown else self.base
        has_grown |= self._believe(report)
        if accused is not None:
            has_grown |= self._take(accused.accuser, Loss(accuser=self.rank))
        if peer not in self.losses:
            self.heard[peer] = report
        if self.is_resting:
            self._compare(peer)
            return self._settle(has_grown)
        is_new = report.base.number >= self.epoch.number or knew != (self.base.number, len(self.losses))
        lost = (rank for rank in report.losses if rank in self.epoch)
        return [Interrupt(lost=min(lost, default=None))] if is_new else []

    def expire(self) -> list[Effect]:
        """Go on without those that have said nothing: the time for the agreement is over.

        Where all have, but somebody was found lost meanwhile, the others may still answer to that, or one of them has
        died since, of which only its silence will tell: they have as much time once more.
        """
        if self.is_over or not self.is_resting:
            return []
        silent = [rank for rank in self.living if rank != self.rank and rank not in self.heard]
        if not silent and self._has_learnt:
            self._has_learnt = False
            return []
        if not silent:
            names = describe_ranks([rank for rank in self.living if rank != self.rank], self.describe)
            return self._stop(
                UpdateError(f"The ranks that are left did not agree in time on who goes on: {names}; start again")
            )
        has_grown = [self._take(rank, Loss(accuser=self.rank)) for rank in silent]
        self._has_learnt = False
        return self._settle(any(has_grown))

    def _believe(self, report: Report) -> bool:
        """Take over what is to be believed of a report; return whether there is more to tell than before."""
        believed = [
            (rank, loss)
            for rank, loss in report.losses.items()
            if rank != self.rank and (rank in self.losses or self._is_believed(rank, report))
        ]
        has_grown = [self._take(rank, loss) for rank, loss in believed]
        return any(has_grown)

    def _is_believed(self, rank: int, report: Report) -> bool:
        """Whether a report is right that ``rank`` is lost, as far as is known here."""
        accuser = report.losses[rank].accuser
        found = (one for one, loss in report.losses.items() if loss.accuser == accuser)
        return is_believed(accuser, rank, found=found, known=self.losses)

    def _take(self, rank: int, loss: Loss) -> bool:
        """Hold a rank lost; return whether that is new."""
        known = self.losses.get(rank, loss)
        has_left = known.has_left or loss.has_left or rank in self._leaving
        is_new = rank not in self.losses
        self.losses[rank] = Loss(accuser=min(known.accuser, loss.accuser), has_left=has_left)
        if not is_new:
            return False
        self._has_learnt = True
        self.heard.pop(rank, None)
        return True

    def _settle(self, has_grown: bool) -> list[Effect]:
        """Stop if too few are left; tell what is new; go on if all say the same."""
        if not self.is_resting:
            return []
        shortage = self._shortage() if has_grown else None
        if shortage is not None and self._accused_by:  # those that it lacks go on without it
            return self._stop(self._fenced(min(self._accused_by), _GIVEN_UP))
        if shortage is not None:
            return self._stop(shortage)
        effects: list[Effect] = []
        if has_grown:
            others = tuple(rank for rank in self.living if rank != self.rank)
            self._awaited = {rank for rank in others if not self._says_the_same(rank)}
            effects = [Tell(peers=others, report=self._report())] if others else []
        if not self._awaited:
            effects += self._go()
        return effects

    def _compare(self, peer: int) -> None:
        """Await ``peer`` or not, after its report."""
        if self._says_the_same(peer):
            self._awaited.discard(peer)
        elif peer in self.base and peer not in self.losses:
            self._awaited.add(peer)

    def _says_the_same(self, rank: int) -> bool:
        report = self.heard.get(rank)
        return (
            report is not None and report.base.number == self.base.number and report.losses.keys() == self.losses.keys()
        )

    def _go(self) -> list[Effect]:
        """Go on; who was left out is told first, as the others may have come to their end before it asks."""
        before = self.base
        self.epoch = Epoch(number=before.number + 1, members=self.living)
        first_stream = max([self._first_free, *(report.first_free for report in self.heard.values())])
        lost = {rank: loss for rank, loss in self.losses.items() if rank in before.members}
        self.base, self.is_resting, self.heard = self.epoch, False, {}
        self._accused_by.clear()
        left_out = tuple(rank for rank, loss in lost.items() if not loss.has_left)
        told: list[Effect] = [Tell(peers=left_out, report=self._report())] if left_out else []
        return [*told, Go(epoch=self.epoch, first_stream=first_stream, lost=lost)]

    def _shortage(self) -> QuorumLostError | None:
        membership = Membership(self.base.members)
        for rank, loss in self.losses.items():
            membership.lose(rank, has_left=loss.has_left)
        return membership.shortage(Quorum(least=self.min_ranks), describe=self.describe)

    def _report(self) -> Report:
        return Report(base=self.base, losses=dict(self.losses), first_free=self._first_free)

    def _fenced(self, by: int, why: str) -> QuorumLostError:
        error = QuorumLostError(
            f"{self.describe(self.rank)} was left behind: {self.describe(by)} tells that {why}; start it again, or let "
            "it join anew",
            missing=tuple(rank for rank in self.epoch.members if rank != self.rank),
        )
        return accusing(error, self.rank)

    def _stop(self, error: SynclineError) -> list[Effect]:
        self.is_over = True
        return [Stop(error=error)]
