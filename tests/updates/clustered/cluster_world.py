"""A world for the clustered protocol: nodes, messages under way, deaths, and the promises that are checked throughout.

Payloads are symbols: a gradient is (rank, record), a mean the set of those that are in it, a result the set of what
each cluster brought. So a gradient that is lost, or that counts twice, shows.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from frozen_state import frozen

from syncline.updates.clustered.messages import (
    Abandon,
    Agreed,
    Clusters,
    Contribution,
    Enter,
    Instruction,
    Kind,
    Provided,
    Record,
    RecordSchedule,
    Run,
    Send,
    Stop,
    ToldMessage,
)
from syncline.updates.clustered.node import Node
from syncline.updates.clustered.server import ServerState

JOB = "job"
LATE = ("late", 0)
KINDS = ("deliver", "notice", "given up", "finish", "late")
Symbol = tuple


def mean_of_symbols(contributions: Mapping[int, Contribution]) -> Symbol:
    [index] = {message.index for message in contributions.values()}
    assert all(message.payload == ("gradient", rank, index) for rank, message in contributions.items())
    return ("mean", index, tuple(sorted(contributions)))


@dataclass
class Player:
    """One rank: its node, and what it applied."""

    node: Node
    applied: list[tuple[Record, Agreed]] = field(default_factory=list)
    means: list[Symbol] = field(default_factory=list)
    clusters: dict[int, Clusters] = field(default_factory=dict)
    """Of each term that this rank knows them of."""
    is_alive: bool = True
    stop: str | None = None

    def members(self, rank: int, term: int) -> tuple[int, ...]:
        """The cluster of ``rank`` in ``term``, whose number may be another one in another term."""
        return next(ranks for ranks in self.clusters[term] if rank in ranks)


class World:
    def __init__(
        self,
        clusters: Sequence[Sequence[int]],
        record_schedule: RecordSchedule,
        *,
        num_records: int,
        quorum: float | None = 0.0,
        propose: Callable[[int, int], Clusters] | None = None,
        elders: Sequence[int] = (),
    ) -> None:
        """``propose``: the clusters of the next term that a rank proposes in a term, both of them given.

        ``elders`` have come from another fabric, with the others as newcomers.
        """
        self.propose = propose
        self.record_schedule = record_schedule
        self.num_records = num_records
        self.clusters = tuple(tuple(ranks) for ranks in clusters)
        ranks = sorted(rank for members in clusters for rank in members)
        self.players = {
            rank: Player(
                Node(
                    job=JOB,
                    rank=rank,
                    clusters=clusters,
                    record_schedule=record_schedule,
                    mean=mean_of_symbols,
                    quorum=quorum,
                    reclusters=propose is not None,
                    elders=elders,
                ),
                clusters={0: self.clusters},
            )
            for rank in ranks
        }
        self.mail: dict[tuple[int, int], list[ToldMessage]] = {}
        self.unseen_losses: set[tuple[int, int]] = set()  # (who has not noticed, who died)
        self.unseen_ends: set[tuple[int, int]] = set()  # (who has not noticed, who gave it up)
        self.cut_links: set[frozenset[int]] = set()
        self.runs: dict[tuple[int, int], Run] = {}  # by rank and record
        self.finished: dict[tuple[int, tuple], tuple] = {}
        self.late: list[tuple[int, Run]] = []  # exchanges that were given up, but whose end comes all the same
        self.keeps_delivered = False
        self.delivered: list[tuple[int, int, ToldMessage]] = []
        self.states_seen: set[ServerState] = set()
        self.num_messages: Counter[str] = Counter()
        self.on_state: Callable[[int, ServerState], None] | None = None
        self.fresh: set[tuple] = set()
        """What may have become possible, for who takes it out and so need not ask for all choices."""
        self._checked: dict[int, list[tuple[int, ServerState]]] = {}
        """The servers of each rank when all were checked last; empty once somebody is gone."""
        for rank in ranks:
            self.perform(rank, self.players[rank].node.begin())
            self.compute(rank)

    def live(self) -> list[int]:
        return [rank for rank, player in self.players.items() if player.is_alive and player.stop is None]

    def compute(self, rank: int) -> None:
        """Bring in place what the next record needs."""
        player = self.players[rank]
        record = player.node.member.next_record
        if record.index >= self.num_records or player.stop is not None:
            return
        if record.kind is Kind.MEAN:
            payload: Symbol = ("gradient", rank, record.index)
        elif record.kind is Kind.RESULT:
            payload = ("sum", tuple(player.means))
        else:
            payload = ("parameters", tuple(agreed.payload for _, agreed in player.applied))
        clusters: Clusters = ()
        if record.kind is Kind.AVERAGE and self.propose is not None:
            clusters = self.propose(rank, record.term)
        measurement = (("of", rank),) if record.is_outer_round else ()
        told = (rank, *sorted(player.node.view.dead)) if record.is_outer_round else ()
        provided = Provided(samples=1.0, payload=payload, measurement=measurement, clusters=clusters, told=told)
        self.perform(rank, player.node.provide(provided))

    def perform(self, rank: int, instructions: Sequence[Instruction]) -> None:
        player = self.players[rank]
        for instruction in instructions:
            if isinstance(instruction, Send):
                self.send(rank, instruction.peer, (instruction.message, instruction.dead))
            elif isinstance(instruction, Run):
                index = instruction.record.index
                self.runs[rank, index] = instruction
                self.fresh |= {("finish", server, index) for _, server in instruction.participants}
            elif isinstance(instruction, Abandon):
                key = (rank, instruction.run.record.index)
                if self.runs.get(key) == instruction.run:
                    self.late.append((rank, self.runs.pop(key)))
                    self.fresh.add(LATE)
            elif isinstance(instruction, Stop):
                player.stop = instruction.reason
                self.note_loss(rank)
        for instruction in instructions:
            if isinstance(instruction, Enter):
                self.enter(rank, instruction)
        servers = [(term, server.state) for term, server in player.node.servers.items()]
        if self._checked.get(rank) != servers:  # that more are taken for dead makes no server one too many
            self.check_servers()
            self._checked[rank] = servers

    def send(self, rank: int, peer: int, told: ToldMessage) -> None:
        assert peer != rank
        self.num_messages[type(told[0]).__name__] += 1
        if {rank, peer} not in self.cut_links:
            self.mail.setdefault((rank, peer), []).append(told)
            self.fresh.add(("deliver", rank, peer))

    def enter(self, rank: int, instruction: Enter) -> None:
        player = self.players[rank]
        assert instruction.record.index == len(player.applied), "a record was left out or came twice"
        player.applied.append((instruction.record, instruction.agreed))
        if instruction.record.kind is Kind.MEAN:
            player.means.append(instruction.agreed.payload)
        else:
            player.means = []
        term = instruction.record.term
        if instruction.record.index == self.record_schedule.last_of_term(term):
            player.clusters[term + 1] = instruction.agreed.clusters or player.clusters[term]
        self.compute(rank)

    # What may happen next.

    def choices(self) -> list[tuple]:
        """Everything that may happen now, in a fixed order."""
        choices: list[tuple] = [("deliver", *pair) for pair, mail in sorted(self.mail.items()) if mail]
        choices = [choice for choice in choices if self.players[choice[2]].is_alive]
        choices += [("notice", *pair) for pair in sorted(self.unseen_losses) if self.players[pair[0]].is_alive]
        choices += [("given up", *pair) for pair in sorted(self.unseen_ends) if self.players[pair[0]].is_alive]
        for (rank, index), run in sorted(self.runs.items(), key=lambda item: item[0]):
            if self.players[rank].is_alive and self.can_finish(run):
                choices.append(("finish", rank, index))
        choices += [("late", number) for number, (rank, _) in enumerate(self.late) if self.players[rank].is_alive]
        return choices

    def is_possible(self, choice: tuple) -> bool:
        """Whether this is one of :meth:`choices`, without making all of them."""
        kind, *who = choice
        if kind == "late":
            return who[0] < len(self.late) and self.players[self.late[who[0]][0]].is_alive
        if kind == "deliver":
            return bool(self.mail.get((who[0], who[1]))) and self.players[who[1]].is_alive
        if not self.players[who[0]].is_alive:
            return False
        if kind in {"notice", "given up"}:
            return (who[0], who[1]) in (self.unseen_losses if kind == "notice" else self.unseen_ends)
        run = self.runs.get((who[0], who[1]))
        return run is not None and self.can_finish(run)

    def next_late(self) -> tuple:
        """The first exchange that may still end: before it may be some of ranks that are dead."""
        return next((("late", place) for place, (rank, _) in enumerate(self.late) if self.players[rank].is_alive), LATE)

    def can_finish(self, run: Run) -> bool:
        """An outer round ends for a server once all had begun it; it may end for some before it ends for others."""
        key = (run.record.index, run.participants)
        if key in self.finished:
            return True
        running = [self.runs.get((server, run.record.index)) for _, server in run.participants]
        return all(other is not None and other.participants == run.participants for other in running)

    def happen(self, choice: tuple) -> None:
        kind, *who = choice
        if kind == "deliver":
            sender, receiver = who
            told = self.mail[sender, receiver].pop(0)
            if not self.mail[sender, receiver]:
                del self.mail[sender, receiver]  # so that only what is under way is looked through
            if self.keeps_delivered:
                self.delivered.append((sender, receiver, told))
            self.perform(receiver, self.players[receiver].node.receive(sender, *told))
        elif kind == "notice":
            self.notice(*who)
        elif kind == "given up":
            self.unseen_ends.discard((who[0], who[1]))
            self.perform(who[0], self.players[who[0]].node.end(who[1]))
        elif kind == "late":
            rank, run = self.late.pop(who[0])
            self.report(rank, run, ("result", run.record.index, "torn"))
        else:
            self.finish(*who)

    def notice(self, rank: int, lost: int) -> None:
        """The fabric reports a loss: to one rank, and of one that lives to all others, as the lower one is believed."""
        self.unseen_losses.discard((rank, lost))
        self.mail.pop((lost, rank), None)  # a fabric reports a loss after the last message that arrived
        self.perform(rank, self.players[rank].node.lose(lost))
        if lost in self.live():
            if {rank, lost} not in self.cut_links:
                self.give_up(lost, rank)
            if rank < lost:
                self.note_loss(lost, but=rank)

    def give_up(self, lost: int, by: int) -> None:
        """A rank that lives hears that another one goes on without it."""
        self.unseen_ends.add((lost, by))
        self.fresh.add(("given up", lost, by))

    def cut(self, links: Iterable[tuple[int, int]]) -> None:
        """Nothing passes between these pairs from now on, and each will notice."""
        for pair in [both for one, other in links for both in ((one, other), (other, one))]:
            self.cut_links.add(frozenset(pair))
            self.mail.pop(pair, None)
            self.unseen_losses.add(pair)
            self.fresh.add(("notice", *pair))

    def finish(self, rank: int, index: int) -> None:
        run = self.runs[rank, index]
        key = (run.record.index, run.participants)
        if key not in self.finished:
            brought = {cluster: self.runs[server, index].payload for cluster, server in run.participants}
            self.finished[key] = ("result", run.record.index, tuple(sorted(brought.items())))
        del self.runs[rank, index]
        self.report(rank, run, self.finished[key])

    def report(self, rank: int, run: Run, result: Symbol) -> None:
        self.perform(rank, self.players[rank].node.finish_outer_round(run, result))

    def kept_after_death(self, rank: int) -> list[dict[int, int]]:
        """Every way in which a first part of what a rank sent to each other rank may still arrive."""
        ways: list[dict[int, int]] = [{}]
        for (sender, receiver), mail in sorted(self.mail.items()):
            if sender == rank:
                ways = [way | {receiver: number} for way in ways for number in range(len(mail) + 1)]
        return ways

    def kill(
        self, rank: int, choose: random.Random | None = None, *, num_kept: Mapping[int, int] | None = None
    ) -> None:
        """A rank dies: of what it sent to each other rank, only a first part arrives."""
        player = self.players[rank]
        if not player.is_alive:
            return
        player.is_alive = False
        self.runs = {key: run for key, run in self.runs.items() if key[0] != rank}
        for (sender, receiver), mail in self.mail.items():
            if sender == rank:
                kept = num_kept or {}
                del mail[choose.randint(0, len(mail)) if choose else kept.get(receiver, 0) :]
        self.note_loss(rank)

    def note_loss(self, rank: int, *, but: int = -1) -> None:
        """A rank is gone: each of the others will notice, ``but`` one that knows it, and who cannot be told."""
        told = [other for other in self.live() if other != rank and {other, but} not in self.cut_links]
        unseen = {(other, rank) for other in told if rank not in self.players[other].node.view.dead}
        self.unseen_losses |= unseen
        self.fresh |= {("notice", *pair) for pair in unseen}
        self._checked.clear()

    # What must hold.

    def check_servers(self) -> None:
        """One server per (cluster, term) among those that nobody live takes for dead."""
        buried = {dead for rank in self.live() for dead in self.players[rank].node.view.dead}
        acting: Counter[tuple[tuple[int, ...], int]] = Counter()
        for rank in self.live():
            for term, server in self.players[rank].node.servers.items():
                self.states_seen.add(server.state)
                if self.on_state is not None:
                    self.on_state(rank, server.state)
                if server.state is not ServerState.OPENING and rank not in buried:
                    acting[self.players[rank].members(rank, term), term] += 1
        assert all(number == 1 for number in acting.values()), acting

    def sound(self) -> list[int]:
        """Return those who live and whom nobody who lives takes for dead."""
        buried = {dead for rank in self.live() for dead in self.players[rank].node.view.dead}
        return [rank for rank in self.live() if rank not in buried]

    def check_agreement(self) -> None:
        """Live members of a cluster hold the same records in each term; exchanges are the same in all clusters."""
        agreed_on: dict[tuple[int, tuple[int, ...]], object] = {}
        clusters: dict[int, Clusters] = {}
        for rank in self.sound():
            player = self.players[rank]
            for record, agreed in player.applied:
                members = player.members(rank, record.term)
                value = (agreed.payload, agreed.clusters)
                assert agreed_on.setdefault((record.index, members), value) == value
            for term, known in player.clusters.items():
                assert clusters.setdefault(term, known) == known
        self.check_results()
        self.check_told()
        for rank in self.sound():
            self.check_sums(rank)

    def check_results(self) -> None:
        results: dict[int, object] = {}
        for rank in self.sound():
            for record, agreed in self.players[rank].applied:
                if record.is_outer_round and agreed.payload is not None:
                    assert results.setdefault(record.index, agreed.payload) == agreed.payload

    def check_told(self) -> None:
        """With each outer round all hear the same of the members, of the lowest that had a part, and are not lost."""
        told: dict[int, tuple[int, ...]] = {}
        for rank in self.sound():
            for record, agreed in self.players[rank].applied:
                if record.is_outer_round:
                    teller, *lost = told.setdefault(record.index, agreed.told)
                    assert agreed.told == told[record.index], f"{agreed.told}, {told[record.index]}"
                    assert teller <= min(self.sound())
                    assert rank not in lost

    def check_sums(self, rank: int) -> None:
        """What a result holds of this cluster is what this cluster agreed on, each mean once."""
        player = self.players[rank]
        means: list[Symbol] = []
        for record, agreed in self.players[rank].applied:
            if record.kind is Kind.MEAN:
                means.append(agreed.payload)
            elif record.kind is Kind.RESULT:
                if agreed.payload is not None:
                    cluster = player.clusters[record.term].index(player.members(rank, record.term))
                    assert dict(agreed.payload[2]).get(cluster) == ("sum", tuple(means))
                means = []

    def check_finished(self) -> None:
        """Everybody who lives came to the end, and nobody waits."""
        for rank in self.live():
            assert len(self.players[rank].applied) == self.num_records, f"rank {rank} hangs: {self.describe()}"
        self.check_agreement()

    def key(self) -> object:
        """Everything that decides what may happen from here on."""
        players = [
            (frozen(player.node), player.is_alive, player.stop, len(player.applied), tuple(player.means))
            for player in self.players.values()
        ]
        mail = {pair: letters for pair, letters in self.mail.items() if letters}
        return (
            tuple(players),
            frozen(mail),
            tuple(sorted(self.unseen_losses)),
            tuple(sorted(self.unseen_ends)),
            frozen({key: run.participants for key, run in self.runs.items()}),
            frozen([(rank, run.record.index, run.participants) for rank, run in self.late]),
            frozen(self.finished),
        )

    def describe(self) -> str:
        return "\n".join(repr(self.players[rank].node) for rank in self.live())

    def settle(self, choose: random.Random | None = None, *, before_each: Callable[[], None] = lambda: None) -> None:
        """Let everything happen, in the order in which it comes or in a random one."""
        while True:
            before_each()
            choices = self.choices()
            if not choices:
                return
            self.happen(choose.choice(choices) if choose else choices[0])


def accuse(world: World, accuser: int, accused: int) -> None:
    """Let a rank take another one for hung that lives, and tell everyone."""
    world.perform(accuser, world.players[accuser].node.lose(accused))
    world.note_loss(accused)
    world.give_up(accused, accuser)
