"""A job on virtual hosts: the fabric over TCP, its handshakes, heartbeats, grants and frames, and the engine.

All that is the library's own, compiled code among it; sockets and time alone are virtual. Instead of the rendezvous,
whose store is read by threads, ranks meet at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from virtual_kernel import open_transport
from virtual_network import VirtualNetwork, VirtualSocket
from virtual_time import Host, VirtualLoop, VirtualTime

from syncline.fabric import FabricOptions, connect_tcp, mesh, peer_transport, sockets
from syncline.fabric._native import GrantScheduler, NativeTransport
from syncline.fabric.handshake import Terms
from syncline.fabric.rendezvous import Generation, Member
from syncline.fabric.tcp import TcpFabric
from syncline.runtime import CollectiveCall, numpy_reduction
from syncline.runtime.engine import Engine
from syncline.schedule import Layout, Schedule
from syncline.topology import Topology

SECRET = b"a secret of at least 32 bytes ok"


class Meeting:
    """Where the ranks of one start of a job meet."""

    def __init__(self, world_size: int, epoch: int) -> None:
        self._world_size, self._epoch = world_size, epoch
        self._members: dict[int, Member] = {}

    async def meet(self, member: Member, **_: object) -> Generation:
        self._members[member.rank] = member
        while len(self._members) < self._world_size:  # noqa: ASYNC110 - an event belongs to one loop
            await asyncio.sleep(0.01)
        members = tuple(self._members[rank] for rank in range(self._world_size))
        return Generation(epoch=self._epoch, job_nonce=bytes(32), members=members)

    async def watch(self) -> None:
        await asyncio.sleep(3600)

    async def rest(self) -> None:
        pass

    async def give_up(self, reason: str) -> None:
        pass


class VirtualWork:
    """A call under way, for a coroutine that waits for it."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.error: BaseException | None = None
        self._is_done = False
        self._over = asyncio.Event()

    def done(self) -> bool:
        return self._is_done

    def finish(self, error: BaseException | None) -> None:
        assert not self._is_done, f"{self.label} ended twice"
        self.error, self._is_done = error, True
        self._over.set()

    async def wait(self) -> None:
        await self._over.wait()


class Ear:
    """Hands what a fabric tells to the engine, and remembers the losses."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.losses: dict[int, Exception] = {}

    def on_peer_lost(self, peer: int, error: Exception) -> None:
        self.losses[peer] = error
        self._engine.on_peer_lost(peer, error)

    def on_control(self, peer: int, payload: bytes) -> None:
        self._engine.on_control(peer, payload)

    def on_stall(self) -> None:
        self._engine.on_stall()


@dataclass(slots=True)
class VirtualRank:
    """One rank of the job, and what became of its calls."""

    rank: int
    host: Host
    fabric: TcpFabric | None = None
    engine: Engine | None = None
    ear: Ear | None = None
    connect_error: BaseException | None = None
    buffers: dict[int, np.ndarray] = field(default_factory=dict)
    outcomes: dict[int, BaseException | None] = field(default_factory=dict)
    """Of each call that was made here: None if it ended well."""
    told: dict[int, float] = field(default_factory=dict)
    is_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedCall:
    """A collective that all ranks will make."""

    number: int
    schedule: Schedule
    layout: Layout
    buffers: tuple[np.ndarray, ...]
    """What each rank brings."""
    timeout_s: float

    def at(self, buffer: np.ndarray) -> CollectiveCall:
        """Return the call as a rank makes it."""
        return CollectiveCall(
            stream=1 + self.number % 2,
            schedule=self.schedule,
            layout=self.layout,
            buffer=memoryview(buffer).cast("B"),
            reduction=numpy_reduction("float32"),
            label=f"all_reduce of bucket {self.number}",
            step=self.number,
            timeout_s=self.timeout_s,
            urgency=self.number % 3,
        )


class VirtualJob:
    """Ranks on hosts of their own."""

    def __init__(self, time: VirtualTime, network: VirtualNetwork, topology: Topology, **options: Any) -> None:
        self.time, self.network, self.topology = time, network, topology
        self.epoch = 1 + time.random.getrandbits(63)
        self.meeting = Meeting(topology.num_ranks, self.epoch)
        self.options = FabricOptions(secret=SECRET, shares_memory=False, binds_thread=False, **options)
        self.ranks = [
            VirtualRank(rank, Host(time, rank + 1, is_served=time.random.random() < 0.8))
            for rank in range(topology.num_ranks)
        ]

    @property
    def living(self) -> list[VirtualRank]:
        """The ranks whose processes run."""
        return [rank for rank in self.ranks if not rank.host.is_dead]

    async def connect(self, rank: VirtualRank) -> bool:
        """Open a rank's fabric and engine; whether that went well."""
        options = FabricOptions(**{**_fields(self.options), "address": rank.host.address})
        try:
            rank.fabric = await connect_tcp(
                options,
                rank=rank.rank,
                world_size=self.topology.num_ranks,
                rendezvous=self.meeting,  # type: ignore[arg-type]
                topology=self.topology,
            )
        except Exception as error:
            rank.connect_error = error
            return False
        loop = asyncio.get_running_loop()
        rank.engine = Engine(rank.fabric, topology=self.topology, clock=loop, max_inflight_bytes=20_000)
        rank.ear = Ear(rank.engine)
        rank.fabric.set_listener(rank.ear)
        return True

    async def make(self, rank: VirtualRank, call: PlannedCall) -> None:
        """Make one call on one rank, and note how it ended."""
        assert rank.engine is not None
        buffer = rank.buffers[call.number] = call.buffers[rank.rank].copy()
        work = VirtualWork(f"call {call.number}")
        begun_s = self.time.now_s
        rank.engine.submit(call.at(buffer), work)  # type: ignore[arg-type]
        await work.wait()
        rank.outcomes[call.number] = work.error
        rank.told[call.number] = self.time.now_s - begun_s
        self.time.note(f"rank {rank.rank}: call {call.number} ended with {work.error}")


def _fields(options: FabricOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__dataclass_fields__}


@contextlib.contextmanager
def virtual_sockets(network: VirtualNetwork) -> Iterator[None]:
    """Let whatever the fabric opens be virtual, and its nonces come from the seed."""
    hosts = {host.address: host for host in network.time.hosts}
    terms = partial(Terms, nonce=network.time.random.randbytes)
    logger = logging.getLogger("syncline")
    before = logger.level
    logger.setLevel(logging.CRITICAL)

    def open_(address: str, _options: FabricOptions) -> VirtualSocket:
        return network.open(hosts[address])

    def make_transport(scheduler: GrantScheduler) -> NativeTransport:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return open_transport(network, loop.host, scheduler)

    try:
        with (
            mock.patch.object(sockets, "open_socket", open_),
            mock.patch.object(mesh, "Terms", terms),
            mock.patch.object(peer_transport, "NativeTransport", make_transport),
        ):
            yield
    finally:
        logger.setLevel(before)
