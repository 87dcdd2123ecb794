"""A running stream of collectives while connections break at random places: the same bits as without, and no loss."""

import asyncio
import threading
from contextlib import contextmanager

import numpy as np
import pytest

from breaking_proxy import BREAKS, BreakingProxy
from meeting_stores import ProxyStore
from syncline.fabric import FabricOptions
from syncline.runtime import numpy_reduction
from syncline.topology import Topology

FLOAT32 = numpy_reduction("float32")
NUM_RANKS = 3
NUM_STEPS = 4
NUM_ELEMENTS = 100_000
SECRET = b"s" * 32


@contextmanager
def running(proxy):
    """Run the proxy on a loop of its own; yields its port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def call(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    try:
        yield call(proxy.listen())
    finally:
        call(proxy.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def train(communicators, seed):
    """Add up buckets of all ranks, some at a time; return what each rank holds after each step."""
    held = [[] for _ in communicators]
    for step in range(NUM_STEPS):
        buffers = [
            [np.random.default_rng([seed, step, bucket, rank]).normal(size=NUM_ELEMENTS >> bucket).astype(np.float32)
             for bucket in range(4)]
            for rank in range(len(communicators))
        ]  # fmt: skip
        works = [
            communicator.all_reduce(memoryview(buffer).cast("B"), FLOAT32)
            for communicator, own in zip(communicators, buffers, strict=True)
            for buffer in own
        ]
        for work in works:
            work.wait(60.0)
        for rank, own in enumerate(buffers):
            held[rank].append([buffer.tobytes() for buffer in own])
    return held


def reconnects(communicator):
    return sum(connection.reconnects for connection in communicator.statistics().fabric.connections)


def sums_survive(over_tcp, kind, seed, num_breaks=12, **settings):
    proxy = BreakingProxy(seed, kinds=[kind], num_breaks=0, between_bytes=600_000)
    with running(proxy) as port:
        options = FabricOptions(shares_memory=False, chunk_bytes=32 << 10, **settings)
        communicators = over_tcp(Topology.flat(NUM_RANKS), options=options, store=ProxyStore(proxy, port))
        whole = train(communicators, seed)
        proxy.num_left = num_breaks
        broken = train(communicators, seed)
        assert proxy.num_done > 5
        assert sum(map(reconnects, communicators)) > 5
        assert broken == whole
        assert whole[0] == whole[1] == whole[2]
        for communicator in communicators:
            communicator.close()


@pytest.mark.parametrize("kind", BREAKS)
def test_collectives_have_the_same_bits_while_connections_break(over_tcp, kind):
    sums_survive(over_tcp, kind, seed=11)


def test_authenticated_collectives_have_the_same_bits_while_connections_break(over_tcp):
    """Eight of them: of one peer no more frames may fail their authentication code."""
    sums_survive(over_tcp, "flip", seed=12, num_breaks=8, secret=SECRET, authenticate_frames=True)
