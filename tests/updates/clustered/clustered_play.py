"""How a temporary server comes into each state of the protocol, and stays in it until it is struck.

A server waits for somebody in every state but the last. So a play names whose message is held back, for good, since the
one that it is meant for will not live to read it; and whom that leaves waiting. Nothing in it is left to timing: who
serves in a term is drawn alike everywhere, and what is not sent cannot come early. Pure: no processes here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from syncline.updates.clustered.messages import (
    Agreed,
    Contribution,
    Enter,
    Instruction,
    Join,
    Kind,
    Ready,
    RecordSchedule,
    Run,
    Send,
    Stop,
)
from syncline.updates.clustered.node import Node
from syncline.updates.clustered.server import Server, ServerState
from syncline.updates.clustered.view import draw_order

SECOND_STATES = {ServerState.LEVELLING, ServerState.FETCHING}
"""States that exist only after another server died while it handed something out."""
TERMS = (1, 2)
"""In term 0 the members have joined before anybody can hold them back."""
ALL = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """What ``sender`` has to say to ``receiver`` about a term, or about a record, is not said."""

    sender: int
    receiver: int
    kinds: tuple[type, ...]
    term: int
    index: int | None = None

    def holds(self, instruction: Instruction) -> bool:
        """Whether this is it. A run is held back if the receiver takes part."""
        if isinstance(instruction, Run):
            is_meant = Run in self.kinds and self.receiver in dict(instruction.participants).values()
            return is_meant and instruction.record.index == self.index
        if not isinstance(instruction, Send) or instruction.peer != self.receiver:
            return False
        message = instruction.message
        is_meant = isinstance(message, self.kinds) and message.term == self.term
        return is_meant and (self.index is None or getattr(message, "index", None) == self.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """``rank`` is to be struck as the server of ``term``, in ``state``, when its next record is ``index``.

    Without a state: when it has agreed on record ``index`` and is about to hand it out. Of what it has to say and do at
    that moment the first ``num_let`` are carried out, or those to ``receiver`` alone; nothing after. It dies once
    ``witness`` holds the record.
    """

    rank: int
    term: int
    index: int
    state: ServerState | None = None
    num_let: int = 0
    receiver: int | None = None
    witness: int | None = None

    def is_due(self, node: Node, instructions: Sequence[Instruction]) -> bool:
        """Whether the moment has come."""
        if self.state is None:
            return any(isinstance(one, Enter) and one.record.index == self.index for one in instructions)
        server: Server | None = node.servers.get(self.term)
        is_there = server is not None and server.state is self.state
        return is_there and node.member.position + 1 == self.index

    def let(self, instructions: Sequence[Instruction]) -> list[Instruction]:
        """Return what is still carried out."""
        if self.receiver is not None:
            return [one for one in instructions if isinstance(one, Send) and one.peer == self.receiver]
        return list(instructions[: self.num_let])


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """Who dies, one after the other, and what is held back to that end."""

    deaths: tuple[Death, ...]
    holds: tuple[Hold, ...] = ()


class Actor:
    """One rank's part in a play: takes what the protocol wants done, returns what is done."""

    def __init__(self, play: Play, rank: int) -> None:
        self._death = next((death for death in play.deaths if death.rank == rank), None)
        self._holds = [hold for hold in play.holds if hold.sender == rank]
        self.struck: Death | None = None

    def act(self, node: Node, instructions: Sequence[Instruction]) -> list[Instruction]:
        """Hold back what is to be held back; once struck do nothing, but stop if told so."""
        if self.struck is not None:
            return [one for one in instructions if isinstance(one, Stop)]
        if self._death is not None and self._death.is_due(node, instructions):
            self.struck = self._death
            instructions = self._death.let(instructions)
        return [one for one in instructions if not any(hold.holds(one) for hold in self._holds)]


class Playwright:
    """Writes a play for each state; the seed chooses the cluster, the term, the record, and what is still said.

    The first cluster has three members or more.
    """

    def __init__(
        self,
        seed: int,
        *,
        job: str,
        clusters: Sequence[Sequence[int]],
        record_schedule: RecordSchedule,
    ) -> None:
        self._seed = seed
        self._job = job
        self._clusters = clusters
        self._term = TERMS[seed // 2 % len(TERMS)]
        first = self._term * record_schedule.records_of_term
        self._records = [record_schedule.record(first + number) for number in range(record_schedule.records_of_term)]

    def write(self, state: ServerState) -> Play:
        """Return a play in which a server dies in ``state``, and in some of them another one before."""
        return {
            ServerState.OPENING: self._opening,
            ServerState.LEVELLING: self._levelling,
            ServerState.COLLECTING: self._collecting,
            ServerState.READYING: self._readying,
            ServerState.AVERAGING: self._exchanging,
            ServerState.FETCHING: self._fetching,
            ServerState.CLOSED: self._closed,
        }[state]()

    def _opening(self) -> Play:
        server, *others = self._order(self._cluster)
        member = others[self._seed // 4 % len(others)]
        death = self._death(server, self._records[0].index, ServerState.OPENING)
        return Play(deaths=(death,), holds=(self._hold(member, server, Join, Contribution),))

    def _collecting(self) -> Play:
        server, *others = self._order(self._cluster)
        index = self._choose(Kind.MEAN)
        member = others[self._seed // 8 % len(others)]
        death = self._death(server, index, ServerState.COLLECTING)
        return Play(deaths=(death,), holds=(self._hold(member, server, Contribution, index=index),))

    def _readying(self) -> Play:
        server, other_server = self._order(self._cluster)[0], self._order(1 - self._cluster)[0]
        index = self._choose(Kind.RESULT, Kind.AVERAGE)
        death = self._death(server, index, ServerState.READYING)
        return Play(deaths=(death,), holds=(self._hold(other_server, server, Ready, index=index),))

    def _exchanging(self) -> Play:
        """One of the two servers begins the outer round, and the other does not."""
        server, other_server = self._order(self._cluster)[0], self._order(1 - self._cluster)[0]
        index = self._choose(Kind.RESULT, Kind.AVERAGE)
        if self._seed // 4 % 2:
            death = Death(rank=server, term=self._term, index=index, state=ServerState.AVERAGING)
            return Play(deaths=(death,))
        death = Death(rank=server, term=self._term, index=index, state=ServerState.AVERAGING, num_let=ALL)
        return Play(deaths=(death,), holds=(self._hold(other_server, server, Run, index=index),))

    def _closed(self) -> Play:
        death = self._death(self._order(self._cluster)[0], self._records[-1].index + 1, ServerState.CLOSED)
        return Play(deaths=(death,))

    def _levelling(self) -> Play:
        """A server dies when one member has the newest record; its successor is the one without, and asks for it."""
        server, successor, last, *_ = self._order(0)
        index = self._choose(*Kind)
        first = Death(rank=server, term=self._term, index=index, receiver=last, witness=last)
        second = self._death(successor, index, ServerState.LEVELLING)
        return Play(deaths=(first, second), holds=(self._hold(last, successor, Agreed, index=index),))

    def _fetching(self) -> Play:
        """A server dies with an outer round's result that the other cluster has too; its successor must ask there."""
        server, successor, *_ = self._order(0)
        other_server = self._order(1)[0]
        index = self._choose(Kind.RESULT, Kind.AVERAGE)
        first = Death(rank=server, term=self._term, index=index, witness=other_server)
        second = self._death(successor, index, ServerState.FETCHING)
        return Play(deaths=(first, second), holds=(self._hold(other_server, successor, Agreed, index=index),))

    @property
    def _cluster(self) -> int:
        return self._seed % 2

    def _order(self, cluster: int) -> tuple[int, ...]:
        return draw_order(self._job, self._term, self._clusters[cluster])

    def _choose(self, *kinds: Kind) -> int:
        indices = [record.index for record in self._records if record.kind in kinds]
        return indices[self._seed // 2 % len(indices)]

    def _hold(self, sender: int, receiver: int, *kinds: type, index: int | None = None) -> Hold:
        return Hold(sender=sender, receiver=receiver, kinds=kinds, term=self._term, index=index)

    def _death(self, rank: int, index: int, state: ServerState) -> Death:
        return Death(rank=rank, term=self._term, index=index, state=state, num_let=self._seed // 4 % 3)
