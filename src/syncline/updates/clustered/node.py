"""A rank's whole part in the protocol: member always, server when drawn. Events go in, instructions come out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from syncline.members import Membership, Quorum
from syncline.updates.clustered.messages import (
    Agreed,
    Contribution,
    Enter,
    Farewell,
    Instruction,
    Join,
    Mean,
    Measurement,
    Message,
    Payload,
    Provided,
    Ready,
    RecordSchedule,
    Run,
    Send,
    Stop,
    Supply,
)
from syncline.updates.clustered.server import COMPUTING, Member, Server
from syncline.updates.clustered.view import View


class Node:
    """Decides for one rank.

    ``quorum`` is the part of the ranks that must be alive for this one to go on: one that was cut off from most others
    stops, instead of training on by itself (see :mod:`syncline.members`). With None it goes on only with all.
    """

    def __init__(
        self,
        *,
        job: str,
        rank: int,
        clusters: Sequence[Sequence[int]],
        record_schedule: RecordSchedule,
        mean: Mean,
        quorum: float | None = 0.5,
        reclusters: bool = False,
        elders: Sequence[int] = (),
    ) -> None:
        """``elders`` are those that came from another fabric together, where others may have gone back to."""
        self.view = View(job=job, rank=rank, clusters=clusters, reclusters=reclusters)
        self.record_schedule = record_schedule
        self.member = Member(self.view, record_schedule)
        self.servers: dict[int, Server] = {}
        self.num_replaced = 0
        self.departed: set[int] = set()
        self.stopped: str | None = None
        self._mean = mean
        self.quorum = None if quorum is None else Quorum(part=quorum)
        self._elders = Membership(tuple(elders), self.view.membership.losses)
        """Whose quorum counts too, until an outer round has shown that nobody else is left of them."""
        self.measurements: dict[int, Measurement] = {}
        """The newest that this rank, as a server, heard of each rank."""
        self._unheard: list[tuple[int, Message, frozenset[int]]] = []
        """What came from those who know of deaths that are not known here yet."""
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

    def receive(self, peer: int, message: Message, dead: frozenset[int] = frozenset()) -> list[Instruction]:
        """Hear a message, with its payload if it has one, once all are known to be ``dead`` whom its sender knows."""
        if self.stopped is not None or peer in self.view.dead or not self.view.is_member(peer):
            return []
        self._unheard.append((peer, message, dead))
        self._hear()
        return self._flush()

    def lose(self, peer: int, error: Exception | None = None) -> list[Instruction]:
        """Go on without a peer that is lost; all others hear of it too, each in its time."""
        if self.stopped is None:
            self._bury(peer, error)
            self._hear()
        return self._flush()

    def end(self, peer: int) -> list[Instruction]:
        """Stop, as ``peer`` has given up this rank on another one's word, or takes it for hung: so will all."""
        if self.stopped is None:
            self._stop(
                f"rank {peer} takes this rank for dead; it was out of reach, or its training thread hung, and the job "
                "went on without it",
                (self.view.rank,),
            )
        return self._flush()

    def awaited(self) -> frozenset[int]:
        """Return who has a part in the record that this rank waits for; nobody while it computes.

        A mean needs all of the own cluster, an outer round all that live.
        """
        if self.member.state == COMPUTING or self.stopped is not None:
            return frozenset()
        record = self.member.next_record
        needed = self.view.membership.living if record.is_outer_round else self.view.live_members(record.term)
        return frozenset(needed) - {self.view.rank} - self.departed

    def depart(self) -> list[Instruction]:
        """Tell everyone that this rank needs nothing any more."""
        self.departed.add(self.view.rank)
        self._post([(rank, Farewell(term=self.term)) for rank in self.view.membership.living if rank != self.view.rank])
        return self._flush()

    @property
    def is_over(self) -> bool:
        """Whether everyone who lives needs nothing any more."""
        return self.stopped is not None or self.departed.issuperset(self.view.membership.living)

    def finish_outer_round(self, run: Run, payload: Payload) -> list[Instruction]:
        """Take the outcome of the outer round that was asked for."""
        server = self.servers.get(run.record.term)
        if server is not None and self.stopped is None:
            server.finish_outer_round(run, payload)
        return self._flush()

    def _bury(self, peer: int, error: Exception | None) -> None:
        """Take a rank for dead, follow who is drawn instead, and count whether enough are left."""
        former_server = self.view.own_server(self.term)
        if not self.view.membership.lose(peer, error, has_left=peer in self.departed):
            return
        self.num_replaced += former_server == peer
        self._unheard = [one for one in self._unheard if one[0] != peer]
        shortage = None
        if self.quorum is not None:
            shortage = self.view.membership.shortage(self.quorum) or self._elders.shortage(self.quorum)
        elif peer not in self.departed:
            self._stop(f"rank {peer} is lost, and has taken a part of what its cluster does together with it", (peer,))
            return
        if shortage is not None:
            self._stop(f"{shortage}, or allow a smaller quorum", shortage.missing, are_too_few=True)
            return
        self._post(self.member.follow())
        for server in tuple(self.servers.values()):
            server.refresh()

    def _hear(self) -> None:
        """Hear what can be heard; each sender knows of more and more deaths, so its messages stay in order."""
        unheard, self._unheard = self._unheard, []
        for peer, message, dead in unheard:
            if dead <= self.view.dead:
                self._mail.append((peer, message))
            else:
                self._unheard.append((peer, message, dead))

    def _stop(self, reason: str, accused: tuple[int, ...], *, are_too_few: bool = False) -> None:
        self.stopped = reason
        self._mail.clear()
        self._instructions = [Stop(reason=reason, accused=accused, are_too_few=are_too_few)]

    def _post(self, messages: Iterable[tuple[int, Message]]) -> None:
        """Send messages to others, and hear those to this rank itself when what is under way is done."""
        if self.stopped is not None:
            return
        for receiver, message in messages:
            if receiver == self.view.rank:
                self._mail.append((receiver, message))
            elif receiver not in self.view.dead:
                self._instructions.append(Send(peer=receiver, message=message, dead=frozenset(self.view.dead)))

    def _do(self, instruction: Instruction) -> None:
        self._instructions.append(instruction)

    def _flush(self) -> list[Instruction]:
        while self._mail and self.stopped is None:
            self._deliver(*self._mail.pop(0))
        instructions, self._instructions = self._instructions, []
        return instructions

    def _deliver(self, peer: int, message: Message) -> None:
        if isinstance(message, Farewell):
            self.departed.add(peer)
            return
        num_ahead = message.term - self.view.last_known_term
        if num_ahead > 0:
            if num_ahead == 1:
                self._early.append((peer, message))
        elif isinstance(message, Agreed):
            self._take(peer, message)
        elif isinstance(message, Ready):
            self._serve(peer, message)
        elif self.view.cluster_of(peer, message.term) != self.view.own_cluster(message.term):
            return
        elif isinstance(message, Supply):
            held = self.member.held(message.index)
            self._post([] if held is None else [(peer, held)])
        else:
            self._serve(peer, message)

    def _serve(self, peer: int, message: Join | Contribution | Ready) -> None:
        server = self._server(message.term)
        if server is None:
            return
        if isinstance(message, Join):
            server.join(peer, message)
        elif isinstance(message, Contribution):
            self._note_measurements([(peer, message.measurement)])
            server.contribute(peer, message)
        else:
            self._note_measurements(message.measurements)
            server.hear(message)

    def _server(self, term: int) -> Server | None:
        """Return this rank as the server of ``term``; None if it is not, or if that term is over or far away."""
        if not self.member.oldest_term <= term <= self.term + 1 or self.view.own_server(term) != self.view.rank:
            return None
        if term not in self.servers:
            self.servers[term] = Server(
                self.view, self.record_schedule, self.member, self._mean, term=term, post=self._post, do=self._do
            )
        return self.servers[term]

    def _take(self, peer: int, agreed: Agreed) -> None:
        """Take a record as a member, or as a server that fetches it for its cluster."""
        if self.view.cluster_of(peer, agreed.term) != self.view.own_cluster(agreed.term):
            if (server := self._server(agreed.term)) is not None:
                server.fetch(agreed)
            return
        if not self.member.take(agreed):
            return
        record = self.record_schedule.record(agreed.index)
        if record.is_outer_round:
            self._elders = Membership(())
        self._instructions.append(Enter(record=record, agreed=agreed))
        if agreed.index == self.record_schedule.last_of_term(record.term) and record.term == self.view.last_known_term:
            self._begin_term(record.term + 1, agreed)
        oldest = self.member.oldest_term
        self.servers = {term: server for term, server in self.servers.items() if term >= oldest}
        self._post(self.member.follow())
        for server in tuple(self.servers.values()):  # a successor takes its seat once it holds the record itself
            server.advance()

    def _begin_term(self, term: int, agreed: Agreed) -> None:
        """Take note of the clusters of a term, and hear what was said in it by those who knew them before."""
        self.view.divide(term, agreed.clusters)
        early, self._early = self._early, []
        self._mail += [(peer, message) for peer, message in early if peer not in self.view.dead]

    def _note_measurements(self, measurements: Iterable[tuple[int, Measurement]]) -> None:
        self.measurements |= {rank: measurement for rank, measurement in measurements if measurement}
