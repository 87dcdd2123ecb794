"""One rank of the incast: rank 0 receives, ranks 1 and 2 send bulk to it, and rank 1 an urgent message meanwhile.

Started by ``incast.py`` on a lab's hosts, with a JSON object as its argument. Rank 0 directs the others by control
messages and prints its findings as JSON. All processes share one clock, so rank 1 says when it called ``send``, and
rank 0 when the last byte was in its destination.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

from syncline.fabric import Fabric, FabricOptions, Rendezvous, connect_tcp
from syncline.priorities.settings import Priorities
from syncline.topology import Topology

BULK_BYTES = 1 << 20
NUM_QUEUED = 4
"""Bulk messages that each sender has queued at any time."""
FIRST_BULK_TAG = 1 << 20
PATIENCE_S = 60.0
SAMPLE_S = 0.002
_STARTED = struct.Struct("!d")


class DirectoryStore:
    """A store that the hosts of a lab share: a file for each key."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def set(self, key: str, value: bytes) -> None:
        """Write a key at once."""
        temporary = self._path / f"{key.replace('/', '%')}.{os.getpid()}"
        temporary.write_bytes(value)
        temporary.rename(self._path / key.replace("/", "%"))

    def get(self, key: str) -> bytes | None:
        """Read a key."""
        try:
            return (self._path / key.replace("/", "%")).read_bytes()
        except FileNotFoundError:
            return None


class Mailbox:
    """The fabric's listener: control messages as a queue; a lost peer ends the program."""

    def __init__(self) -> None:
        self.words: asyncio.Queue[bytes] = asyncio.Queue()

    def on_peer_lost(self, peer: int, error: Exception) -> None:  # noqa: ARG002
        """End what waits, unless the others leave because all is done."""
        self.words.put_nowait(b"end")

    def on_control(self, peer: int, payload: bytes) -> None:  # noqa: ARG002
        """Queue it."""
        self.words.put_nowait(payload)

    def on_stall(self) -> None:
        """Go on: ranks tell nothing of their progress here."""

    async def next(self) -> bytes:
        """Wait for the next word."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.words.get()


class Sender:
    """Ranks 1 and 2: bulk while it is wanted; an urgent message when it is asked for."""

    def __init__(self, fabric: Fabric, order: dict[str, Any]) -> None:
        self._fabric = fabric
        self._order = order
        self._payload = memoryview(bytearray(BULK_BYTES))
        self._next_tag = FIRST_BULK_TAG
        self._last_tag = 0

    async def obey(self, mailbox: Mailbox) -> None:
        """Do what rank 0 says until it ends."""
        while (word := await mailbox.next()) != b"end":
            verb, _, number = word.partition(b" ")
            if verb == b"bulk":
                self._send_bulk(int(number))
            else:
                self._send_urgent(int(number))

    def _send_bulk(self, num_messages: int) -> None:
        for _ in range(num_messages):
            self._fabric.send(
                0,
                self._next_tag,
                self._payload,
                signature=1,
                urgency=self._order["bulk_urgency"],
                connection_class=self._order["bulk_class"],
            )
            self._next_tag += 1

    def _send_urgent(self, num_bytes: int) -> None:
        payload = memoryview(bytearray(num_bytes))
        self._last_tag += 1
        started_s = asyncio.get_running_loop().time()
        self._fabric.send(0, self._last_tag, payload, signature=1, urgency=0, connection_class=0)
        self._fabric.send_control(0, _STARTED.pack(started_s))


class Receiver:
    """Rank 0: directs, measures, and samples what has arrived on each class."""

    def __init__(self, fabric: Fabric, order: dict[str, Any], mailbox: Mailbox) -> None:
        self._fabric = fabric
        self._order = order
        self._mailbox = mailbox
        self._buffers = {rank: memoryview(bytearray(BULK_BYTES)) for rank in (1, 2)}
        self._next_bulk = dict.fromkeys((1, 2), FIRST_BULK_TAG)
        self._num_wanted = dict.fromkeys((1, 2), 0)
        self._num_arrived = dict.fromkeys((1, 2), 0)
        self._is_loaded = False
        self._changed = asyncio.Event()
        self._next_urgent = 1
        self._loop = asyncio.get_running_loop()

    async def run(self) -> dict[str, Any]:
        """Measure each size on the idle link and under bulk, in turns."""
        rows = []
        await self._measure_idle(self._order["sizes"][-1])  # a first message, so that TCP knows the path
        for num_bytes in self._order["sizes"]:
            idle, loaded = [], []
            for _ in range(self._order["rounds"]):
                idle.append((await self._measure_idle(num_bytes))[0])
                loaded.append((await self._measure_loaded(num_bytes))[0])
            rows.append({"num_bytes": num_bytes, "idle_s": idle, "loaded_s": loaded})
        wire = await self._record_wire(self._order["wire_bytes"]) if self._order["wire_bytes"] else None
        for rank in (1, 2):
            self._fabric.send_control(rank, b"end")
        return {"rows": rows, "wire": wire}

    async def _measure_idle(self, num_bytes: int) -> tuple[float, float]:
        return await self._urgent(num_bytes)

    async def _measure_loaded(self, num_bytes: int) -> tuple[float, float]:
        await self._load()
        measured = await self._urgent(num_bytes)
        await self._unload()
        return measured

    async def _urgent(self, num_bytes: int) -> tuple[float, float]:
        """Return how long the message took, and when it began."""
        tag, self._next_urgent = self._next_urgent, self._next_urgent + 1
        arrived: asyncio.Future[float] = self._loop.create_future()
        destination = memoryview(bytearray(num_bytes))
        self._fabric.receive(
            1,
            tag,
            destination,
            signature=1,
            urgency=0,
            on_received=lambda: arrived.set_result(self._loop.time()),
        )
        self._fabric.send_control(1, b"urgent %d" % num_bytes)
        async with asyncio.timeout(PATIENCE_S):
            (started_s,) = _STARTED.unpack(await self._mailbox.next())
            return await arrived - started_s, started_s

    async def _load(self) -> None:
        """Let both send, and wait until the link is busy."""
        self._is_loaded = True
        before = dict(self._num_arrived)
        for rank in (1, 2):
            self._want(rank, NUM_QUEUED)
        async with asyncio.timeout(PATIENCE_S):
            while any(self._num_arrived[rank] < before[rank] + 3 for rank in (1, 2)):
                await self._wait()

    async def _unload(self) -> None:
        """Ask for nothing more, and wait until the link is idle."""
        self._is_loaded = False
        async with asyncio.timeout(PATIENCE_S):
            while self._num_arrived != self._num_wanted:
                await self._wait()

    def _want(self, rank: int, num_messages: int) -> None:
        self._num_wanted[rank] += num_messages
        for _ in range(num_messages):
            tag = self._next_bulk[rank]
            self._next_bulk[rank] += 1
            self._fabric.receive(
                rank,
                tag,
                self._buffers[rank],
                signature=1,
                urgency=self._order["bulk_urgency"],
                on_received=lambda: self._bulk_arrived(rank),
            )
        self._fabric.send_control(rank, b"bulk %d" % num_messages)

    def _bulk_arrived(self, rank: int) -> None:
        self._num_arrived[rank] += 1
        if self._is_loaded:
            self._want(rank, 1)
        self._changed.set()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _record_wire(self, num_bytes: int) -> dict[str, Any]:
        """Sample what has arrived on each class while an urgent message overtakes the bulk."""
        samples: list[tuple[float, dict[int, int]]] = []

        async def sample() -> None:
            while True:
                classes = self._fabric.statistics().by_class()
                counts = {number: found.received_bytes for number, found in classes.items() if number >= 0}
                samples.append((self._loop.time(), counts))
                await asyncio.sleep(SAMPLE_S)

        await self._load()
        sampling = asyncio.create_task(sample())
        await asyncio.sleep(0.1)
        took_s, started_s = await self._urgent(num_bytes)
        await asyncio.sleep(0.1)
        sampling.cancel()
        await self._unload()
        return {"started_s": started_s, "took_s": took_s, "num_bytes": num_bytes, "samples": samples}


async def main(order: dict[str, Any]) -> None:
    """Connect, and play this rank's part."""
    topology = Topology.load(os.environ["SYNCLINE_TOPOLOGY"])
    fabric = await connect_tcp(
        FabricOptions(address=os.environ["SYNCLINE_INTERFACE"], insecure=True, **order["options"]),
        rank=order["rank"],
        world_size=3,
        rendezvous=Rendezvous(DirectoryStore(order["store"]), job_id="syncline"),
        topology=topology if order["knows_rates"] else None,
    )
    mailbox = Mailbox()
    fabric.set_listener(mailbox)
    if order["num_classes"] > 1:
        await fabric.open_classes(Priorities(num_classes=order["num_classes"]), timeout_s=PATIENCE_S)
    if order["rank"]:
        await Sender(fabric, order).obey(mailbox)
    else:
        print(json.dumps(await Receiver(fabric, order, mailbox).run()), flush=True)
    await fabric.close()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
