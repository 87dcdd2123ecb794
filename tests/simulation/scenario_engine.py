"""Engines in memory with delays: random trees, planners and collectives, several calls at once, and deaths.

Each call ends right on whoever it ends on, to the bit; with an error that names who died or did not call on the others.
"""

from __future__ import annotations

import random
from functools import lru_cache

import numpy as np
from schedule_oracle import random_topology, replay
from virtual_memory import MemoryJob
from virtual_time import SimulationError, VirtualTime

from syncline.errors import DeadlineError, PeerLostError
from syncline.runtime import CollectiveCall, numpy_reduction
from syncline.schedule import PLANNERS, Layout, Schedule
from syncline.topology import Topology

TIMEOUT_S = 20.0
"""Many times what calls take, also on a slow network."""
SLOW_TIMEOUT_S = 200.0
"""The same where a rank is slow as well: in a chain each slice waits for it, and four calls one for the other."""
FAULTS = ("none", "none", "slow", "death", "deaths", "absence")


@lru_cache(maxsize=256)
def _plan(shape: int, planner: int, collective: int) -> tuple[Topology, Schedule]:
    topology = random_topology(shape, max_ranks=9)
    chosen = list(PLANNERS.values())[planner % len(PLANNERS)]
    collectives = sorted(chosen.collectives)
    return topology, chosen.plan(topology, collectives[collective % len(collectives)], root=shape % topology.num_ranks)


class EngineScenario:
    """One seed of it."""

    def __init__(self, seed: int) -> None:
        choose = self.choose = random.Random(f"engine {seed}")
        shape = choose.randrange(20)
        self.topology = _plan(shape, 0, 0)[0]
        self.fault = choose.choice(FAULTS) if self.topology.num_ranks > 1 else "none"
        self.timeout_s = SLOW_TIMEOUT_S if self.fault == "slow" else TIMEOUT_S
        self.time = VirtualTime(f"engine time {seed}")
        self.calls: list[CollectiveCall] = []
        self.inputs: list[list[np.ndarray]] = []
        for number in range(choose.randint(1, 4)):
            self._plan_call(number, _plan(shape, choose.randrange(8), choose.randrange(4))[1])
        self.buffers = [[buffer.copy() for buffer in buffers] for buffers in self.inputs]
        self.outcomes: dict[tuple[int, int], BaseException | None] = {}
        self.absent: int | None = None

    def _plan_call(self, number: int, schedule: Schedule) -> None:
        num_elements = self.choose.choice((1, 50, 3000))
        source = np.random.default_rng(self.choose.getrandbits(32))
        self.inputs.append(
            [source.normal(size=num_elements).astype(np.float32) for _ in range(self.topology.num_ranks)]
        )
        layout = Layout.build(schedule, num_elements, 4 * self.choose.choice((100, 900)))
        self.calls.append(
            CollectiveCall(
                stream=1 + number % 3,
                schedule=schedule,
                layout=layout,
                buffer=memoryview(self.inputs[-1][0]).cast("B"),
                reduction=numpy_reduction("float32"),
                label=f"call {number}",
                timeout_s=self.timeout_s,
                urgency=self.choose.randrange(3),
            )
        )

    def run(self) -> VirtualTime:
        """Play it and judge it; return its time."""
        choose = self.choose
        job = MemoryJob(
            self.time, self.topology, delay_s=choose.choice((0.001, 0.1)), eager_bytes=choose.choice((0, 1000))
        )
        try:
            for rank in job.living:
                for number in range(len(self.calls)):
                    job.host.start(self._make(job, rank, number))
            self._plan_fault(job)
            if not self.time.run(lambda: self._is_over(job), limit_s=2 * self.timeout_s + 10):
                raise SimulationError(f"calls hang after {self.fault}: {job.engines}")
            self._check(job)
            return self.time
        finally:
            self.time.close()

    def _plan_fault(self, job: MemoryJob) -> None:
        choose, num_ranks = self.choose, self.topology.num_ranks
        if self.fault == "slow":
            job.network.slow.add(choose.randrange(num_ranks))
        elif self.fault == "absence":
            self.absent = choose.randrange(num_ranks)
        elif self.fault in ("death", "deaths"):
            num_deaths = 1 if self.fault == "death" else choose.randint(2, max(2, num_ranks - 1))
            for rank in choose.sample(range(num_ranks), min(num_deaths, num_ranks)):
                when_s = choose.random() * job.network.delay_s * 12
                self.time.at(when_s, lambda rank=rank: job.kill(rank, detection_s=choose.choice((0.0, 0.2))))

    def _is_over(self, job: MemoryJob) -> bool:
        waited_for = [rank for rank in job.living if rank != self.absent]
        return all((rank, number) in self.outcomes for rank in waited_for for number in range(len(self.calls)))

    async def _make(self, job: MemoryJob, rank: int, number: int) -> None:
        if rank == self.absent:
            return
        buffer = memoryview(self.buffers[number][rank]).cast("B")
        call = CollectiveCall(
            **{name: getattr(self.calls[number], name) for name in CollectiveCall.__dataclass_fields__}
            | {"buffer": buffer}
        )
        self.outcomes[rank, number] = await job.make(rank, call)
        self.time.note(f"rank {rank}: {call.label} ended with {self.outcomes[rank, number]}")

    def _check(self, job: MemoryJob) -> None:
        if errors := job.host.errors:  # once seen, they are not told again
            raise SimulationError(f"on the loop: {errors[0]!r}")
        expected = [
            replay(call.schedule, call.layout, buffers) for call, buffers in zip(self.calls, self.inputs, strict=True)
        ]
        for (rank, number), error in sorted(self.outcomes.items()):
            if rank in job.dead:
                continue
            if error is None:
                if self.buffers[number][rank].tobytes() != expected[number][rank].tobytes():
                    raise SimulationError(f"rank {rank} has wrong bits of call {number}")
            else:
                self._check_error(job, rank, error)
        for rank in job.living:
            engine = job.engines[rank]
            if rank != self.absent and engine.num_pending_calls:
                raise SimulationError(f"rank {rank} is not done: {engine!r}")
            if job.fabrics[rank].statistics().pending_receives:
                raise SimulationError(f"rank {rank} left receives behind")

    def _check_error(self, job: MemoryJob, rank: int, error: BaseException) -> None:
        text = str(error)
        if self.fault in ("none", "slow"):
            raise SimulationError(f"rank {rank} failed though nothing was wrong: {error!r}")
        if self.fault == "absence":
            if not isinstance(error, DeadlineError) or f"rank {self.absent} " not in text:
                raise SimulationError(f"rank {rank} does not name rank {self.absent}: {error!r}")
        elif not isinstance(error, PeerLostError) or error.rank not in job.dead:
            raise SimulationError(f"rank {rank} blames another than {job.dead}: {error!r}")


def play(seed: int) -> VirtualTime:
    """Play one seed; return its time."""
    return EngineScenario(seed).run()
