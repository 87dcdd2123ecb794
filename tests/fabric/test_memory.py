"""What the in-memory fabric adds to the protocol: a seeded order."""

import asyncio

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
