"""A job on virtual sockets, with one kind of fault or none: every call ends right, or with an error that names who."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Set
from functools import lru_cache
from typing import Any

import numpy as np
from schedule_oracle import random_topology, replay
from virtual_job import PlannedCall, VirtualJob, VirtualRank, virtual_sockets
from virtual_network import VirtualNetwork, VirtualSocket
from virtual_time import Host, SimulationError, VirtualTime

from syncline.errors import DeadlineError, FabricClosedError, MismatchError, PeerLostError, SynclineError
from syncline.fabric.peer_transport import CompiledSliceExecutor, TransportSet
from syncline.fabric.tcp import TcpFabric
from syncline.runtime.communicator import LINGER_S
from syncline.schedule import PLANNERS, Collective, Layout, Schedule, plan_tree

FAULTS = (
    "none",
    "slow",
    "pause",
    "short cut",
    "kill",
    "power",
    "long pause",
    "cut",
    "reset",
    "flip",
    "stranger",
    "other call",
    "crumbs",
    "held",
    "storm",
)
HARMLESS = ("none", "slow", "pause", "short cut", "stranger", "crumbs", "held")
"""After these all calls end right."""
MENDED = ("reset", "flip", "storm")
"""After these too, but for a bit that is flipped before all are connected: what breaks is opened again."""
TIMEOUT_S = 40.0
QUIET_S = 6.0
DETECTION_S = 12.0
"""By then a loss is noticed: 10 s of silence, looked at three times a second, and the way there."""


SHAPES = tuple(shape for shape in range(30) if random_topology(shape, max_ranks=5).num_ranks > 1)


@lru_cache(maxsize=128)
def _plan(shape: int, max_ranks: int, planner: str, collective: Collective) -> Schedule:
    topology = random_topology(shape, max_ranks=max_ranks)
    return PLANNERS[planner].plan(topology, collective, root=shape % topology.num_ranks)


class JobScenario:
    """One seed of it."""

    def __init__(
        self, seed: int, fault: str | None = None, time_seed: str = "", *, max_ranks: int = 5, **options: Any
    ) -> None:
        choose = self.choose = random.Random(f"job {seed}")
        self.shape, self.max_ranks = choose.choice(SHAPES), max_ranks
        self.topology = random_topology(self.shape, max_ranks=max_ranks)
        self.fault = fault or choose.choice(FAULTS)
        self.time = VirtualTime(f"{seed}{time_seed}")
        self.network = VirtualNetwork(self.time, delay_s=choose.choice((0.0001, 0.002, 0.05)))
        if self.fault == "crumbs":
            self.network.most_bytes = choose.choice((1, 7, 50, 1000))
        self.job = VirtualJob(
            self.time,
            self.network,
            self.topology,
            authenticate_frames=choose.random() < 0.2,
            eager_bytes=choose.choice((0, 500, 4000)),
            credit_bytes=choose.choice((6000, 40_000)),
            chunk_bytes=4096,
            grant_window_bytes=choose.choice((None, 5000)),
            **options,
        )
        self.calls = [self._call(number) for number in range(choose.randint(1, 5))]
        self.is_overlapped = choose.random() < 0.5
        """Each rank makes all calls at once."""
        self.victim: VirtualRank | None = None
        self.other: VirtualRank | None = None
        self.stranger: Host | None = None
        self.strikes_s = self._fault_s()
        self.held_until_s = 0.0
        """A held rank reads no more than its threads do, and returns credit afterwards."""
        self.may_close = False
        self.is_harmless = self.fault in (*HARMLESS, *MENDED)

    def _call(self, number: int) -> PlannedCall:
        num_elements = self.choose.choice((0, 1, 30, *((1000, 5000) if self.network.most_bytes > 50 else ())))
        is_reduced = self.fault == "other call" or self.choose.random() < 0.6
        planner = self.choose.choice(("tree", "ring") if is_reduced else sorted(PLANNERS))
        of_planner = [Collective.ALL_REDUCE] if is_reduced else sorted(PLANNERS[planner].collectives)
        schedule = _plan(self.shape, self.max_ranks, planner, self.choose.choice(of_planner))
        source = np.random.default_rng(self.choose.getrandbits(32))
        return PlannedCall(
            number=number,
            schedule=schedule,
            layout=Layout.build(schedule, num_elements, 4 * self.choose.choice((200, 1500))),
            buffers=tuple(source.normal(size=num_elements).astype(np.float32) for _ in range(self.topology.num_ranks)),
            timeout_s=TIMEOUT_S,
        )

    def run(self) -> VirtualTime:
        """Play it and judge it; return its time."""
        if self.fault == "stranger":
            self.stranger = Host(self.time, 900)
        with virtual_sockets(self.network):
            try:
                for rank in self.job.ranks:
                    rank.host.start(self._main(rank))
                self.time.at(self.strikes_s, self._strike)
                limit_s = 70.0 + 3 * TIMEOUT_S * len(self.calls)
                self._go_on_until(self._is_done, limit_s)
                if self.is_harmless:
                    self._let_all_be_quiet()
                    self._check_quiet()
                self.may_close = True
                self._go_on_until(self._is_over, limit_s + 2 * QUIET_S)
                self._check()
                return self.time
            finally:
                self.time.close()

    def _fault_s(self) -> float:
        """Somewhere in the calls, as long as they may take, or while the ranks connect."""
        delays = (
            self.choose.uniform(0, 6) if self.choose.random() < 0.2 else self.choose.uniform(5, 8 + 8 * len(self.calls))
        )
        return 0.01 + self.network.delay_s * delays

    def _go_on_until(self, is_over: Callable[[], bool], limit_s: float) -> None:
        if not self.time.run(is_over, limit_s=limit_s):
            waiting = [rank.rank for rank in self.job.living if not rank.is_over]
            raise SimulationError(f"ranks {waiting} hang at {self.time.now_s:.1f} s after {self.fault}")

    def _let_all_be_quiet(self) -> None:
        self.time.run(lambda: False, limit_s=self.strikes_s)
        self.time.run(lambda: False, limit_s=max(self.time.now_s, self.held_until_s) + QUIET_S)

    def _is_done(self) -> bool:
        return all(rank.is_over or len(rank.outcomes) == len(self.calls) for rank in self.job.living)

    def _is_over(self) -> bool:
        return all(rank.is_over for rank in self.job.living)

    async def _main(self, rank: VirtualRank) -> None:
        if await self.job.connect(rank):
            assert rank.engine is not None
            assert rank.fabric is not None
            await self._make_calls(rank)
            while not self.may_close and self.is_harmless:  # noqa: ASYNC110 - an event belongs to one loop
                await asyncio.sleep(0.5)
            if rank.engine.failure is not None:  # as a communicator leaves then
                await asyncio.sleep(LINGER_S)
                rank.fabric.abort()
                rank.engine.leave(tell=False)
            else:
                rank.engine.leave()
                await rank.fabric.close()
        rank.is_over = True

    async def _make_calls(self, rank: VirtualRank) -> None:
        calls = self._calls_of(rank)
        if self.is_overlapped:
            await asyncio.gather(*(self.job.make(rank, call) for call in calls))
            return
        for call in calls:
            await self.job.make(rank, call)
            if rank.outcomes[call.number] is not None:
                break

    def _calls_of(self, rank: VirtualRank) -> list[PlannedCall]:
        """What this rank calls; one makes another call than the rest where that is the fault."""
        if self.fault != "other call" or rank.rank != self.calls[0].number % self.topology.num_ranks:
            return self.calls
        schedule = plan_tree(self.topology, Collective.REDUCE_SCATTER)
        first = self.calls[0]
        other = PlannedCall(
            number=0,
            schedule=schedule,
            layout=Layout.build(schedule, first.layout.num_elements, 800),
            buffers=first.buffers,
            timeout_s=TIMEOUT_S,
        )
        return [other, *self.calls[1:]]

    # Faults.

    def _strike(self) -> None:
        choose, ranks = self.choose, self.job.ranks
        is_connected = all(rank.fabric is not None and not _is_meeting(rank.fabric) for rank in ranks)
        if self.fault == "held" and not is_connected:  # nobody beats before
            self.time.after(0.1, self._strike)
            return
        self.is_harmless &= is_connected or self.fault not in ("flip", "storm")
        self.victim = choose.choice(ranks)
        self.other = choose.choice([rank for rank in ranks if rank is not self.victim] or ranks)
        victim, other = self.victim.host, self.other.host
        self.time.note(f"{self.fault} of rank {self.victim.rank}")
        if self.fault in ("slow", "pause", "long pause", "held"):
            self._delay(victim)
        elif self.fault in ("kill", "power"):
            self.network.kill(victim, says_so=self.fault == "kill")
        elif self.fault in ("short cut", "cut"):
            for_s = choose.uniform(0.1, 4.0) if self.fault == "short cut" else choose.uniform(14.0, 400.0)
            self.network.cut(victim, other, for_s)
            if choose.random() < 0.5:
                self.network.cut(other, victim, for_s)
        elif self.fault in ("reset", "flip"):
            self._hurt_a_connection(self.fault)
        elif self.fault == "storm":
            for _ in range(choose.randint(2, 4)):  # more may be too much for one connection
                when_s = self.time.now_s + self.network.delay_s * choose.expovariate(0.2)
                self.time.at(when_s, self._hurt_a_connection, choose.choice(("reset", "flip")))
        elif self.fault == "stranger":
            self._knock()

    def _delay(self, victim: Host) -> None:
        choose = self.choose
        if self.fault == "slow":
            victim.turn_s = choose.choice((0.002, 0.02))
        elif self.fault == "held":
            for_s = choose.uniform(2.0, 30.0)
            self.held_until_s = self.time.now_s + for_s
            victim.hold(for_s)
        else:
            victim.stop(choose.uniform(0.1, 4.0) if self.fault == "pause" else choose.uniform(14.0, 30.0))

    def _hurt_a_connection(self, how: str) -> None:
        found = [
            sock for sock in self.network.connections if not sock.is_closed and sock.peer and not sock.peer.is_closed
        ]
        if not found:
            return
        sock = self.choose.choice(found)
        assert sock.peer is not None
        self.time.note(f"hits {sock.host.number}-{sock.peer.host.number}")
        if how == "reset":
            sock.reset()
            sock.peer.reset()
        else:
            end = self.choose.choice((sock, sock.peer))
            assert end.pipe is not None
            end.pipe.must_flip = True

    def _knock(self) -> None:
        """Somebody dials the victim: with noise, with a part of a hello, or with what a rank said before."""
        assert self.stranger is not None
        assert self.victim is not None
        addresses = [address for address in self.network.listeners if address[0] == self.victim.host.address]
        if not addresses:
            return
        said = [bytes(sock.sent) for sock in self.network.connections]
        noise = self.choose.randbytes(self.choose.choice((1, 8, 200)))
        hello = self.choose.choice(said) if said else b"SYNCLINE"
        data = self.choose.choice((noise, hello[: self.choose.randint(1, max(1, len(hello)))], hello))
        self.stranger.start(_knock(self.network.open(self.stranger), self.stranger, addresses[0], data))

    # What must hold.

    def _check_quiet(self) -> None:
        """All calls are over: nothing is posted, held or granted, and no credit is gone, nor was made."""
        for rank in self.job.ranks:
            if rank.engine is None or rank.fabric is None:
                continue  # it is told why below
            assert rank.ear is not None
            if rank.ear.losses:
                raise SimulationError(f"{self.fault} cost rank {rank.rank} its peers: {rank.ear.losses}")
            statistics = rank.fabric.statistics()
            transports = rank.fabric._transport_set
            if statistics.pending_receives or statistics.unexpected_bytes or rank.engine.num_pending_calls:
                raise SimulationError(f"rank {rank.rank} is not done: {statistics}, {rank.engine!r}")
            executor = rank.engine._executor
            assert isinstance(executor, CompiledSliceExecutor)
            if executor._executor.num_active_slices or executor._executor.inflight_bytes:
                raise SimulationError(f"rank {rank.rank} has slices under way: {executor!r}")
            if rank.fabric._mesh.acceptor.handshakes:
                raise SimulationError(f"rank {rank.rank} still waits for a stranger")
            self._check_grants(rank.rank, transports, rank.fabric.unconnected)

    def _check_grants(self, rank: int, transports: TransportSet, unconnected: Set[int]) -> None:
        if transports.scheduler.underway_bytes:
            raise SimulationError(f"rank {rank} waits for {transports.scheduler.underway_bytes} bytes")
        for peer in transports._transports.keys() - unconnected:
            other = self.job.ranks[peer].fabric
            if other is not None:
                self._check_credit(rank, peer, transports, other._transport_set)

    def _check_credit(self, rank: int, peer: int, here: TransportSet, there: TransportSet) -> None:
        may_send_bytes, _ = here.native_transport.credit_bytes(peer)
        _, used_bytes = there.native_transport.credit_bytes(rank)
        total = may_send_bytes + used_bytes
        if total != self.job.options.credit_bytes:
            raise SimulationError(
                f"of {self.job.options.credit_bytes} bytes that rank {rank} may send {peer}, {total} remain"
            )

    def _check(self) -> None:
        for rank in self.job.living:
            if errors := rank.host.errors:  # once seen, they are not told again
                raise SimulationError(f"rank {rank.rank}: {errors[0]!r} on its loop") from errors[0]
            self._check_rank(rank)
        if self.is_harmless:
            for rank in self.job.living:
                missing = [call.number for call in self.calls if rank.outcomes.get(call.number, 0) is not None]
                if rank.connect_error is not None or missing:
                    raise SimulationError(f"{self.fault} cost rank {rank.rank} calls {missing}: {rank.connect_error}")
        if self.fault == "other call" and len(self.job.ranks) > 1:
            errors = [error for rank in self.job.living for error in rank.outcomes.values() if error is not None]
            if not errors or not all(isinstance(error, MismatchError) for error in errors):
                raise SimulationError(f"calls that differ ended with {errors}")

    def _check_rank(self, rank: VirtualRank) -> None:
        if rank.connect_error is not None and not isinstance(rank.connect_error, SynclineError):
            raise SimulationError(f"rank {rank.rank} could not connect: {rank.connect_error!r}")
        for call in self.calls:
            if call.number not in rank.outcomes:
                continue
            error = rank.outcomes[call.number]
            if error is None:
                if self.fault != "other call" or call.number:
                    self._check_bits(rank, call)
            elif error is not None:
                self._check_error(rank, call, error)

    def _check_bits(self, rank: VirtualRank, call: PlannedCall) -> None:
        expected = _expected(call)[rank.rank]
        if rank.buffers[call.number].tobytes() != expected.tobytes():
            raise SimulationError(f"rank {rank.rank} has wrong bits of call {call.number} after {self.fault}")

    def _check_error(self, rank: VirtualRank, call: PlannedCall, error: BaseException) -> None:
        text = str(error)
        if not isinstance(error, (PeerLostError, DeadlineError, MismatchError)) or isinstance(error, FabricClosedError):
            raise SimulationError(f"rank {rank.rank}, call {call.number}: {error!r} after {self.fault}")
        if "rank" not in text or ("bucket" not in text and "all_reduce" not in text and "reduce_scatter" not in text):
            raise SimulationError(f"an error that does not say who or what: {text}")
        if self.fault in ("kill", "power") and isinstance(error, PeerLostError):
            assert self.victim is not None
            gave_up = [one.rank for one in self.job.ranks if one.connect_error is not None]  # for the same reason
            if not any(f"rank {culprit} " in text for culprit in (self.victim.rank, *gave_up)):
                raise SimulationError(f"rank {rank.rank} does not blame rank {self.victim.rank}: {text}")
        if rank.told[call.number] > TIMEOUT_S + 30.0 + DETECTION_S:
            raise SimulationError(f"rank {rank.rank} waited {rank.told[call.number]:.1f} s for its error")


class RestingJobScenario(JobScenario):
    """One whose ranks pause before each call, so that connections that are no neighbours' rest, in a ring."""

    def __init__(self, seed: int, fault: str) -> None:
        idle_s, heartbeat_s = (0.02, 0.1, 0.3, 1.0)[seed % 4], (0.05, 0.2)[seed // 4 % 2]
        super().__init__(seed, fault, max_ranks=9, most_connected=1, idle_s=idle_s, heartbeat_s=heartbeat_s)

    @property
    def num_woken(self) -> int:
        """How many ends of connections were there again, after a rest or a fault."""
        statistics = (rank.fabric.statistics() for rank in self.job.ranks if rank.fabric is not None)
        return sum(entry.reconnects for each in statistics for entry in each.connections)

    def _fault_s(self) -> float:
        return super()._fault_s() + self.choose.choice((0.0, 0.5, 1.5, 3.0, 6.0))

    async def _make_calls(self, rank: VirtualRank) -> None:
        pauses = random.Random(f"{self.shape} {rank.rank} {self.strikes_s}")
        for call in self._calls_of(rank):
            await asyncio.sleep(pauses.choice((0.0, 0.05, 0.3, 1.0, 3.0)))
            await self.job.make(rank, call)
            if rank.outcomes[call.number] is not None:
                break


def _is_meeting(fabric: TcpFabric) -> bool:
    """Whether it opens connections to a rank, for the first time or after a rest."""
    return bool(fabric._mesh._meeting) or any(peer.is_waking for peer in fabric._peers.values())


@lru_cache(maxsize=8)
def _expected(call: PlannedCall) -> list[np.ndarray]:
    return replay(call.schedule, call.layout, list(call.buffers))


async def _knock(sock: VirtualSocket, host: Host, address: tuple[str, int], data: bytes) -> None:
    sock.bind((host.address, 0))
    try:
        await host.loop.sock_connect(sock, address)  # type: ignore[arg-type]
        await host.loop.sock_sendall(sock, data)  # type: ignore[arg-type]
        answer = bytearray(4096)
        while await host.loop.sock_recv_into(sock, memoryview(answer)):  # type: ignore[arg-type]
            pass
    except OSError:
        pass
    sock.close()


def play(seed: int) -> VirtualTime:
    """Play one seed; return its time."""
    return JobScenario(seed).run()
