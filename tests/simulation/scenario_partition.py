"""Idle jobs on virtual sockets that are cut into sides, lose ranks and stand still: who holds whom for lost.

When all is quiet, the ranks that live fall into sides: within a side nobody holds another for lost, and all hold the
same ranks for lost; whoever is of another side is lost. By the rule of memberships at most one side may go on.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from virtual_job import VirtualJob, VirtualRank, virtual_sockets
from virtual_network import VirtualNetwork
from virtual_time import SimulationError, VirtualTime

from syncline.errors import PeerLostError
from syncline.fabric import PeerLeftError
from syncline.members import Membership, Quorum
from syncline.topology import Topology

CONNECTED_S = 2.0
STRIKES_S = 6.0
STOP_S = 14.0
SETTLED_S = STOP_S + 13.0
"""A rank is given up after 10 s of silence, and news of it takes some more."""


class PartitionScenario:
    """One seed of it; ``pairs``, each cut 2 s later than the one before, instead of what the seed would choose."""

    def __init__(
        self,
        seed: int,
        *,
        num_ranks: int | None = None,
        pairs: Sequence[tuple[int, int]] = (),
        settled_s: float = SETTLED_S,
        **options: Any,
    ) -> None:
        choose = self.choose = random.Random(f"partition {seed}")
        self.topology = Topology.flat(num_ranks or choose.randint(2, 6))
        self.pairs = pairs
        self.time = VirtualTime(f"partition time {seed}")
        self.network = VirtualNetwork(self.time, delay_s=choose.choice((0.001, 0.02)))
        self.job = VirtualJob(self.time, self.network, self.topology, **options)
        self.settled_s = settled_s

    def run(self) -> VirtualTime:
        """Play it and judge it; return its time."""
        with virtual_sockets(self.network):
            try:
                for rank in self.job.ranks:
                    rank.host.start(self._main(rank))
                for place, pair in enumerate(self.pairs):
                    self.time.at(CONNECTED_S + 2 * place, self._cut, *(self.job.ranks[rank] for rank in pair))
                for _ in range(0 if self.pairs else self.choose.randint(1, 3)):
                    self.time.at(CONNECTED_S + self.choose.uniform(0, STRIKES_S), self._strike)
                self.time.run(lambda: False, limit_s=CONNECTED_S + STRIKES_S + self.settled_s)
                self._check()
                return self.time
            finally:
                self.time.close()

    async def _main(self, rank: VirtualRank) -> None:
        if not await self.job.connect(rank):
            raise SimulationError(f"rank {rank.rank} could not connect: {rank.connect_error!r}")
        await asyncio.sleep(3600)

    def _strike(self) -> None:
        choose, ranks = self.choose, self.job.living
        kind = choose.choice(("sides", "sides", "pair", "one way", "kill", "power", "stop"))
        victim = choose.choice(ranks)
        self.time.note(kind)
        if kind == "sides":
            of = {rank.rank: choose.random() < 0.5 for rank in ranks}
            for one in ranks:
                for other in ranks:
                    if of[one.rank] != of[other.rank]:
                        self.network.cut(one.host, other.host, 1000.0)
        elif kind in ("pair", "one way") and len(ranks) > 1:
            other = choose.choice([rank for rank in ranks if rank is not victim])
            self._cut(victim, other, both_ways=kind == "pair")
        elif kind == "stop":
            victim.host.stop(choose.uniform(1.0, STOP_S))
        elif len(ranks) > 1 and kind in ("kill", "power"):
            self.network.kill(victim.host, says_so=kind == "kill")

    def _cut(self, one: VirtualRank, other: VirtualRank, both_ways: bool = True) -> None:
        self.network.cut(one.host, other.host, 1000.0)
        if both_ways:
            self.network.cut(other.host, one.host, 1000.0)

    def _check(self) -> None:
        living = self.job.living
        lost = {rank.rank: self._losses(rank) for rank in living}
        told = {rank: sorted(losses) for rank, losses in lost.items()}
        dead = {rank.rank for rank in self.job.ranks} - set(lost)
        go_on: list[set[int]] = []
        for rank, losses in lost.items():
            if not dead <= losses:
                raise SimulationError(f"rank {rank} does not know of the deaths of {sorted(dead - losses)}: {told}")
            side = set(lost) - losses
            for other in side:
                if lost[other] != losses:
                    raise SimulationError(f"ranks {rank} and {other} of one side do not agree: {told}")
            if side not in go_on and self._may_go_on(losses):
                go_on.append(side)
        if len(go_on) > 1:
            raise SimulationError(f"more than one side goes on: {go_on}")

    def _losses(self, rank: VirtualRank) -> set[int]:
        assert rank.ear is not None
        if errors := rank.host.errors:  # once seen, they are not told again
            raise SimulationError(f"rank {rank.rank}: {errors[0]!r} on its loop")
        for peer, error in rank.ear.losses.items():
            if (
                not isinstance(error, PeerLostError)
                or isinstance(error, PeerLeftError)
                or f"rank {peer} " not in str(error)
            ):
                raise SimulationError(f"rank {rank.rank} lost rank {peer}: {error!r}")
        return set(rank.ear.losses)

    def _may_go_on(self, losses: set[int]) -> bool:
        membership = Membership(tuple(range(self.topology.num_ranks)))
        for rank in losses:
            membership.lose(rank)
        return membership.shortage(Quorum()) is None


def play(seed: int) -> VirtualTime:
    """Play one seed; return its time."""
    return PartitionScenario(seed).run()
