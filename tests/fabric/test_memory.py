"""What the in-memory fabric adds to the protocol: a seeded order, and killing."""

import asyncio

from fabric_scenarios import Recorder, gather

from syncline.errors import PeerLostError
from syncline.fabric import memory_fabrics


def arrivals(seed, *, urgencies):
    async def main():
        fabrics = memory_fabrics(2, seed=seed)
        order = []
        done = asyncio.Event()

        def note(tag):
            order.append(tag)
            if len(order) == len(urgencies):
                done.set()

        for tag in range(len(urgencies)):
            fabrics[1].receive(
                0, tag, memoryview(bytearray(1)), signature=0, urgency=0, on_received=lambda tag=tag: note(tag)
            )
        for tag, urgency in enumerate(urgencies):
            fabrics[0].send(1, tag, memoryview(b"x"), signature=0, urgency=urgency, connection_class=0)
        await asyncio.wait_for(done.wait(), 60)
        return order

    return asyncio.run(main())


def test_without_a_seed_the_urgent_message_comes_first():
    assert arrivals(None, urgencies=[3, 1, 2, 1, 0]) == [4, 1, 3, 2, 0]


def test_a_seed_shuffles_and_replays():
    orders = {seed: arrivals(seed, urgencies=[0] * 20) for seed in (1, 2, 3)}
    assert len({tuple(order) for order in orders.values()}) == 3
    assert all(arrivals(seed, urgencies=[0] * 20) == order for seed, order in orders.items())


def test_a_killed_rank_is_lost_and_hears_nothing():
    async def main():
        fabrics = memory_fabrics(3)
        recorders = [Recorder() for _ in fabrics]
        for fabric, recorder in zip(fabrics, recorders, strict=True):
            fabric.set_listener(recorder)
        fabrics[0].send_control(1, b"never heard")
        fabrics[0].kill(1)
        await recorders[0].wait_until(lambda: recorders[0].lost)
        await recorders[2].wait_until(lambda: recorders[2].lost)
        assert isinstance(recorders[2].lost[1], PeerLostError)
        assert recorders[2].lost[1].rank == 1
        assert not recorders[1].controls
        assert not recorders[1].lost
        await gather(fabrics[0].close(), fabrics[2].close())

    asyncio.run(main())
