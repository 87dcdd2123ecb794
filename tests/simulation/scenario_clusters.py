"""The clustered update's machines on virtual time: slow and dying ranks, elections, and jobs that are cut into sides.

The world of `tests/updates/clustered` says what may happen and what must hold; here it happens when it is due. Links
keep their order, and what a link carries while it is cut never arrives.
"""

from __future__ import annotations

import itertools
import random

from cluster_world import KINDS
from random_worlds import random_world
from virtual_time import SimulationError, VirtualTime

DETECTION_S = 10.0
MANY_SIZE = 25
MANY_DEATHS = 2


class ClusterScenario:
    """One seed of it; with many ranks, in clusters of 25, two die.

    Nothing is cut there: each of one side would lose each of the other.
    """

    def __init__(self, seed: int, *, num_ranks: int = 0) -> None:
        choose = self.choose = random.Random(f"clusters {seed}")
        self.time = VirtualTime(f"clusters time {seed}")
        self.is_many = num_ranks > 0
        self.is_cut = choose.random() < 0.25 and not self.is_many
        sizes = [MANY_SIZE] * (num_ranks // MANY_SIZE)
        self.world = random_world(choose, quorum=0.5 if self.is_cut else 0.0, sizes=sizes)
        self.ranks = sorted(self.world.players)
        self.delay_s = dict.fromkeys(self.ranks, 0.01)
        for rank in choose.sample(self.ranks, choose.randint(0, len(self.ranks) // 2)):
            self.delay_s[rank] = choose.choice((0.1, 1.0))
        self.away_until_s = dict.fromkeys(self.ranks, 0.0)
        self.sides: list[set[int]] = [set(self.ranks)]
        self._due: set[tuple] = set()
        is_parted = choose.random() < 0.2 and not self.is_cut and not self.is_many and len(self.ranks) > 2
        self.parted = sorted(choose.sample(self.ranks, 2)) if is_parted else []
        """Two that lose each other, and nobody else."""

    def run(self) -> VirtualTime:
        """Play it and judge it; return its time."""
        if self.is_cut:
            self.time.at(self.choose.uniform(0, 1.0), self._cut)
        elif self.parted:
            self.time.at(self.choose.uniform(0, 1.0), self._part)
        else:
            num_deaths = self.choose.choice((0, 1, 2, 4))
            for _ in range(MANY_DEATHS if self.is_many else num_deaths):
                self.time.at(self.choose.uniform(0, 3.0), self._kill)
        for rank in self.choose.sample(self.ranks, self.choose.randint(0, 1)):
            self.time.at(self.choose.uniform(0, 1.0), self._pause, rank)
        self._plan()
        self.time.run(lambda: False, limit_s=10_000.0)
        if self._due:
            raise SimulationError(f"things go on for ever: {sorted(self._due)[:5]}")
        self._check()
        return self.time

    def _plan(self) -> None:
        """Let whatever may happen now happen when it is due."""
        fresh, self.world.fresh = self.world.fresh, set()
        for name in sorted(fresh - self._due, key=lambda choice: (KINDS.index(choice[0]), choice)):
            if not self.world.is_possible(self._choice(name)):
                continue
            self._due.add(name)
            rank = name[2] if name[0] == "deliver" else name[1] if name[0] != "late" else self.ranks[0]
            delay_s = self.delay_s[rank] * self.time.random.uniform(0.2, 2.0)
            if name[0] == "notice":
                delay_s += self.time.random.choice((0.0, DETECTION_S))
            self.time.at(max(self.time.now_s, self.away_until_s[rank]) + delay_s, self._happen, name)

    def _choice(self, name: tuple) -> tuple:
        """What happens under a name: of all that is late, the first."""
        return self.world.next_late() if name[0] == "late" else name

    def _happen(self, name: tuple) -> None:
        self._due.discard(name)
        self.world.fresh.add(name)
        choice = self._choice(name)
        if self.world.is_possible(choice):
            self.time.note(str(choice))
            self.world.happen(choice)
        self._plan()

    def _kill(self) -> None:
        live = self.world.live()
        if len(live) > 1:
            servers = [rank for rank in live if self.world.players[rank].node.servers]
            rank = self.choose.choice(servers if servers and self.choose.random() < 0.7 else live)
            self.time.note(f"rank {rank} dies")
            self.world.kill(rank, self.choose)
            self._plan()

    def _pause(self, rank: int) -> None:
        self.away_until_s[rank] = self.time.now_s + self.choose.uniform(1.0, 8.0)

    def _cut(self) -> None:
        low = set(self.choose.sample(self.ranks, self.choose.randint(1, len(self.ranks))))
        self.sides = [low, set(self.ranks) - low]
        self.time.note(f"cut into {self.sides}")
        self.world.cut(itertools.product(sorted(low), sorted(self.sides[1])))
        self._plan()

    def _part(self) -> None:
        lower, higher = self.parted
        self.sides = [set(self.ranks) - {higher}, set(self.ranks) - {lower}]
        self.time.note(f"ranks {lower} and {higher} lose each other")
        self.world.cut([(lower, higher)])
        self._plan()

    def _check(self) -> None:
        world = self.world
        live = world.live()
        if not any(side.issuperset(live) for side in self.sides):
            raise SimulationError(f"both sides of {self.sides} go on: {live}")
        if (self.is_cut or self.parted) and self._should_go_on() != set(live):
            raise SimulationError(f"of {self.sides} only {live} go on, not {self._should_go_on()}")
        world.check_finished()

    def _should_go_on(self) -> set[int]:
        """Who is of the larger side, or of two equal ones of that with the lowest rank; of two ranks the lower."""
        return max(self.sides, key=lambda side: (len(side), self.ranks[0] in side))


def play(seed: int) -> VirtualTime:
    """Play one seed; return its time."""
    return ClusterScenario(seed).run()
