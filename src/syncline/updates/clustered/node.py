"""A rank's whole part in the protocol: member always, server when drawn. Events go in, instructions come out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from syncline.errors import UpdateError
from syncline.members import Quorum
from syncline.updates.clustered.member import Member, MemberState
from syncline.updates.clustered.messages import (
    Agreed,
    Contribution,
    Enter,
    Envelope,
    Farewell,
    Instruction,
    Join,
    Mean,
    Measurement,
    Message,
    Notice,
    Payload,
    Provided,
    Ready,
    Run,
    Send,
    Stop,
    Supply,
)
from syncline.updates.clustered.record_schedule import RecordSchedule
from syncline.updates.clustered.server import Server
from syncline.updates.clustered.view import View


class Node:
    """Decides for one rank.

    ``quorum`` is the part of the ranks that must be alive for this one to go on: one that was cut off from most others
    stops, instead of training on by itself (see :mod:`syncline.members`).
    """

    def __init__(
        self,
        *,
        job: str,
        rank: int,
        clusters: Sequence[Sequence[int]],
        record_schedule: RecordSchedule,
        mean: Mean,
        quorum: float = 0.5,
        reclusters: bool = False,
    ) -> None:
        self.view = View(job=job, rank=rank, clusters=clusters, reclusters=reclusters)
        self.record_schedule = record_schedule
        self.member = Member(self.view, record_schedule)
        self.servers: dict[int, Server] = {}
        self.num_refused = 0
        self.num_replaced = 0
        self.departed: set[int] = set()
        self.stopped: str | None = None
        self._mean = mean
        self._quorum = Quorum(part=quorum)
        self.measurements: dict[int, Measurement] = {}
        """The newest that this rank, as a server, heard of each rank."""
        self._unheard: list[tuple[int, Envelope]] = []
        """What came, by sender in order, and speaks of a death that is not believed here yet."""
        self._mail: list[tuple[int, Message]] = []
        self._early: list[tuple[int, Message]] = []
        self._instructions: list[Instruction] = []

    def __repr__(self) -> str:
        servers = ", ".join(map(repr, self.servers.values()))
        return f"<Node {self.member!r} {servers} dead {sorted(self.view.dead)}>"

    @property
    def term(self) -> int:
        """The term of the record that this rank needs next."""
        return self.member.next_record.term

    def begin(self) -> list[Instruction]:
        """Join the first server."""
        self._post(self.member.follow())
        return self._flush()

    def provide(self, provided: Provided) -> list[Instruction]:
        """Note that what the next record needs of this rank is in place."""
        if self.stopped is None:
            self._post(self.member.provide(provided))
        return self._flush()

    def receive(self, peer: int, envelope: Envelope) -> list[Instruction]:
        """Hear a message, with its payload if it has one."""
        if self.stopped is not None or peer in self.view.dead or not self.view.is_member(peer):
            self.num_refused += 1
            return []
        self._unheard.append((peer, envelope))
        self._hear()
        return self._flush()

    def lose(self, peer: int, error: Exception | None = None, *, is_settled: bool = False) -> list[Instruction]:
        """Go on without a peer that the fabric lost, and tell everyone; ``is_settled`` if all are to believe it."""
        if self.stopped is None:
            self._lose(peer, error, is_settled=is_settled)
            self._hear()
        return self._flush()

    def end(self, peer: int, error: Exception) -> list[Instruction]:
        """Stop, as ``peer`` has given up this rank on another one's word: so will all."""
        if self.stopped is None:
            self.view.membership.lose(peer, error)
            self._stop_as_dead(peer)
        return self._flush()

    def awaited(self) -> frozenset[int]:
        """Return who has a part in the record that this rank waits for; nobody while it computes.

        A mean needs all of the own cluster, an outer round all that live.
        """
        if self.member.state is MemberState.COMPUTING or self.stopped is not None:
            return frozenset()
        record = self.member.next_record
        needed = self.view.live() if record.is_outer_round else self.view.live_members(record.term)
        return frozenset(needed) - {self.view.rank} - self.departed

    def depart(self) -> list[Instruction]:
        """Tell everyone that this rank needs nothing any more."""
        self.departed.add(self.view.rank)
        self._post([(rank, Farewell(term=self.term)) for rank in self.view.live() if rank != self.view.rank])
        return self._flush()

    @property
    def is_over(self) -> bool:
        """Whether everyone who lives needs nothing any more."""
        return self.stopped is not None or self.departed.issuperset(self.view.live())

    def finish_outer_round(self, run: Run, payload: Payload) -> list[Instruction]:
        """Take the outcome of the outer round that was asked for."""
        server = self.servers.get(run.record.term)
        if server is not None and self.stopped is None:
            server.finish_outer_round(run, payload)
            self._gather(server)
        return self._flush()

    def _hear(self) -> None:
        """Hear what came, each sender's messages in order; who speaks of a death that is doubtful here waits.

        It ends with the death of one of the two: each rank finds it by itself, or is told by the lower one.
        """
        while self.stopped is None and (heard := self._take_unheard()) is not None:
            peer, envelope = heard
            doubtful = envelope.doubtful(peer)
            if self.view.rank in doubtful:
                self._lose(peer, UpdateError(f"rank {peer} has lost its connection to this rank"))
            elif self.view.rank in envelope.dead:
                self._stop_as_dead(peer)
            else:
                certain = {rank for rank in envelope.dead if rank not in doubtful and self.view.is_member(rank)}
                self._bury(certain, is_settled=True)
                self._post([(self.view.rank, envelope.message)], sender=peer)

    def _take_unheard(self) -> tuple[int, Envelope] | None:
        waiting: set[int] = set()
        for place, (peer, envelope) in enumerate(self._unheard):
            doubtful = {rank for rank in envelope.doubtful(peer) if self.view.is_member(rank)}
            if peer not in waiting and (self.view.rank in doubtful or self.view.dead >= doubtful):
                return self._unheard.pop(place)
            waiting.add(peer)
        return None

    def _lose(self, peer: int, error: Exception | None, *, is_settled: bool = False) -> None:
        if self._bury({peer}, error, is_settled=is_settled):
            self._post([(rank, Notice(term=self.term)) for rank in self.view.live() if rank != self.view.rank])

    def _bury(self, dead: set[int], error: Exception | None = None, *, is_settled: bool) -> bool:
        """Take ranks for dead, follow those who are drawn instead, and count whether enough are left."""
        former_server = self.view.own_server(self.term)
        news = {
            rank
            for rank in dead
            if self.view.membership.lose(rank, error, has_left=rank in self.departed, is_settled=is_settled)
        }
        if not news:
            return False
        self.num_replaced += former_server in news
        num_unheard = len(self._unheard)
        self._unheard = [(peer, envelope) for peer, envelope in self._unheard if peer not in news]
        self.num_refused += num_unheard - len(self._unheard)
        for rank in sorted(news):  # one who lives after all learns that the job goes on without it
            self._instructions.append(Send(peer=rank, envelope=self._seal(Notice(term=self.term))))
        shortage = self.view.membership.shortage(self._quorum)
        if shortage is not None:
            self._stop(f"{shortage}, or allow a smaller quorum", shortage.missing)
            return False
        self._post(self.member.follow())
        for server in tuple(self.servers.values()):
            server.refresh()
            self._gather(server)
        return True

    def _stop_as_dead(self, peer: int) -> None:
        self._stop(
            f"rank {peer} takes this rank for dead; it was out of reach, or its training thread hung, and the job went "
            "on without it",
            (self.view.rank,),
        )

    def _stop(self, reason: str, accused: tuple[int, ...]) -> None:
        self.stopped = reason
        self._mail.clear()
        self._instructions = [Stop(reason=reason, accused=accused)]

    def _post(self, messages: Sequence[tuple[int, Message]], *, sender: int | None = None) -> None:
        """Send messages to others; deliver those to this rank itself, in order."""
        if self.stopped is not None:
            return
        for receiver, message in messages:
            if receiver == self.view.rank:
                self._mail.append((self.view.rank if sender is None else sender, message))
            elif receiver not in self.view.dead:
                self._instructions.append(Send(peer=receiver, envelope=self._seal(message)))
        while self._mail and self.stopped is None:
            self._deliver(*self._mail.pop(0))

    def _seal(self, message: Message) -> Envelope:
        membership = self.view.membership
        return Envelope(dead=tuple(sorted(membership.lost)), message=message, settled=tuple(sorted(membership.settled)))

    def _gather(self, server: Server) -> None:
        """Carry out what a server said."""
        self._instructions += server.instructions
        outbox = server.outbox
        server.instructions, server.outbox = [], []
        self._post(outbox)

    def _flush(self) -> list[Instruction]:
        instructions, self._instructions = self._instructions, []
        return instructions

    def _deliver(self, peer: int, message: Message) -> None:
        if isinstance(message, Notice):
            return
        if isinstance(message, Farewell):
            self.departed.add(peer)
            return
        if message.term == self.view.last_known_term + 1:
            self._early.append((peer, message))
        elif message.term > self.view.last_known_term:
            self.num_refused += 1
        elif isinstance(message, Agreed):
            self._take(peer, message)
        elif isinstance(message, Ready):
            self._serve(peer, message)
        elif self.view.cluster_of(peer, message.term) != self.view.own_cluster(message.term):
            self.num_refused += 1
        elif isinstance(message, Supply):
            held = self.member.held(message.index)
            self._post([] if held is None else [(peer, held)])
        else:
            self._serve(peer, message)

    def _serve(self, peer: int, message: Join | Contribution | Ready) -> None:
        server = self._server(message.term)
        is_welcome = server is not None
        if server is not None and isinstance(message, Join):
            server.join(peer, message)
        elif server is not None and isinstance(message, Contribution):
            self._note_measurements([(peer, message.measurement)])
            is_welcome = server.contribute(peer, message)
        elif server is not None and isinstance(message, Ready):
            self._note_measurements(message.measurements)
            server.hear(message)
        self.num_refused += not is_welcome
        if server is not None:
            self._gather(server)

    def _server(self, term: int) -> Server | None:
        """Return this rank as the server of ``term``; None if it is not, or if that term is over or far away."""
        if not self.member.oldest_term <= term <= self.term + 1 or self.view.own_server(term) != self.view.rank:
            return None
        if term not in self.servers:
            self.servers[term] = Server(self.view, self.record_schedule, self.member, self._mean, term=term)
        return self.servers[term]

    def _take(self, peer: int, agreed: Agreed) -> None:
        """Take a record as a member, or as a server that fetches it for its cluster."""
        if self.view.cluster_of(peer, agreed.term) != self.view.own_cluster(agreed.term):
            server = self._server(agreed.term)
            self.num_refused += server is None or not server.fetch(agreed)
            if server is not None:
                self._gather(server)
            return
        if not self.member.take(agreed):
            self.num_refused += 1
            return
        record = self.record_schedule.record(agreed.index)
        self._instructions.append(Enter(record=record, agreed=agreed))
        if agreed.index == self.record_schedule.last_of_term(record.term) and record.term == self.view.last_known_term:
            self._begin_term(record.term + 1, agreed)
        oldest = self.member.oldest_term
        self.servers = {term: server for term, server in self.servers.items() if term >= oldest}
        self._post(self.member.follow())
        for server in tuple(self.servers.values()):  # a successor takes its seat once it holds the record itself
            server.advance()
            self._gather(server)

    def _begin_term(self, term: int, agreed: Agreed) -> None:
        """Take note of the clusters of a term, and hear what was said in it by those who knew them before."""
        self.view.divide(term, agreed.clusters)
        early, self._early = self._early, []
        self._mail += [(peer, message) for peer, message in early if peer not in self.view.dead]

    def _note_measurements(self, measurements: Iterable[tuple[int, Measurement]]) -> None:
        self.measurements |= {rank: measurement for rank, measurement in measurements if measurement}
