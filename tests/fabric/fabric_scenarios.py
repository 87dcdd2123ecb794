"""A listener that records, and the fabrics that the conformance suite runs on."""

import asyncio
import socket
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import loops

from meeting_stores import DictStore
from syncline.fabric import FabricOptions, Rendezvous, connect_tcp, memory_fabrics, sockets


class Recorder:
    """Writes down what its fabric tells, and lets a test wait for it."""

    def __init__(self):
        self.lost = {}
        self.controls = []
        self._changed = asyncio.Event()

    def on_peer_lost(self, peer, error):
        assert peer not in self.lost, "a peer is lost once"
        self.lost[peer] = error
        self._changed.set()

    def on_control(self, peer, payload):
        self.controls.append((peer, payload))
        self._changed.set()

    def on_stall(self):
        pass

    async def wait_until(self, condition, deadline_s=60.0):
        async with asyncio.timeout(deadline_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


class Mail:
    """Messages with futures in place of callbacks."""

    def __init__(self, fabrics):
        self.fabrics = fabrics
        self.refused = asyncio.Queue()
        """(target, source, tag, signature of the message) of receives that their message did not match."""

    def send(self, source, target, tag, payload, *, signature=7, urgency=0, connection_class=0):
        sent = asyncio.get_running_loop().create_future()
        self.fabrics[source].send(
            target,
            tag,
            memoryview(payload),
            signature=signature,
            urgency=urgency,
            connection_class=connection_class,
            on_sent=lambda: sent.set_result(None),
        )
        assert not sent.done(), "on_sent ran inside send"
        return sent

    def receive(self, target, source, tag, num_bytes, *, signature=7, urgency=0):
        buffer = bytearray(num_bytes)
        received = asyncio.get_running_loop().create_future()
        self.fabrics[target].receive(
            source,
            tag,
            memoryview(buffer),
            signature=signature,
            urgency=urgency,
            on_received=lambda: received.set_result(buffer),
            on_mismatch=lambda signature: self.refused.put_nowait((target, source, tag, signature)),
        )
        assert not received.done(), "on_received ran inside receive"
        return received


async def gather(*futures, deadline_s=120.0, return_exceptions=False):
    async with asyncio.timeout(deadline_s):
        return await asyncio.gather(*futures, return_exceptions=return_exceptions)


async def random_traffic(fabrics, mail, generator, num_messages, disturb=lambda source, target: None):
    """Send among three ranks, before or after the receive is posted, and cancel some receives; ``disturb`` each time.

    Returns what is to arrive, as source, target, tag, payload and future, and the futures of what was cancelled.
    """
    kept, cancelled = [], []
    for tag in range(num_messages):
        source, target = generator.sample(range(3), 2)
        payload = generator.randbytes(generator.choice([0, 1, 3000, 20_000, 90_000]))
        settings = {"urgency": generator.randrange(3), "connection_class": tag % 2}
        is_send_first = generator.random() < 0.5
        if is_send_first:
            mail.send(source, target, tag, payload, **settings)
        kept.append((source, target, tag, payload, mail.receive(target, source, tag, len(payload))))
        if not is_send_first:
            mail.send(source, target, tag, payload, **settings)
        chosen = generator.choice(kept)
        if generator.random() < 0.3 and not chosen[-1].done():
            kept.remove(chosen)
            fabrics[chosen[1]].cancel(chosen[0], chosen[2])
            cancelled.append(chosen[-1])
        if generator.random() < 0.5:
            await asyncio.sleep(0)
        disturb(source, target)
    return kept, cancelled


@asynccontextmanager
async def open_memory(world_size):
    fabrics = memory_fabrics(world_size)
    yield fabrics
    for fabric in fabrics:
        fabric.abort()


@asynccontextmanager
async def open_shuffled_memory(world_size):
    fabrics = memory_fabrics(world_size, seed=20)
    yield fabrics
    for fabric in fabrics:
        fabric.abort()


async def connect_all(world_size, options=None, *, store=None, topology=None, of_ranks=None):
    """Open ``world_size`` TCP fabrics in this process; ``of_ranks``: what is other in the options of some ranks."""
    store = store or DictStore()
    options = options or FabricOptions()
    return await asyncio.gather(
        *(
            connect_tcp(
                replace(options, **(of_ranks or {}).get(rank, {})),
                rank=rank,
                world_size=world_size,
                rendezvous=Rendezvous(store, job_id=options.job_id),
                topology=topology,
            )
            for rank in range(world_size)
        )
    )


@contextmanager
def socket_buffers(num_bytes):
    """Let each new socket hold so little (None: what the kernel says), set before its connection is made."""
    open_socket = sockets.open_socket

    def open_small_socket(address, options):
        sock = open_socket(address, options)
        for name in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, name, num_bytes)
        return sock

    with mock.patch.object(sockets, "open_socket", open_small_socket) if num_bytes else nullcontext():
        yield


def run_over_tcp(
    world_size,
    scenario,
    *,
    store=None,
    topology=None,
    of_ranks=None,
    shares_memory=False,
    buffer_bytes=None,
    **settings,
):
    """Run ``scenario(fabrics, recorders, mail)`` on TCP fabrics of this process."""

    async def main():
        options = FabricOptions(shares_memory=shares_memory, **settings)
        fabrics = await connect_all(world_size, options, store=store, topology=topology, of_ranks=of_ranks)
        recorders = [Recorder() for _ in fabrics]
        for fabric, recorder in zip(fabrics, recorders, strict=True):
            fabric.set_listener(recorder)
        try:
            await scenario(fabrics, recorders, Mail(fabrics))
        finally:
            for fabric in fabrics:
                fabric.abort()

    with socket_buffers(buffer_bytes):
        loops.run(main())


def num_descriptors():
    """Return how many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def sockets_of(fabric, peer):
    """Return the sockets to a peer: control, and then the classes."""
    return fabric.peer(peer).transport._sockets


def vanish(fabric):
    """Let a rank end without a word, as a killed process does."""
    fabric.living = list  # nobody is told
    fabric.abort()


def tcp_opener(*, buffer_bytes=None, **settings):
    @asynccontextmanager
    async def open_tcp(world_size):
        with socket_buffers(buffer_bytes):
            fabrics = await connect_all(world_size, FabricOptions(**settings))
            try:
                yield fabrics
            finally:
                for fabric in fabrics:
                    fabric.abort()

    return open_tcp


OPENERS = {
    "memory": open_memory,
    "shuffled memory": open_shuffled_memory,
    "tcp": tcp_opener(shares_memory=False),
    "shared host": tcp_opener(),
    "tcp ipv6": tcp_opener(address="::1", dscp=(46, 34), num_classes=2, shares_memory=False),
    "tcp with authenticated frames": tcp_opener(
        secret=b"s" * 32, authenticate_frames=True, num_classes=2, shares_memory=False
    ),
    "tcp with little room": tcp_opener(
        secret=b"s" * 32,
        shares_memory=False,
        credit_bytes=20_000,
        eager_bytes=4096,
        unsent_bytes=4096,
        grant_window_bytes=30_000,
        chunk_bytes=4096,
        buffer_bytes=4096,
    ),
}


def run_scenario(opener, world_size, scenario):
    async def main():
        async with opener(world_size) as fabrics:
            recorders = [Recorder() for _ in fabrics]
            for fabric, recorder in zip(fabrics, recorders, strict=True):
                fabric.set_listener(recorder)
            await scenario(fabrics, recorders, Mail(fabrics))

    loops.run(main())
