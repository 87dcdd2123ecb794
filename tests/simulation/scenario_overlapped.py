"""The overlapped update's machines on virtual time: links that keep their order, slow workers, deaths, repeated pushes.

The fleet of `tests/updates/overlapped` checks after each step that every gradient entered once, on exact numbers.
"""

from __future__ import annotations

import hashlib
import random
from fractions import Fraction

from overlapped_fleet import Fleet
from test_overlapped_random import repeat_something
from virtual_time import SimulationError, VirtualTime

MANY_ITERATIONS = 2
PRIME = (1 << 127) - 1
KINDS = ("step", "pull_and_step", "up", "down")


class HashedFleet(Fleet):
    """A fleet of many: where a digit for each gradient would take a megabyte, each is a random number modulo a prime.

    Two different means of gradients are the same number once in 2 ** 127 times.
    """

    def gradient(self, worker: int, number: int) -> int:
        return int.from_bytes(hashlib.blake2b(b"%d %d" % (worker, number), digest_size=16).digest(), "little") % PRIME

    def divide(self, total: int, by: int) -> int:
        return total * pow(by, -1, PRIME) % PRIME


class OverlappedScenario:
    """One seed of it; with many workers few steps are made."""

    def __init__(self, seed: int, *, num_ranks: int = 0) -> None:
        choose = self.choose = random.Random(f"overlapped {seed}")
        self.time = VirtualTime(f"overlapped time {seed}")
        num_workers = num_ranks or choose.randint(2, 8)
        self.quorum = choose.randint(1, num_workers)
        self.num_deaths = choose.randint(0, min(8, num_workers - self.quorum))
        max_staleness = choose.choice((None, 0, 1, 3, 8))
        self.fleet = (HashedFleet if num_ranks else Fleet)(
            num_workers=num_workers,
            num_iterations=MANY_ITERATIONS if num_ranks else choose.randint(1, 10),
            quorum=self.quorum,
            max_staleness=max_staleness,
            end=True,
            is_prompt=choose.random() < 0.2,
        )
        self.delay_s = {
            (kind, rank): choose.choice((0.01, 0.01, 0.05, 0.4)) for kind in KINDS for rank in range(num_workers)
        }
        self.away_until_s = dict.fromkeys(range(num_workers), 0.0)
        self._due: set[tuple[str, int]] = set()

    def run(self) -> VirtualTime:
        """Play it and judge it; return its time."""
        for _ in range(self.num_deaths):
            self.time.at(self.choose.uniform(0, 0.5), self._kill)
        for rank in self.away_until_s:
            if self.choose.random() < 0.1:
                self.away_until_s[rank] = self.choose.uniform(0.5, 5.0)
        self._plan()
        self.time.run(lambda: False, limit_s=10_000.0)
        self._check()
        return self.time

    def _plan(self) -> None:
        for choice in self.fleet.choices():
            if choice not in self._due:
                self._due.add(choice)
                kind, rank = choice
                begin_s = self.time.now_s if kind == "up" else max(self.time.now_s, self.away_until_s[rank])
                self.time.at(begin_s + self.delay_s[choice] * self.time.random.uniform(0.3, 2.0), self._happen, choice)

    def _happen(self, choice: tuple[str, int]) -> None:
        self._due.discard(choice)
        if choice in self.fleet.choices():
            self.time.note(f"{choice}")
            self.fleet.do(*choice)
            if self.time.random.random() < 0.05:
                repeat_something(self.fleet, self.time.random)
        self._plan()

    def _kill(self) -> None:
        living = [worker.rank for worker in self.fleet.workers if not worker.is_dead]
        rank = self.choose.choice(living)
        self.time.note(f"worker {rank} dies")
        self.fleet.kill(rank)
        self._plan()

    def _check(self) -> None:
        fleet = self.fleet
        alive = [worker for worker in fleet.workers if not worker.is_dead]
        waiting = [worker.rank for worker in alive if not worker.has_ended]
        if waiting:
            raise SimulationError(f"workers {waiting} wait for ever")
        starts = {worker.next_start for worker in alive}
        if starts != {fleet.average}:
            raise SimulationError(f"workers begin the next period with {starts}")
        if (fleet.shard.period, fleet.shard.closed, fleet.held) != (1, 0, []):
            raise SimulationError(f"the server keeps {fleet.held} in period {fleet.shard.period}")
        if self.quorum == len(fleet.workers):
            weight = sum(int(worker.clock.num_samples) for worker in alive)
            total = sum(worker.fed * int(worker.clock.num_samples) for worker in alive)
            if fleet.average != Fraction(total, weight):
                raise SimulationError("the average is not that of what all workers hold")


def play(seed: int) -> VirtualTime:
    """Play one seed; return its time."""
    return OverlappedScenario(seed).run()
