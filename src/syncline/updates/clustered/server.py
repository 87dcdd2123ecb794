"""The temporary server of one cluster in one term: it collects, reckons the mean, and hands out what is agreed.

    OPENING     not all live members have joined
    LEVELLING   the newest entry is held by other members alone; one of them was asked to send it
    COLLECTING  waiting for the members' contributions to the next entry
    READYING    an exchange: waiting until the servers of all clusters are ready
    EXCHANGING  an exchange runs
    FETCHING    an exchange is over; another server has the result and sends it
    CLOSED      the term's last entry was handed out; it only helps those who lack an exchange's result

It may die in any of them. Its successor begins at OPENING, with nothing but what the members tell it.

Why nothing is lost and nothing comes twice: (1) a member contributes to an entry only when it holds the one before, so
live members differ by one entry at most, and whoever holds the newer one has it to give; (2) the successor opens only
after every live member joined it, and from then on none of them listens to its predecessor: so an entry has one value;
(3) a member takes the entry after its own and no other, so a second copy is refused.
"""

from __future__ import annotations

from enum import Enum

from syncline.updates.clustered.agenda import Agenda, Entry, Kind
from syncline.updates.clustered.council import Council, CouncilState
from syncline.updates.clustered.instructions import Abandon, Arithmetic, Run
from syncline.updates.clustered.member import Member
from syncline.updates.clustered.messages import (
    Agreed,
    Contribution,
    Join,
    Message,
    Participants,
    Payload,
    Ready,
    Supply,
)
from syncline.updates.clustered.view import View


class ServerState(Enum):
    """What a server does; it can die in each."""

    OPENING = "opening"
    LEVELLING = "levelling"
    COLLECTING = "collecting"
    READYING = "readying"
    EXCHANGING = "exchanging"
    FETCHING = "fetching"
    CLOSED = "closed"


_OF_COUNCIL = {
    CouncilState.READYING: ServerState.READYING,
    CouncilState.EXCHANGING: ServerState.EXCHANGING,
    CouncilState.FETCHING: ServerState.FETCHING,
}


class Server:
    """Decides for one rank as its cluster's server in ``term``; what it says is left in ``outbox``."""

    def __init__(
        self, view: View, agenda: Agenda, member: Member, arithmetic: Arithmetic, *, term: int, shares_results: bool
    ) -> None:
        self.term = term
        self.state = ServerState.OPENING
        self.outbox: list[tuple[int, Message]] = []
        self.instructions: list[Run | Abandon] = []
        self._view = view
        self._agenda = agenda
        self._member = member
        self._arithmetic = arithmetic
        self._shares_results = shares_results
        self._positions: dict[int, int] = {}
        self._contributions: dict[int, dict[int, Contribution]] = {}
        self._supplied: tuple[int, int] | None = None
        self._handed_out = -1
        self._councils: dict[int, Council] = {}
        self._early: list[Ready] = []

    def __repr__(self) -> str:
        missing = f", waits for ranks {self.missing()}" if self.missing() else ""
        where = f"rank {self._view.rank} of cluster {self._view.own_cluster(self.term)}, term {self.term}"
        return f"<Server {where}: {self.state.value}{missing}>"

    def missing(self) -> list[int]:
        """Return the members that this server waits for."""
        live = self._view.live_members(self.term)
        if self.state is ServerState.OPENING:
            return [rank for rank in live if rank not in self._positions]
        if self.state is not ServerState.COLLECTING:
            return []
        newest = max(self._positions[rank] for rank in live)
        return [rank for rank in live if rank not in self._contributions.get(newest + 1, {})]

    def join(self, rank: int, message: Join) -> None:
        """Note that a member follows this server."""
        self._positions[rank] = max(self._positions.get(rank, -1), message.index)
        self.advance()

    def contribute(self, rank: int, message: Contribution) -> bool:
        """Take a member's part of an entry; False if that entry is agreed already, or is not of this term."""
        is_stale = message.index <= self._positions.get(rank, -1)
        if is_stale or self._agenda.entry(message.index).term != self.term:
            return False
        self._positions[rank] = message.index - 1
        self._contributions.setdefault(message.index, {})[rank] = message
        self.advance()
        return True

    def hear(self, message: Ready) -> None:
        """Note that another cluster's server is ready for an exchange, perhaps before this one."""
        council = self._councils.get(message.index)
        if council is None:
            self._early.append(message)
            return
        council.hear(message)
        self._decide(council)

    def fetch(self, agreed: Agreed) -> bool:
        """Take a result from a server that has it; False if it is not needed."""
        council = self._councils.get(agreed.index)
        if council is None or council.has_result:
            return False
        council.has_result = True
        self._hand_out(agreed)
        return True

    def finish_exchange(
        self,
        entry: Entry,
        participants: Participants,
        samples: tuple[float, ...],
        result: tuple[Payload, tuple[float, ...]],
    ) -> None:
        """Take the payload of the exchange that was asked for, and the new table of contributions."""
        council = self._councils.get(entry.index)
        if council is None or not council.finish(participants):
            return
        of_cluster = [0.0] * len(self._view.clusters(self.term))
        for (cluster, _), amount in zip(participants, samples, strict=True):
            of_cluster[cluster] = amount
        payload, contributions = result
        self._hand_out(
            Agreed(
                term=self.term,
                index=entry.index,
                samples=tuple(of_cluster),
                contributions=contributions,
                clusters=council.proposal.clusters,
                state=council.proposal.state,
                payload=payload,
            )
        )

    def advance(self) -> None:
        """Go as far as what is known allows."""
        live = self._view.live_members(self.term)
        if any(rank not in self._positions for rank in live):
            self.state = ServerState.OPENING
            return
        newest = min(max(self._positions[rank] for rank in live), self._agenda.last_of_term(self.term))
        if not self._level(live, newest):
            self.state = ServerState.LEVELLING
            return
        self._revive_council(newest)
        entry = self._agenda.entry(newest + 1)
        if entry.term != self.term:
            self.state = ServerState.CLOSED
            return
        self._collect(live, entry)

    def refresh(self) -> None:
        """Someone died: go on without him."""
        for council in tuple(self._councils.values()):
            self._convene(council)
        self.advance()

    def _level(self, live: tuple[int, ...], newest: int) -> bool:
        """Send the newest entry to those who lack it; False if this rank must first get it itself."""
        if self._member.position < newest and self._handed_out < newest:
            holder = next(rank for rank in live if self._positions[rank] >= newest)
            if self._supplied != (newest, holder):
                self._supplied = (newest, holder)
                self.outbox.append((holder, Supply(term=self.term, index=newest)))
            return False
        held = self._member.held(newest)
        for rank in live:
            if self._positions[rank] < newest and held is not None:
                self._positions[rank] = newest
                self.outbox.append((rank, held))
        return True

    def _collect(self, live: tuple[int, ...], entry: Entry) -> None:
        contributions = self._contributions.get(entry.index, {})
        council = self._councils.get(entry.index)
        if council is not None and not council.has_result:
            self.state = _OF_COUNCIL[council.state]
        elif any(rank not in contributions for rank in live):
            self.state = ServerState.COLLECTING
        elif entry.kind is Kind.MEAN:
            samples = sum(contribution.samples for contribution in contributions.values())
            payload = self._arithmetic.mean(entry, contributions)
            self._hand_out(Agreed(term=self.term, index=entry.index, samples=(samples,), payload=payload))
        else:
            self._open_council(entry, has_result=False)

    def _hand_out(self, agreed: Agreed) -> None:
        self._contributions.pop(agreed.index, None)
        self._handed_out = agreed.index
        if self._agenda.entry(agreed.index).is_exchange:
            self._councils = {index: council for index, council in self._councils.items() if index >= agreed.index}
        for rank in self._view.live_members(self.term):
            self._positions[rank] = agreed.index
            self.outbox.append((rank, agreed))
        self.advance()

    def _revive_council(self, newest: int) -> None:
        """Take the seat of a predecessor: its last exchange is over here, but maybe not in all clusters."""
        entry = self._agenda.last_exchange(newest) if newest >= 0 else None
        if entry is None or entry.term != self.term or entry.index in self._councils:
            return
        if self._member.position >= entry.index and not any(index > entry.index for index in self._councils):
            self._open_council(entry, has_result=True)

    def _open_council(self, entry: Entry, *, has_result: bool) -> None:
        contributions = self._contributions.get(entry.index, {})
        council = Council(
            self._view,
            entry,
            self._member.provided[entry.index],
            readings={rank: message.reading for rank, message in contributions.items() if message.reading},
            has_result=has_result,
            is_shared=self._shares_results or entry.kind is Kind.AVERAGE,
        )
        self._councils[entry.index] = council
        for message in self._early:
            if message.index == entry.index:
                council.hear(message)
        self._early = [message for message in self._early if message.index > entry.index]
        self._convene(council)

    def _finish_alone(self, run: Run) -> None:
        """Finish where no cluster is left, or none has anything, to exchange: nothing changes, nor does the table."""
        held = self._member.result
        self.finish_exchange(
            run.entry, run.participants, run.samples, (None, () if held is None else held.contributions)
        )

    def _convene(self, council: Council) -> None:
        abandoned, messages = council.refresh()
        self.instructions += abandoned
        self.outbox += messages
        self._decide(council)

    def _decide(self, council: Council) -> None:
        runs, receivers = council.decide()
        for run in runs:
            if len(run.participants) == 1 or (run.entry.kind is Kind.RESULT and not any(run.samples)):
                self._finish_alone(run)
            else:
                self.instructions.append(run)
        held = self._member.held(council.entry.index)
        self.outbox += [(server, held) for server in receivers if held is not None]
        if not council.has_result:
            self.state = _OF_COUNCIL[council.state]
