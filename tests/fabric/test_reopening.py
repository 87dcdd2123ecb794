"""A connection that breaks costs no rank: it is opened again, and every message arrives once, whole and unchanged."""

import asyncio
import contextlib
import random
import socket

import loops
import pytest
from bit_flipping_proxy import ProxyStore
from breaking_proxy import BREAKS, BreakingProxy
from fabric_scenarios import Mail, Recorder, connect_all, gather, run_over_tcp, sockets_of

from syncline.errors import PeerLostError
from syncline.fabric import FabricOptions
from syncline.fabric.transport_sets import VARIABLE

KIB, MIB = 1 << 10, 1 << 20
SIZES = (0, 1, 47, 5000, 16 * KIB, 70_000, 300_000, MIB)
AUTHENTICATED = {"secret": b"s" * 32, "authenticate_frames": True}


class Traffic:
    """Messages both ways between two ranks, some at a time, each with bytes of its own."""

    def __init__(self, mail, seed, *, num_classes=2):
        self._mail = mail
        self._seed = seed
        self._num_classes = num_classes
        self.num_done = 0

    async def run(self, num_messages, *, num_at_once=4):
        """Move so many messages in each direction."""
        lanes = [
            self._lane(*ends, lane, num_messages, num_at_once)
            for ends in ((0, 1), (1, 0))
            for lane in range(num_at_once)
        ]
        await gather(*lanes)

    async def _lane(self, source, target, lane, num_messages, num_lanes):
        for tag in range(lane, num_messages, num_lanes):
            payload = random.Random(f"{self._seed} {source} {tag}").randbytes(SIZES[(tag * 5 + source) % len(SIZES)])
            received = self._mail.receive(target, source, tag, len(payload), urgency=tag % 3)
            sent = self._mail.send(
                source, target, tag, payload, urgency=tag % 3, connection_class=tag % self._num_classes
            )
            await asyncio.gather(sent, received)
            assert received.result() == payload, f"message {tag} of rank {source} has other bytes"
            self.num_done += 1


def through_proxy(scenario, proxy, **settings):
    """Run ``scenario(fabrics, recorders, mail)`` on two ranks, of which the second dials the first through a proxy."""

    async def main():
        store = ProxyStore(proxy, await proxy.listen())
        options = FabricOptions(**({"shares_memory": False, "num_classes": 2} | settings))
        fabrics = await connect_all(2, options, store=store)
        recorders = [Recorder() for _ in fabrics]
        for fabric, recorder in zip(fabrics, recorders, strict=True):
            fabric.set_listener(recorder)
        try:
            await scenario(fabrics, recorders, Mail(fabrics))
        finally:
            for fabric in fabrics:
                fabric.abort()
            await proxy.close()

    loops.run(main())


async def unless_lost(work, recorders):
    """Run ``work``; fail at once if a peer is lost meanwhile."""
    task = asyncio.ensure_future(work)
    losses = [asyncio.ensure_future(recorder.wait_until(lambda r=recorder: r.lost)) for recorder in recorders]
    await asyncio.wait({task, *losses}, return_when=asyncio.FIRST_COMPLETED)
    for loss in losses:
        loss.cancel()
    assert not [recorder.lost for recorder in recorders if recorder.lost]
    await task


def counted(fabric, name):
    return sum(getattr(connection, name) for connection in fabric.statistics().connections)


def breaks_cost_nothing(seed, kinds, **settings):
    async def scenario(fabrics, recorders, mail):
        await unless_lost(Traffic(mail, seed).run(48), recorders)
        assert proxy.num_done == num_breaks
        assert all(counted(fabric, "reconnects") for fabric in fabrics)
        assert counted(fabrics[0], "resent_bytes") + counted(fabrics[1], "resent_bytes") > 0
        assert [counted(fabric, "sent_messages") for fabric in fabrics] == [48, 48]
        assert [counted(fabric, "received_messages") for fabric in fabrics] == [48, 48]
        sizes = sum(SIZES[tag * 5 % len(SIZES)] for tag in range(48))
        assert [counted(fabric, "received_bytes") for fabric in fabrics] == [sizes, sizes]
        assert fabrics[0].statistics().unexpected_bytes == 0
        await gather(*(fabric.close() for fabric in fabrics), deadline_s=60.0)

    num_breaks = 10
    proxy = BreakingProxy(seed, kinds=kinds, num_breaks=num_breaks, between_bytes=600_000)
    through_proxy(scenario, proxy, chunk_bytes=32 * KIB, **settings)


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", BREAKS)
def test_connections_that_break_again_and_again_move_the_same_bytes(kind, seed):
    breaks_cost_nothing(seed, [kind])


@pytest.mark.parametrize("kind", BREAKS)
def test_frames_that_are_authenticated_are_sent_again_too(kind, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    breaks_cost_nothing(7, [kind], **AUTHENTICATED)
