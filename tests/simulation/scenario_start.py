"""Many ranks start on virtual sockets and all-reduce; in the middle of a second one all ranks of a rack die."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scenario_many import RACK, plan
from virtual_job import PlannedCall, VirtualJob, VirtualRank, virtual_sockets
from virtual_network import VirtualNetwork
from virtual_time import SimulationError, VirtualTime

from syncline.errors import PeerLostError
from syncline.schedule import Layout

LIMIT_S, TIMEOUT_S = 120.0, 60.0
NUM_ELEMENTS = 2000


class StartScenario:
    """One seed of it, with the fabric and the transport that users run; the network takes half a millisecond."""

    def __init__(self, seed: int, *, num_ranks: int) -> None:
        self.time = VirtualTime(f"start {seed}")
        self.network = VirtualNetwork(self.time, delay_s=0.0005)
        topology, schedule = plan(num_ranks)
        self.job = VirtualJob(self.time, self.network, topology, authenticate_frames=False)
        first = RACK * self.time.random.randrange(num_ranks // RACK)
        self.victims = range(first, first + RACK)
        source, layout = np.random.default_rng(seed), Layout.build(schedule, NUM_ELEMENTS, 1 << 20)
        self.calls = [
            PlannedCall(
                number=number,
                schedule=schedule,
                layout=layout,
                buffers=tuple(source.normal(size=NUM_ELEMENTS).astype(np.float32) for _ in range(num_ranks)),
                timeout_s=TIMEOUT_S,
            )
            for number in range(2)
        ]
        self.num_connected = 0

    def run(self) -> VirtualTime:
        """Play it and judge it; return its time."""
        try:
            with virtual_sockets(self.network):
                for rank in self.job.ranks:
                    rank.host.start(self._main(rank))
                self._go_on("start", lambda: self.num_connected == len(self.job.ranks))
                self._go_on("first call", lambda: all(0 in rank.outcomes for rank in self.job.ranks))
                self._check_sum()
                self.time.after(0.001, self._kill)
                self._go_on("second call", lambda: all(1 in rank.outcomes for rank in self.job.living))
                self._check_deaths()
            return self.time
        finally:
            self.time.close()

    async def _main(self, rank: VirtualRank) -> None:
        if not await self.job.connect(rank):
            return
        self.num_connected += 1
        for call in self.calls:
            await self.job.make(rank, call)

    def _go_on(self, what: str, is_over: Callable[[], bool]) -> None:
        if not self.time.run(is_over, limit_s=self.time.now_s + LIMIT_S):
            raise SimulationError(f"the {what} hangs, with {self.num_connected} of {len(self.job.ranks)} connected")
        self.time.note(f"the {what} is over")

    def _kill(self) -> None:
        for victim in self.victims:
            self.network.kill(self.job.ranks[victim].host)

    def _check_sum(self) -> None:
        wrong = {rank.rank: rank.outcomes[0] for rank in self.job.ranks if rank.outcomes[0] is not None}
        if wrong or len({rank.buffers[0].tobytes() for rank in self.job.ranks}) > 1:
            raise SimulationError(f"ranks do not hold the same bits: {wrong}")
        expected = np.sum(self.calls[0].buffers, axis=0, dtype=np.float64)
        if not np.allclose(self.job.ranks[0].buffers[0], expected, atol=1e-2):
            raise SimulationError("the sum is wrong")

    def _check_deaths(self) -> None:
        for rank in self.job.living:
            error = rank.outcomes[1]
            if not (isinstance(error, PeerLostError) and error.rank in self.victims):
                raise SimulationError(f"rank {rank.rank} names none of {self.victims}: {error!r}")
