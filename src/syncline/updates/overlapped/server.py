"""The server shard of one bucket, as a state machine: which gradients make a global one, and when a period ends.

The rules are in the package's docstring. Each method that tells the shard of something returns what is to be done, in
that order; nothing here waits, sends, or touches a gradient. A *payload* is what comes with a message: it is never
opened here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# --- what a worker sends to a server shard ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """A gradient of ``worker`` for ``round_number``."""

    worker: int
    period: int
    round_number: int
    iteration: int
    """The worker's iteration when it pushed."""
    weight: float
    """Samples of an iteration; of a run, their mean, so that each gradient in it counts as much as one by itself."""
    payload: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """``worker`` has ended its period, with these parameters."""

    worker: int
    period: int
    weight: float
    """Samples that the worker used in the whole period."""
    iteration: int = 0
    """The worker's iteration since the start of the training."""
    told: tuple[int, ...] = ()
    """What the worker tells of the job's members, itself first; of all that end a period the lowest one's counts."""
    payload: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """``worker`` greets the successor of a dead server, with the start of ``period`` that it holds."""

    worker: int
    period: int
    iteration: int = 0
    """The fleet's iteration at the start of ``period``."""
    weight: float = 1.0
    """Of the only one in an average."""
    told: tuple[int, ...] = ()
    """What counted at the end of the period before."""
    payload: Any = field(default=None, compare=False, repr=False)


ServerMessage = Push | End | Hello

# --- instructions of a server shard ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Add the weighted mean of these (in rank order) to the cumulative sum."""

    round_number: int
    contributions: tuple[Push, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """Make the weighted mean of these (in rank order): the next period's start, which a greeting may hold already."""

    period: int
    contributions: tuple[End | Hello, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clear:
    """Set the cumulative sum to zero: a period begins."""

    period: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Send ``worker`` the cumulative sum."""

    worker: int
    period: int
    closed: int
    clock: int
    accepted: int
    """The latest round in which ``worker`` was; 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyAverage:
    """Send ``worker`` the average that ends ``period``."""

    worker: int
    period: int
    iteration: int = 0
    """The furthest iteration of a worker in the average: where the next period begins for all."""
    dropped: tuple[int, ...] = ()
    """For each rank, how many of its pushes this shard has dropped so far, as whoever sends it fills in."""
    told: tuple[int, ...] = ()
    """What the lowest worker in the average tells of the job's members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Of a relay: send the server the weighted mean of these (in rank order) as ``push``."""

    push: Push
    contributions: tuple[Push, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """Of a relay: what came from the server is the cumulative sum now."""

    payload: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Of a relay: tell the server that it pushes for no round of ``period`` after ``last_round``."""

    period: int
    last_round: int


ServerInstruction = Fold | Average | Clear | Reply | ReplyAverage | Forward | Take | Stop

# --- the state machine ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Account:
    """What the shard knows of one worker."""

    accepted: int = 0
    """The latest round that it was in."""
    told: int = 0
    is_busy: bool = False
    final_round: int | None = None
    """Once it has ended the period, the last round for which a push may still come."""
    due: deque[ReplyAverage] = field(default_factory=deque)
    is_waiting: bool = False
    """It has said so since its last push: until it is freed, perhaps by another bucket, it pushes nothing."""

    def may_push(self, round_number: int) -> bool:
        """Whether a push for ``round_number`` may come."""
        return self.final_round is None or round_number <= self.final_round


class ServerShard:
    """Decides for one bucket (see :mod:`syncline.updates.overlapped`).

    A worker has one push out, and pushes no more until it was told of that round; so all that lies here is for the
    round after the last one that was closed, or came too late.
    """

    def __init__(
        self,
        *,
        workers: Iterable[int],
        quorum: int,
        lost: Iterable[int] = (),
        succeeds: bool = False,
        ends_elsewhere: bool = False,
        shrinks: bool = False,
    ) -> None:
        """Begin with period 0; with ``succeeds``, learn the period from the workers' greetings first.

        ``lost`` are the workers that are known to be dead. With ``ends_elsewhere`` parameters are averaged without this
        shard: a worker only tells that it stops, and the first message of a later period begins that. With ``shrinks``
        a global gradient needs no more workers than live, or have pushed for it before they died.
        """
        self._shrinks = shrinks
        self._ends_elsewhere = ends_elsewhere
        self.quorum = quorum
        self.period = 0
        self.closed = 0
        self.clock = 0
        self._accounts = {worker: _Account() for worker in sorted(workers)}
        self._lost = set(lost)
        self._held: dict[int, Push] = {}
        """By worker, the pushes for the open round."""
        self._ends: dict[int, End] = {}
        self._greetings: dict[int, Hello] | None = {} if succeeds else None
        self._postponed: list[Push | End] = []
        self.dropped: Counter[int] = Counter()
        """By worker, pushes that are in no global gradient: they came when their round was closed or their period over,
        or it was abandoned, or the period ended before it closed."""

    def __repr__(self) -> str:
        return f"<ServerShard period {self.period}: {self.closed} rounds closed, {len(self._held)} pushes for the next>"

    def hear(self, message: ServerMessage) -> list[ServerInstruction]:
        """Take a worker's message."""
        if isinstance(message, Hello):
            return self._greet(message)
        if self._greetings is not None:
            self._postponed.append(message)
            return []
        return self._push(message) if isinstance(message, Push) else self._end(message)

    @property
    def alive(self) -> list[int]:
        """The workers that live, by rank."""
        return [worker for worker in self._accounts if worker not in self._lost]

    @property
    def is_quiet(self) -> bool:
        """Whether every reply that was due has left."""
        accounts = [self._accounts[worker] for worker in self.alive]
        return not any(account.is_busy or account.due for account in accounts)

    def missing(self) -> tuple[int, ...]:
        """Return whom the next thing (the open round, or the period's end) waits for: workers that live."""
        if self._greetings is not None:
            return tuple(worker for worker in self.alive if worker not in self._greetings)
        if self._ends:
            return self._lacking()
        return tuple(worker for worker in self.alive if worker not in self._held)

    # --- rounds ---------------------------------------------------------------------------------------------------

    def _push(self, push: Push) -> list[ServerInstruction]:
        account = self._accounts[push.worker]
        begun = self._go_on_to(push.period)
        is_of_period = push.period == self.period
        assert not is_of_period or push.round_number <= self.closed + 1, "a worker has one push out"
        account.is_waiting = account.is_waiting and not is_of_period
        is_late = push.round_number <= self.closed or not account.may_push(push.round_number)
        if not is_of_period or is_late or push.worker in self._held:
            self.dropped[push.worker] += 1
            return begun
        self._held[push.worker] = push
        return [*begun, *self._advance()]

    def _advance(self) -> list[ServerInstruction]:
        """Close the open round if it has its M workers, abandon it if it cannot get them, and tell the workers."""
        needed = self._needed()
        if not self._held or len(self._held) < needed <= len(self._held) + self._num_to_come():
            return []
        if len(self._held) >= needed:
            return self._complete(tuple(self._held[worker] for worker in sorted(self._held)))
        self._drop_held()
        self.closed += 1
        return self._tell()

    def _complete(self, contributions: tuple[Push, ...]) -> list[ServerInstruction]:
        """Make a global gradient of what is held: all that it needs."""
        self._held.clear()
        self.closed += 1
        return [self._fold(contributions), *self._tell()]

    def _drop_held(self) -> None:
        """Forget what is held, which will be in no global gradient."""
        self.dropped.update(self._held.keys())
        self._held.clear()

    def _tell(self) -> list[ServerInstruction]:
        return [reply for worker in self.alive for reply in self._reply(worker)]

    def _needed(self) -> int:
        """Return how many workers a global gradient needs: those whose push is here count as able."""
        num_able = len({*self.alive, *self._held})
        return max(1, min(self.quorum, num_able)) if self._shrinks else self.quorum

    def _num_to_come(self) -> int:
        """Return how many more workers may push for the open round."""
        accounts = [self._accounts[worker] for worker in self.alive if worker not in self._held]
        return sum(account.may_push(self.closed + 1) and not account.is_waiting for account in accounts)

    def wait(self, worker: int) -> list[ServerInstruction]:
        """Do not count on ``worker`` for a round while it waits: it may wait for whoever waits for that round.

        Where a global gradient needs all workers, none can be ahead in one bucket and behind in another as that takes.
        """
        if self.quorum == len(self._accounts):
            return []
        self._accounts[worker].is_waiting = True
        return self._advance()

    def _fold(self, contributions: tuple[Push, ...]) -> Fold:
        self.clock = max(self.clock, min(one.iteration for one in contributions))
        for one in contributions:
            self._accounts[one.worker].accepted = self.closed
        return Fold(round_number=self.closed, contributions=contributions)

    def replied(self, worker: int) -> list[ServerInstruction]:
        """Note that the reply to ``worker`` has left; another may follow."""
        self._accounts[worker].is_busy = False
        return self._reply(worker)

    def _reply(self, worker: int) -> list[ServerInstruction]:
        """Send ``worker`` what it has not been told, if the last reply has left."""
        account = self._accounts[worker]
        if worker in self._lost or account.is_busy:
            return []
        if account.due:
            account.is_busy = True
            return [account.due.popleft()]
        if account.final_round is not None or account.told == self.closed:
            return []
        account.is_busy = True
        account.told = self.closed
        reply = Reply(
            worker=worker, period=self.period, closed=self.closed, clock=self.clock, accepted=account.accepted
        )
        return [reply]

    # --- the end of a period -------------------------------------------------------------------------------------

    def _end(self, end: End) -> list[ServerInstruction]:
        if end.period != self.period or end.worker in self._ends:
            return []
        self._accounts[end.worker].final_round = 0
        self._ends[end.worker] = end
        return self._advance() + self._average()

    def _average(self) -> list[ServerInstruction]:
        """Average, if all who live have sent what they end with; that begins a period."""
        if not self.alive or self._lacking():
            return []
        contributions = tuple(self._ends[worker] for worker in sorted(self._ends))
        reached, told = max(one.iteration for one in contributions), contributions[0].told
        for worker in self.alive:
            reply = ReplyAverage(worker=worker, period=self.period, iteration=reached, told=told)
            self._accounts[worker].due.append(reply)
        average = Average(period=self.period, contributions=contributions)
        begun = self._begin_period(self.period + 1)
        return [average, *begun, *self._tell()]

    def _lacking(self) -> tuple[int, ...]:
        """Return who lives and has not ended the period."""
        return tuple(worker for worker in self.alive if worker not in self._ends)

    def stop(self, worker: int, *, period: int, last_round: int) -> list[ServerInstruction]:
        """Note that ``worker`` has ended a period that is averaged elsewhere, and pushes for no round after that."""
        begun = self._go_on_to(period)
        if period != self.period:
            return begun
        self._accounts[worker].final_round = last_round
        return [*begun, *self._advance()]

    def _go_on_to(self, period: int) -> list[ServerInstruction]:
        """Begin ``period`` if a worker is in it: it has the average before that, so all had come to its end."""
        return self._begin_period(period) if self._ends_elsewhere and period > self.period else []

    def _begin_period(self, period: int) -> list[ServerInstruction]:
        self._drop_held()
        self._ends.clear()
        self.period, self.closed, self.clock = period, 0, 0
        for account in self._accounts.values():
            account.accepted = account.told = 0
            account.final_round = None
            account.is_waiting = False
        return [Clear(period=period)]

    # --- losses --------------------------------------------------------------------------------------------------

    def lose(self, worker: int) -> list[ServerInstruction]:
        """Note that ``worker`` is dead, or has left; what arrived from it before still counts."""
        self._lost.add(worker)
        self._accounts[worker].due.clear()
        if self._greetings is not None:
            return self._learn_period()
        instructions = self._advance()
        return instructions + self._average()

    def _greet(self, event: Hello) -> list[ServerInstruction]:
        """Learn from the greetings of all workers which period this bucket is in."""
        if self._greetings is None or event.worker in self._greetings:
            return []
        self._greetings[event.worker] = event
        return self._learn_period()

    def _learn_period(self) -> list[ServerInstruction]:
        """Go on in the newest period that any worker has begun; one that missed its start gets it from another."""
        greetings = self._greetings
        if not greetings or any(worker not in greetings for worker in self.alive):
            return []
        newest = max(greetings.values(), key=lambda hello: hello.period)
        behind = [worker for worker in self.alive if greetings[worker].period < newest.period]
        instructions: list[ServerInstruction] = []
        if behind:
            instructions = [Average(period=newest.period - 1, contributions=(newest,))]
        for worker in behind:
            period = newest.period - 1
            reply = ReplyAverage(worker=worker, period=period, iteration=newest.iteration, told=newest.told)
            self._accounts[worker].due.append(reply)
        return instructions + self._succeed(newest.period)

    def _succeed(self, period: int) -> list[ServerInstruction]:
        """Take over the bucket in ``period``, with nothing known of its rounds, and take what had to wait."""
        self._greetings = None
        instructions = [*self._begin_period(period), *self._tell()]
        postponed, self._postponed = self._postponed, []
        for message in postponed:
            instructions += self.hear(message)
        return instructions
