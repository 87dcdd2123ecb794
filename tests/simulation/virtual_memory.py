"""The fabric in memory with delays: a message takes a while, ranks die, and the others notice one after the other.

For many ranks and many seeds: a job on virtual sockets costs ten times as much.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from virtual_job import VirtualWork
from virtual_time import Host, VirtualTime

from syncline.errors import PeerLostError
from syncline.fabric.memory import MemoryFabric, Parcel, _Network
from syncline.runtime.call import Call
from syncline.runtime.engine import Engine
from syncline.topology import Topology


class DelayedNetwork(_Network):
    """Delivers each parcel after a while; control messages of a pair of ranks keep their order."""

    def __init__(self, time: VirtualTime, host: Host, *, delay_s: float, eager_bytes: int, notes: bool = True) -> None:
        super().__init__(seed=None, eager_bytes=eager_bytes, loop=host.loop)
        self.time = time
        self.delay_s = delay_s
        self.notes = notes
        self.slow: set[int] = set()
        self.last_s: dict[tuple[int, int], float] = {}

    def put(self, parcel: Parcel) -> None:
        delay_s = self.delay_s * self.time.random.uniform(0.5, 2.0)
        if parcel.source in self.slow:
            delay_s *= 30
        due_s = self.time.now_s + delay_s
        if parcel.is_control:
            pair = (parcel.source, parcel.target)
            due_s = self.last_s[pair] = max(due_s, self.last_s.get(pair, 0.0))
        self.time.at(due_s, self.loop.call_soon, self._arrive, parcel)

    def _arrive(self, parcel: Parcel) -> None:
        if self.notes:
            crc = zlib.crc32(parcel.payload)
            self.time.note(f"{parcel.source}>{parcel.target} {parcel.tag:x} {parcel.payload.nbytes} {crc:x}")
        self.fabrics[parcel.target]._deliver(parcel)


class MemoryJob:
    """Ranks of which each has a fabric and an engine, on one loop."""

    def __init__(self, time: VirtualTime, topology: Topology, *, delay_s: float, eager_bytes: int, notes: bool = True):
        self.time = time
        self.host = Host(time, 0)
        self.network = DelayedNetwork(time, self.host, delay_s=delay_s, eager_bytes=eager_bytes, notes=notes)
        self.dead: list[int] = []
        num_ranks = topology.num_ranks
        self.fabrics = tuple(MemoryFabric(self.network, rank, close_s=1.0) for rank in range(num_ranks))
        self.network.fabrics = self.fabrics
        self.engines = [
            Engine(fabric, topology=topology, clock=self.host.loop, max_inflight_bytes=20_000)
            for fabric in self.fabrics
        ]
        for fabric, engine in zip(self.fabrics, self.engines, strict=True):
            fabric.set_listener(engine)

    @property
    def living(self) -> list[int]:
        """The ranks that are not dead."""
        return [fabric.rank for fabric in self.fabrics if fabric.rank not in self.dead]

    async def make(self, rank: int, call: Call) -> BaseException | None:
        """Make a call on one rank; return what went wrong."""
        work = VirtualWork(call.what)
        self.engines[rank].submit(call, work)  # type: ignore[arg-type]
        await work.wait()
        return work.error

    def kill(self, rank: int, *, detection_s: float) -> None:
        """Let a rank die; each other notices by itself, within ``detection_s``."""
        if rank in self.dead:
            return
        self.time.note(f"rank {rank} dies")
        self.dead.append(rank)
        victim = self.fabrics[rank]
        self.engines[rank].leave(tell=False)
        victim._is_closed = True
        victim._posted.clear()
        victim._held.clear()
        for fabric in self.fabrics:
            if fabric.rank in self.dead:
                continue
            text = f"{victim.describe_peer(rank)} is lost: its process died or was killed"
            error = PeerLostError(text, rank=rank, host="memory")
            self._soon(self.time.random.uniform(0, detection_s), self._lose, fabric, rank, error)

    def _soon(self, delay_s: float, function: Callable[..., object], *args: Any) -> None:
        self.time.after(delay_s, self.host.loop.call_soon, function, *args)

    def _lose(self, fabric: MemoryFabric, rank: int, error: PeerLostError) -> None:
        if fabric.rank not in self.dead:
            self.time.note(f"rank {fabric.rank} loses {rank}")
            fabric._lose(rank, error)
