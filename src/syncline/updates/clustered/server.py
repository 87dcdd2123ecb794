"""A member of a cluster, and its temporary server in one term.

Every rank is a member: it contributes to one record at a time and takes what is agreed. It keeps the newest mean and
the newest result, until the next of its kind. That is all that a cluster needs to go on when its server dies: whoever
is drawn next hears from every member which record it holds, gets the newest one if it lacks that, and sends it to the
others who do. A member follows the server of the term that its next record belongs to, and beside it that of its newest
outer round: until the next outer round is agreed, other clusters may still lack the last one and ask for it.

The server collects, reckons the mean, and hands out what is agreed:

    OPENING     not all live members have joined
    LEVELLING   the newest record is held by other members alone; one of them was asked to send it
    COLLECTING  waiting for the members' contributions to the next record
    READYING    an outer round: waiting until the servers of all clusters are ready
    AVERAGING  an outer round runs
    FETCHING    an outer round is over; another server has the result and sends it
    CLOSED      the term's last record was handed out; it only helps those who lack an outer round's result

It may die in any of them. Its successor begins at OPENING, with nothing but what the members tell it.

Why nothing is lost and nothing comes twice: (1) a member contributes to a record only when it holds the one before, so
live members differ by one record at most, and whoever holds the newer one has it to give; (2) the successor opens only
after every live member joined it, and from then on none of them listens to its predecessor: so a record has one value;
(3) a member takes the record after its own and no other, so a second copy is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum

from syncline.updates.clustered.messages import (
    Abandon,
    Agreed,
    Clusters,
    Contribution,
    Join,
    Kind,
    Mean,
    Measurement,
    Message,
    Participants,
    Payload,
    Provided,
    Ready,
    Record,
    RecordSchedule,
    Run,
    Supply,
)
from syncline.updates.clustered.view import View

COMPUTING = "computing"
_AWAITING = {
    Kind.MEAN: "awaiting the mean",
    Kind.RESULT: "awaiting the outer round's result",
    Kind.AVERAGE: "awaiting the average of the parameters",
}


class Member:
    """Decides for one rank as a member; messages come back as (receiver, message)."""

    def __init__(self, view: View, record_schedule: RecordSchedule) -> None:
        self._view = view
        self._record_schedule = record_schedule
        self.position = -1
        self.provided: dict[int, Provided] = {}
        self.mean: Agreed | None = None
        self.result: Agreed | None = None
        self._followed: dict[int, int] = {}
        self._contributed: tuple[int, int] | None = None

    def __repr__(self) -> str:
        return f"<Member rank {self._view.rank}: holds record {self.position}, {self.state}>"

    @property
    def next_record(self) -> Record:
        """The record that this member needs."""
        return self._record_schedule.record(self.position + 1)

    @property
    def state(self) -> str:
        """What it does."""
        return _AWAITING[self.next_record.kind] if self.position + 1 in self.provided else COMPUTING

    @property
    def oldest_term(self) -> int:
        """The oldest term that still matters: messages of terms before it are refused."""
        if self.position < 0:
            return 0
        newest_outer_round = self._record_schedule.last_outer_round(self.position)
        held = self._record_schedule.record(self.position)
        return held.term if newest_outer_round is None else newest_outer_round.term

    def provide(self, provided: Provided) -> list[tuple[int, Message]]:
        """Contribute to the next record."""
        self.provided[self.position + 1] = provided
        return self.follow()

    def take(self, agreed: Agreed) -> bool:
        """Take a record if it is the next one; False if it is not needed."""
        if agreed.index != self.position + 1 or agreed.index not in self.provided:
            return False
        self.position = agreed.index
        if self._record_schedule.record(agreed.index).is_outer_round:
            self.result = agreed
            # Other clusters may still need what this one brought to its newest outer round, and nothing older.
            self.provided = {index: kept for index, kept in self.provided.items() if index == agreed.index}
        else:
            self.mean = agreed
            del self.provided[agreed.index]
        return True

    def follow(self) -> list[tuple[int, Message]]:
        """Join the servers that are not joined yet, and contribute to the one who needs it."""
        messages: list[tuple[int, Message]] = []
        terms = {self.oldest_term, self.next_record.term}
        self._followed = {term: server for term, server in self._followed.items() if term in terms}
        for term in sorted(terms):
            server = self._view.own_server(term)
            if self._followed.get(term) != server:
                self._followed[term] = server
                messages.append((server, Join(term=term, index=self.position)))
        return messages + self._contribute()

    def held(self, index: int) -> Agreed | None:
        """Return a record if this member still keeps it."""
        return next((agreed for agreed in (self.mean, self.result) if agreed and agreed.index == index), None)

    def _contribute(self) -> list[tuple[int, Message]]:
        record = self.next_record
        provided = self.provided.get(record.index)
        server = self._followed[record.term]
        if provided is None or self._contributed == (record.index, server):
            return []
        self._contributed = (record.index, server)
        payload = provided.payload if record.kind is Kind.MEAN else None
        message = Contribution(
            term=record.term,
            index=record.index,
            samples=provided.samples,
            measurement=provided.measurement,
            told=provided.told,
            payload=payload,
        )
        return [(server, message)]


class ServerState(Enum):
    """What a server does; it can die in each."""

    OPENING = "opening"
    LEVELLING = "levelling"
    COLLECTING = "collecting"
    READYING = "readying"
    AVERAGING = "exchanging"
    FETCHING = "fetching"
    CLOSED = "closed"


class OuterRound:
    """An outer round, as one cluster's server sees it: who takes part, who has the result, and what is to be done.

    Each server tells all others that it is *ready*, naming the participants that it knows of and whether it has the
    result. Once it heard so from all of them, for the same participants, it knows what they all know, and decides as
    they all do:

    - nobody has the result: they exchange;
    - some have it: the first of them sends it to those who lack it;
    - everybody has it: nothing is to be done.

    When a participant dies its cluster draws another one, or is dead as a whole; either way the participants are
    others, and all servers start over with being ready. A server that was done says so again: so whoever was left
    behind is helped, and what one cluster has applied all will apply. What a cluster brings to an outer round is held
    by all its members before its server is ready; therefore its next server brings the very same.
    """

    def __init__(
        self,
        view: View,
        record: Record,
        provided: Provided,
        *,
        measurements: Mapping[int, Measurement],
        told: tuple[int, ...],
        has_result: bool,
    ) -> None:
        """``told`` is what the cluster's lowest rank tells of the job's members."""
        self.record = record
        self.has_result = has_result
        self._view = view
        self._cluster = view.own_cluster(record.term)
        self.clusters: Clusters = ()
        """Those of the next term, as the first participant proposed; none: the same."""
        self.told_to_all: tuple[int, ...] = ()
        """What the lowest rank of all tells of the job's members."""
        self._told = told
        self._provided = provided
        self._measurements = tuple(sorted(measurements.items()))
        self._announced: Participants | None = None
        self._heard: dict[Participants, dict[int, Ready]] = {}
        self._decided: Participants | None = None
        self._running: Run | None = None

    def __repr__(self) -> str:
        return f"<OuterRound of record {self.record.index}: {self.state.value}>"

    @property
    def state(self) -> ServerState:
        """How far it is, until it has a result."""
        if self._running is not None:
            return ServerState.AVERAGING
        return ServerState.READYING if self._decided != self._announced else ServerState.FETCHING

    def refresh(self) -> tuple[list[Abandon], list[tuple[int, Ready]]]:
        """Be ready for those who take part now, if they are others than before."""
        participants = self._view.participants(self.record.term)
        if participants == self._announced:
            return [], []
        abandoned = [] if self._running is None else [Abandon(run=self._running)]
        self._running = None
        self._announced = participants
        ready = Ready(
            term=self.record.term,
            index=self.record.index,
            cluster=self._cluster,
            participants=participants,
            samples=self._provided.samples,
            has_result=self.has_result,
            measurements=self._measurements,
            clusters=self._provided.clusters,
            told=self._told,
        )
        self.hear(ready)
        return abandoned, [(server, ready) for _, server in participants if server != self._view.rank]

    def hear(self, ready: Ready) -> None:
        """Note what a server said. A server says it once for each set of participants."""
        self._heard.setdefault(ready.participants, {})[ready.cluster] = ready

    def decide(self) -> tuple[list[Run], list[int]]:
        """Return what is to be done once all are ready: run the outer round, or send the result to some servers."""
        assert self._announced is not None
        said = self._heard.get(self._announced, {})
        if self._decided == self._announced or len(said) < len(self._announced):
            return [], []
        self._decided = self._announced
        servers = dict(self._announced)
        lacking = [cluster for cluster in servers if not said[cluster].has_result]
        holders = [cluster for cluster in servers if said[cluster].has_result]
        if holders:
            return [], [servers[cluster] for cluster in lacking] if self._cluster == holders[0] else []
        self.clusters = said[self._announced[0][0]].clusters
        self.told_to_all = min(said[cluster].told for cluster in servers)
        samples = tuple(said[cluster].samples for cluster in servers)
        payload = self._provided.payload
        self._running = Run(record=self.record, participants=self._announced, samples=samples, payload=payload)
        return [self._running], []

    def finish(self, run: Run) -> bool:
        """Note that a run is over; whether its result is this cluster's."""
        if self._running != run:
            return False
        self._running = None
        is_new = not self.has_result
        self.has_result = True
        return is_new


class Server:
    """Decides for one rank as its cluster's server in ``term``; says so with ``post``, and has it done with ``do``."""

    def __init__(
        self,
        view: View,
        record_schedule: RecordSchedule,
        member: Member,
        mean: Mean,
        *,
        term: int,
        post: Callable[[Iterable[tuple[int, Message]]], None],
        do: Callable[[Run | Abandon], None],
    ) -> None:
        self.term = term
        self.state = ServerState.OPENING
        self._post = post
        self._do = do
        self._view = view
        self._record_schedule = record_schedule
        self._member = member
        self._mean = mean
        self._positions: dict[int, int] = {}
        self._contributions: dict[int, dict[int, Contribution]] = {}
        self._supplied: tuple[int, int] | None = None
        self._handed_out = -1
        self._outer_rounds: dict[int, OuterRound] = {}
        self._early: list[Ready] = []

    def __repr__(self) -> str:
        where = f"rank {self._view.rank} of cluster {self._view.own_cluster(self.term)}, term {self.term}"
        return f"<Server {where}: {self.state.value}>"

    def join(self, rank: int, message: Join) -> None:
        """Note that a member follows this server."""
        self._positions[rank] = max(self._positions.get(rank, -1), message.index)
        self.advance()

    def contribute(self, rank: int, message: Contribution) -> None:
        """Take a member's part of a record, unless that record is agreed already, or is not of this term."""
        is_stale = message.index <= self._positions.get(rank, -1)
        if is_stale or self._record_schedule.record(message.index).term != self.term:
            return
        self._positions[rank] = message.index - 1
        self._contributions.setdefault(message.index, {})[rank] = message
        self.advance()

    def hear(self, message: Ready) -> None:
        """Note that another cluster's server is ready for an outer round, perhaps before this one."""
        outer_round = self._outer_rounds.get(message.index)
        if outer_round is None:
            self._early.append(message)
            return
        outer_round.hear(message)
        self._decide(outer_round)

    def fetch(self, agreed: Agreed) -> None:
        """Take a result from a server that has it, if it is needed."""
        outer_round = self._outer_rounds.get(agreed.index)
        if outer_round is not None and not outer_round.has_result:
            outer_round.has_result = True
            self._hand_out(agreed)

    def finish_outer_round(self, run: Run, payload: Payload) -> None:
        """Take the payload of the outer round that was asked for."""
        index = run.record.index
        outer_round = self._outer_rounds.get(index)
        if outer_round is None or not outer_round.finish(run):
            return
        samples_of = {cluster: amount for (cluster, _), amount in zip(run.participants, run.samples, strict=True)}
        samples = tuple(samples_of.get(cluster, 0.0) for cluster in range(len(self._view.clusters(self.term))))
        clusters, told = outer_round.clusters, outer_round.told_to_all
        self._hand_out(
            Agreed(term=self.term, index=index, samples=samples, clusters=clusters, told=told, payload=payload)
        )

    def advance(self) -> None:
        """Go as far as what is known allows."""
        live = self._view.live_members(self.term)
        if any(rank not in self._positions for rank in live):
            self.state = ServerState.OPENING
            return
        newest = min(max(self._positions[rank] for rank in live), self._record_schedule.last_of_term(self.term))
        if not self._level(live, newest):
            self.state = ServerState.LEVELLING
            return
        self._revive_outer_round(newest)
        record = self._record_schedule.record(newest + 1)
        if record.term != self.term:
            self.state = ServerState.CLOSED
            return
        self._collect(live, record)

    def refresh(self) -> None:
        """Someone died: go on without them."""
        for outer_round in tuple(self._outer_rounds.values()):
            self._convene(outer_round)
        self.advance()

    def _level(self, live: tuple[int, ...], newest: int) -> bool:
        """Send the newest record to those who lack it; False if this rank must first get it itself."""
        if self._member.position < newest and self._handed_out < newest:
            holder = next(rank for rank in live if self._positions[rank] >= newest)
            if self._supplied != (newest, holder):
                self._supplied = (newest, holder)
                self._post([(holder, Supply(term=self.term, index=newest))])
            return False
        held = self._member.held(newest)
        for rank in live:
            if self._positions[rank] < newest and held is not None:
                self._positions[rank] = newest
                self._post([(rank, held)])
        return True

    def _collect(self, live: tuple[int, ...], record: Record) -> None:
        contributions = self._contributions.get(record.index, {})
        outer_round = self._outer_rounds.get(record.index)
        if outer_round is not None and not outer_round.has_result:
            self.state = outer_round.state
        elif any(rank not in contributions for rank in live):
            self.state = ServerState.COLLECTING
        elif record.kind is Kind.MEAN:
            samples = sum(contribution.samples for contribution in contributions.values())
            payload = self._mean(contributions)
            self._hand_out(Agreed(term=self.term, index=record.index, samples=(samples,), payload=payload))
        else:
            self._open_outer_round(record, has_result=False)

    def _hand_out(self, agreed: Agreed) -> None:
        self._contributions.pop(agreed.index, None)
        self._handed_out = agreed.index
        if self._record_schedule.record(agreed.index).is_outer_round:
            self._outer_rounds = {
                index: outer_round for index, outer_round in self._outer_rounds.items() if index >= agreed.index
            }
        for rank in self._view.live_members(self.term):
            self._positions[rank] = agreed.index
            self._post([(rank, agreed)])
        self.advance()

    def _revive_outer_round(self, newest: int) -> None:
        """Take the seat of a predecessor: its last outer round is over here, but maybe not in all clusters."""
        record = self._record_schedule.last_outer_round(newest) if newest >= 0 else None
        if record is None or record.term != self.term or record.index in self._outer_rounds:
            return
        if self._member.position >= record.index and not any(index > record.index for index in self._outer_rounds):
            self._open_outer_round(record, has_result=True)

    def _open_outer_round(self, record: Record, *, has_result: bool) -> None:
        contributions = self._contributions.get(record.index, {})
        outer_round = OuterRound(
            self._view,
            record,
            self._member.provided[record.index],
            measurements={rank: message.measurement for rank, message in contributions.items() if message.measurement},
            told=min((message.told for message in contributions.values()), default=()),
            has_result=has_result,
        )
        self._outer_rounds[record.index] = outer_round
        for message in self._early:
            if message.index == record.index:
                outer_round.hear(message)
        self._early = [message for message in self._early if message.index > record.index]
        self._convene(outer_round)

    def _convene(self, outer_round: OuterRound) -> None:
        abandoned, messages = outer_round.refresh()
        for abandon in abandoned:
            self._do(abandon)
        self._post(messages)
        self._decide(outer_round)

    def _decide(self, outer_round: OuterRound) -> None:
        runs, receivers = outer_round.decide()
        for run in runs:
            if len(run.participants) == 1 or (run.record.kind is Kind.RESULT and not any(run.samples)):
                # No cluster is left, or none has anything, to exchange: nothing changes.
                self.finish_outer_round(run, None)
            else:
                self._do(run)
        held = self._member.held(outer_round.record.index)
        self._post((server, held) for server in receivers if held is not None)
        if not outer_round.has_result:
            self.state = outer_round.state
