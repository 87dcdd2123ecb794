"""An all-reduce of a thousand ranks in one process, on a tree of racks; in the second one a rank or a rack dies."""

from __future__ import annotations

import functools

import numpy as np
from virtual_memory import MemoryJob
from virtual_time import SimulationError, VirtualTime

from syncline.errors import PeerLostError
from syncline.runtime import CollectiveCall, numpy_reduction
from syncline.schedule import Collective, Layout, Schedule, plan_tree
from syncline.topology import Host, Link, Rank, Switch, Topology

NUM_RANKS = 1000
RACK = 25
TIMEOUT_S = 60.0


@functools.cache
def plan(num_ranks: int) -> tuple[Topology, Schedule]:
    """Return racks on one switch, and the tree's all-reduce."""
    link = Link(up_bytes_per_s=1e8, down_bytes_per_s=1e8)
    hosts = [Host(name=f"h{rank}", link=link, ranks=(Rank(rank=rank, link=link),)) for rank in range(num_ranks)]
    racks = [hosts[first : first + RACK] for first in range(0, num_ranks, RACK)]
    switches = [Switch(name=f"s{place}", link=link, children=tuple(rack)) for place, rack in enumerate(racks)]
    topology = Topology(name="many", root=Switch(name="core", link=None, children=tuple(switches)))
    return topology, plan_tree(topology, Collective.ALL_REDUCE)


class ManyRanks:
    """One seed of it; in the middle of the second call ``num_dead`` ranks of one rack die at once, if any."""

    def __init__(self, seed: int, *, num_ranks: int = NUM_RANKS, num_dead: int = 1, num_elements: int = 2000) -> None:
        self.time = VirtualTime(f"many {seed}")
        self.topology, self.schedule = plan(num_ranks)
        self.job = MemoryJob(self.time, self.topology, delay_s=0.001, eager_bytes=64, notes=False)
        self.layout = Layout.build(self.schedule, num_elements, 1 << 20)
        source = np.random.default_rng(seed)
        self.inputs = [source.normal(size=num_elements).astype(np.float32) for _ in range(num_ranks)]
        first = self.time.random.randrange(num_ranks)
        first -= first % num_dead if num_dead > 1 else 0
        self.victims = range(first, first + num_dead)

    def run(self) -> VirtualTime:
        """Play it and judge it; return its time."""
        try:
            self._check_sum(self._call(0))
            if self.victims:
                self.time.after(0.003, self._kill)
                self._check_death(self._call(1))
            return self.time
        finally:
            self.time.close()

    def _kill(self) -> None:
        for victim in self.victims:
            self.job.kill(victim, detection_s=0.05)

    def _call(self, number: int) -> tuple[list[np.ndarray], dict[int, BaseException | None]]:
        """Let all ranks make a call; return their buffers, and how it ended for each."""
        buffers = [buffer.copy() for buffer in self.inputs]
        outcomes: dict[int, BaseException | None] = {}

        async def make(rank: int) -> None:
            call = CollectiveCall(
                stream=1,
                schedule=self.schedule,
                layout=self.layout,
                buffer=memoryview(buffers[rank]).cast("B"),
                reduction=numpy_reduction("float32"),
                label=f"call {number}",
                timeout_s=TIMEOUT_S,
            )
            error = await self.job.make(rank, call)
            if rank not in self.job.dead:
                outcomes[rank] = error
                self.time.note(f"rank {rank}: {error}")

        for rank in self.job.living:
            self.job.host.start(make(rank))
        num_dead = len(self.victims) if number > 0 else 0
        if not self.time.run(lambda: len(outcomes) == len(self.inputs) - num_dead, limit_s=3 * TIMEOUT_S):
            raise SimulationError(f"call {number} hangs")
        return buffers, outcomes

    def _check_sum(self, ended: tuple[list[np.ndarray], dict[int, BaseException | None]]) -> None:
        buffers, outcomes = ended
        wrong = {rank: error for rank, error in outcomes.items() if error is not None}
        if wrong or any(buffer.tobytes() != buffers[0].tobytes() for buffer in buffers):
            raise SimulationError(f"ranks do not hold the same bits: {wrong}")
        if not np.allclose(buffers[0], np.sum(self.inputs, axis=0, dtype=np.float64), atol=1e-2):
            raise SimulationError("the sum is wrong")

    def _check_death(self, ended: tuple[list[np.ndarray], dict[int, BaseException | None]]) -> None:
        for rank, error in ended[1].items():
            if not (isinstance(error, PeerLostError) and error.rank in self.victims):
                raise SimulationError(f"rank {rank} names none of {self.victims}: {error!r}")


def play(seed: int) -> VirtualTime:
    """Play one seed; return its time."""
    return ManyRanks(seed).run()
