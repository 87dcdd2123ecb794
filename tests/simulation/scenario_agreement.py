"""Elastic jobs on virtual time: deaths, cuts, stopped and hung ranks, also in the midst of the agreement.

Each rank makes steps with the members of its epoch: one is over for a rank when all members have sent it theirs. So a
step shows who went on with whom. What must hold: no step is made twice with different members, whoever makes it; those
who go on are all in one epoch; nobody hangs; who stops is told why; and where enough are left, they do go on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

from virtual_time import SimulationError, VirtualTime

from syncline.members import Epoch
from syncline.members.agreement import Agreement, Effect, Go, Interrupt, Report, Stop, Tell

DEAD_S = 10.0
TIMEOUT_S = 15.0
FAULTS = ("none", "deaths", "deaths", "sides", "pair", "one way", "stop", "hang", "all")


class ElasticRank:
    """One rank: its agreement, and a driver that does with it what the regroup does."""

    def __init__(self, scenario: AgreementScenario, rank: int) -> None:
        self.scenario, self.rank = scenario, rank
        self.machine = Agreement(rank=rank, epoch=scenario.first_epoch, min_ranks=scenario.min_ranks)
        self.epoch = scenario.first_epoch
        self.made: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Each step that was made here, in which epoch and with whom."""
        self.step = 0
        self.is_dead = self.is_resting = False
        self.away_until_s = 0.0
        self.hangs_until_s = 0.0
        self.stopped: Exception | None = None
        self.lost: set[int] = set()
        self.last_due_s = [0.0] * len(scenario.first_epoch.members)
        """When what was sent last to each rank arrives."""
        self._heard: dict[tuple[int, int], set[int]] = {}
        """Of each epoch and step, whose part is here."""
        self._positions: dict[int, dict[int, int]] = {}
        self._is_interrupted = False
        self._is_entering = False
        self._timers = 0

    @property
    def is_working(self) -> bool:
        return not (self.is_dead or self.stopped or self.is_resting)

    # The training thread.

    def begin_step(self) -> None:
        """Send this rank's part of the next step to all members."""
        if not self.is_working or self.step >= self.scenario.num_steps:
            return
        if self.hangs_until_s > self.scenario.time.now_s:
            self.scenario.time.at(self.hangs_until_s, self.begin_step)
            return
        key = (self.epoch.number, self.step)
        self.scenario.send(self, self.epoch.members, ElasticRank._on_part, *key)
        self.scenario.time.after(TIMEOUT_S, self._on_deadline, *key)
        self._on_part(self.rank, *key)

    def _on_part(self, peer: int, number: int, step: int) -> None:
        heard = self._heard.setdefault((number, step), set())
        heard.add(peer)
        if self._are_all_members(heard) and self.is_working and (number, step) == (self.epoch.number, self.step):
            self._finish_step()

    def _are_all_members(self, ranks: Set[int]) -> bool:
        """Whether these are the members of the epoch; of many ranks, most parts are not the last one."""
        return len(ranks) == self.epoch.world_size and ranks == {*self.epoch.members}

    def _finish_step(self) -> None:
        self.scenario.note_step(self.rank, self.step, self.epoch)
        self.made[self.step] = (self.epoch.number, self.epoch.members)
        self.step += 1
        self.scenario.time.after(self.scenario.time.random.uniform(0.1, 0.6), self.begin_step)

    def _on_deadline(self, number: int, step: int) -> None:
        """A call's time is over: whoever did not send its part is accused."""
        if self.is_working and (number, step) == (self.epoch.number, self.step):
            silent = set(self.epoch.members) - self._heard.get((number, step), set())
            self._rest(sorted(silent))

    def _fail_soon(self) -> None:
        """The epoch's calls end with an error; the training thread comes to rest when it sees that."""
        self.scenario.time.after(self.scenario.time.random.uniform(0.0, 0.3), self._rest_if_working, self.epoch.number)

    def _rest_if_working(self, number: int) -> None:
        if self.is_working and self.epoch.number == number and self.hangs_until_s <= self.scenario.time.now_s:
            self._rest(())
        elif self.is_working and self.epoch.number == number:
            self.scenario.time.at(self.hangs_until_s, self._rest_if_working, number)

    def _rest(self, accused: Sequence[int]) -> None:
        self.is_resting, self._is_interrupted = True, False
        self._start_timer()
        for rank in accused:
            self.do(self.machine.lose(rank))
        if self.is_resting:
            self.do(self.machine.rest(first_free=1 + 10 * self.epoch.number))

    def _start_timer(self) -> None:
        self._timers += 1
        self.scenario.time.after(TIMEOUT_S, self._expire, self._timers)

    def _expire(self, timer: int) -> None:
        if timer == self._timers and self.is_resting and not self.is_dead and not self.stopped:
            self._start_timer()
            self.do(self.machine.expire())

    def _enter(self, go: Go) -> None:
        """The training thread goes on in the new epoch: first all tell which step they are in."""
        if self.is_dead or self.stopped:
            return
        self.is_resting, self.epoch = False, go.epoch
        self._is_entering = True
        self.scenario.send(self, go.epoch.members, ElasticRank._on_position, go.epoch.number, self.step)
        self._on_position(self.rank, go.epoch.number, self.step)
        self.scenario.time.after(TIMEOUT_S, self._on_late_position, go.epoch.number)
        if self._is_interrupted:
            self._fail_soon()

    def _on_position(self, peer: int, number: int, step: int) -> None:
        positions = self._positions.setdefault(number, {})
        positions[peer] = step
        is_now = self._is_entering and number == self.epoch.number
        if is_now and self._are_all_members(positions.keys()) and self.is_working:
            self._is_entering = False
            newest = max(positions.values())
            if newest > self.step + 1:
                raise SimulationError(f"rank {self.rank} is in step {self.step}, another in {newest}")
            self.step = newest  # whoever made it gives its result to the others
            self.scenario.time.after(0.05, self.begin_step)

    def _on_late_position(self, number: int) -> None:
        if self.is_working and self._is_entering and number == self.epoch.number:
            self._rest(sorted(set(self.epoch.members) - self._positions[number].keys()))

    # The fabric.

    def lose(self, peer: int) -> None:
        """The fabric has lost a peer."""
        if self.is_dead or self.stopped or peer in self.lost:
            return
        self.lost.add(peer)
        self.scenario.time.note(f"{self.rank} loses {peer}")
        self.do(self.machine.lose(peer))
        if self.is_working and peer in self.epoch.members:
            self._fail_soon()

    def hear(self, peer: int, report: Report) -> None:
        """A report arrives."""
        if self.stopped is None:
            self.do(self.machine.hear(peer, report))

    def do(self, effects: Sequence[Effect]) -> None:
        """Carry out what the agreement says."""
        for effect in effects:
            if isinstance(effect, Tell):
                self.scenario.send(self, effect.peers, ElasticRank.hear, effect.report)
            elif isinstance(effect, Interrupt):
                self._is_interrupted = True
                if self.is_working:
                    self._fail_soon()
            elif isinstance(effect, Go):
                self.scenario.note_go(self.rank, effect)
                self._timers += 1
                self.scenario.time.after(self.scenario.time.random.uniform(0.0, 0.2), self._enter, effect)
            else:
                assert isinstance(effect, Stop)
                self.scenario.time.note(f"{self.rank} stops: {effect.error}")
                self.stopped = effect.error


class AgreementScenario:
    """One seed of it."""

    def __init__(self, seed: int, *, num_ranks: int = 0, fault: str | None = None, num_steps: int = 12):
        choose = self.choose = random.Random(f"agreement {seed}")
        self.time = VirtualTime(f"agreement time {seed}")
        num_ranks = num_ranks or choose.randint(2, 8)
        self.fault = fault or choose.choice(FAULTS)
        self.min_ranks = choose.choice((1, 1, 1, 2))
        self.num_steps = num_steps
        self.first_epoch = Epoch(number=0, members=tuple(range(num_ranks)))
        self.delay_s = choose.choice((0.001, 0.05, 0.3))
        self.ranks = [ElasticRank(self, rank) for rank in range(num_ranks)]
        self.cuts: set[tuple[int, int]] = set()
        self.num_killed = 0
        self._epochs: dict[tuple[int, tuple[int, ...]], int] = {}

    def run(self) -> VirtualTime:
        """Play it and judge it; return its time."""
        for rank in self.ranks:
            self.time.after(self.choose.random(), rank.begin_step)
        strikes = {"none": 0, "deaths": self.choose.randint(1, 4), "all": self.choose.randint(2, 4)}
        for _ in range(strikes.get(self.fault, 1)):
            self.time.at(self.choose.choice((1.0, 1.2, 2.0, 11.5, 12.0)) + self.choose.random(), self._strike)
        self.time.run(lambda: False, limit_s=600.0)
        self._check()
        return self.time

    # The network.

    def send(self, sender: ElasticRank, peers: Sequence[int], method: Callable[..., None], *what: Any) -> None:
        """Call a method of other ranks, some time, with the sender and something else."""
        if not sender.is_dead:
            self.time.at_each(self._due(sender, peers), self._arrive, sender.rank, method, what)

    def _due(self, sender: ElasticRank, peers: Sequence[int]) -> Iterator[tuple[float, ElasticRank]]:
        now_s, delay_s, draw, last_due_s = self.time.now_s, self.delay_s, self.time.random.uniform, sender.last_due_s
        for peer in peers:
            if peer not in sender.lost and peer != sender.rank:
                due_s = last_due_s[peer] = max(now_s + delay_s * draw(0.3, 3.0), last_due_s[peer])
                yield due_s, self.ranks[peer]

    def _arrive(self, target: ElasticRank, source: int, method: Callable[..., None], what: tuple[Any, ...]) -> None:
        if target.is_dead or (source, target.rank) in self.cuts or source in target.lost:
            return
        if target.away_until_s > self.time.now_s:
            self.time.at(target.away_until_s, self._arrive, target, source, method, what)
            return
        method(target, source, *what)

    # Faults.

    def _strike(self) -> None:
        choose = self.choose
        living = [rank for rank in self.ranks if not rank.is_dead]
        fault = choose.choice(FAULTS[1:-1]) if self.fault == "all" else self.fault
        victim = choose.choice(living)
        self.time.note(f"{fault} of {victim.rank}")
        if fault == "deaths" and len(living) > 1:
            self._kill(victim)
        elif fault == "sides":
            of = {rank.rank: choose.random() < 0.5 for rank in self.ranks}
            self._cut([(a, b) for a in of for b in of if of[a] != of[b]])
        elif fault in ("pair", "one way") and len(living) > 1:
            other = choose.choice([rank for rank in living if rank is not victim])
            pairs = [(victim.rank, other.rank), (other.rank, victim.rank)]
            self._cut(pairs if fault == "pair" else pairs[:1])
        elif fault == "stop":
            self._stop(victim)
        elif fault == "hang":
            victim.hangs_until_s = self.time.now_s + choose.uniform(1.0, 40.0)

    def _kill(self, victim: ElasticRank) -> None:
        victim.is_dead = True
        self.num_killed += 1
        is_seen_at_once = self.choose.random() < 0.7
        for rank in self.ranks:
            if rank is not victim:
                delay_s = self.delay_s if is_seen_at_once else DEAD_S
                self.time.after(delay_s + self.time.random.random(), rank.lose, victim.rank)

    def _cut(self, pairs: Sequence[tuple[int, int]]) -> None:
        """What is cut one way only is seen by one end, which closes the connection."""
        self.cuts.update(pairs)
        for source, target in pairs:
            seen_s = self.time.now_s + DEAD_S + self.time.random.random()
            self.time.at(seen_s, self.ranks[target].lose, source)
            if (target, source) not in self.cuts:
                self.time.at(seen_s + self.delay_s, self.ranks[source].lose, target)

    def _stop(self, victim: ElasticRank) -> None:
        away_s = self.choose.choice((3.0, 25.0))
        back_s = victim.away_until_s = self.time.now_s + away_s
        victim.hangs_until_s = back_s
        if away_s > DEAD_S:
            for rank in self.ranks:
                if rank is not victim:
                    self.time.after(DEAD_S + self.time.random.random(), rank.lose, victim.rank)
                    self.time.at(back_s + self.time.random.random() * self.delay_s, victim.lose, rank.rank)

    # What must hold.

    def note_step(self, rank: int, step: int, epoch: Epoch) -> None:
        """A rank has made a step."""
        self.time.note(f"{rank} makes step {step} in {epoch}")

    def note_go(self, rank: int, go: Go) -> None:
        """A rank goes on: on the same streams as all of its epoch."""
        self.time.note(f"{rank} goes on in {go.epoch}")
        key = (go.epoch.number, go.epoch.members)
        if rank not in go.epoch.members or self._epochs.setdefault(key, go.first_stream) != go.first_stream:
            raise SimulationError(f"rank {rank} enters {go}, others from stream {self._epochs[key]} on")

    def _check(self) -> None:
        living = [rank for rank in self.ranks if not rank.is_dead]
        hung = [rank.rank for rank in living if rank.stopped is None and rank.step < self.num_steps]
        if hung:
            raise SimulationError(f"ranks {hung} hang after {self.fault}")
        for rank in living:
            if rank.stopped is not None and "rank" not in str(rank.stopped):
                raise SimulationError(f"rank {rank.rank} stops, and does not say for whom: {rank.stopped}")
        newest = max(
            (rank.epoch for rank in living if rank.stopped is None), default=None, key=lambda epoch: epoch.number
        )
        if newest is not None:
            self._check_steps([rank for rank in living if rank.stopped is None and rank.rank in newest.members], newest)
        self._check_liveness(living)

    def _check_steps(self, going_on: list[ElasticRank], newest: Epoch) -> None:
        """Who went on made each step with the same members; who did not may have ended one more, that nobody saw."""
        agreed: dict[int, tuple[int, tuple[int, ...]]] = {}
        for rank in going_on:
            if rank.epoch != newest:
                raise SimulationError(f"rank {rank.rank} goes on in {rank.epoch}, others in {newest}")
            for step, made in rank.made.items():
                if agreed.setdefault(step, made) != made:
                    raise SimulationError(f"rank {rank.rank} made step {step} in {made}, another in {agreed[step]}")
        for rank in self.ranks:
            for step, made in rank.made.items():
                if rank not in going_on and step < max(rank.made) and agreed.get(step, made) != made:
                    raise SimulationError(f"rank {rank.rank} made step {step} in {made}, others in {agreed[step]}")

    def _check_liveness(self, living: list[ElasticRank]) -> None:
        """Where nobody but the dead is missed, and few enough are, all others go on."""
        num_ranks = len(self.ranks)
        stopped = [rank.rank for rank in living if rank.stopped is not None]
        if self.fault == "none" and stopped:
            raise SimulationError(f"ranks {stopped} stop though nothing is wrong")
        if self.fault == "deaths" and 2 * self.num_killed < num_ranks and len(living) >= self.min_ranks and stopped:
            raise SimulationError(f"ranks {stopped} stop though {len(living)} of {num_ranks} live")
        if self.fault in ("pair", "one way") and num_ranks > 2 and num_ranks - 1 >= self.min_ranks and len(stopped) > 1:
            raise SimulationError(f"ranks {stopped} stop for one cut")


def play(seed: int) -> VirtualTime:
    """Play one seed; return its time."""
    return AgreementScenario(seed).run()
