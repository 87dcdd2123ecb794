"""A connection that breaks costs no rank: it is opened again, and every message arrives once, whole and unchanged."""

import asyncio
import contextlib
import random
import socket

import loops
import pytest
from fabric_scenarios import Mail, Recorder, connect_all, gather, random_traffic, run_over_tcp, sockets_of

from breaking_proxy import BREAKS, BreakingProxy
from meeting_stores import DictStore, ProxyStore
from syncline.errors import PeerLostError
from syncline.fabric import FabricOptions, Rendezvous, connect_tcp
from syncline.fabric.protocol import PeerLeftError

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


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", BREAKS)
def test_connections_that_break_again_and_again_move_the_same_bytes(kind, seed):
    breaks_cost_nothing(seed, [kind])


def test_too_many_frames_whose_codes_do_not_fit_are_a_loss_though_there_is_progress():
    async def scenario(fabrics, recorders, mail):
        work = asyncio.ensure_future(Traffic(mail, 5).run(200))
        await asyncio.wait(
            {work, *(asyncio.ensure_future(recorder.wait_until(lambda r=recorder: r.lost)) for recorder in recorders)},
            return_when=asyncio.FIRST_COMPLETED,
        )
        work.cancel()
        assert any("the authentication code does not fit" in str(error) for error in losses(recorders))
        assert proxy.num_done > 8

    proxy = BreakingProxy(5, kinds=["flip"], num_breaks=1000, between_bytes=600_000)
    through_proxy(scenario, proxy, chunk_bytes=32 * KIB, **AUTHENTICATED)


@pytest.mark.parametrize("kind", BREAKS)
def test_frames_that_are_authenticated_are_sent_again_too(kind):
    breaks_cost_nothing(7, [kind], **AUTHENTICATED)


def cut(fabric, peer, which):
    """End one of the sockets to a peer, unless it is being opened again."""
    with contextlib.suppress(OSError):
        sockets_of(fabric, peer)[which].shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("seed", range(2))
def test_random_traffic_with_cancellations_while_sockets_end(seed):
    async def scenario(fabrics, recorders, mail):
        generator = random.Random(seed)

        def disturb(source, target):
            if generator.random() < 0.3:
                cut(fabrics[source], target, generator.randrange(3))

        kept, cancelled = await random_traffic(fabrics, mail, generator, 120, disturb)
        await unless_lost(gather(*(future for *_, future in kept)), recorders)
        assert all(future.result() == payload for *_, payload, future in kept)
        assert sum(counted(fabric, "reconnects") for fabric in fabrics) > 5
        await gather(*(fabric.close() for fabric in fabrics), deadline_s=60.0)
        assert not any(future.done() for future in cancelled)
        assert not any(
            isinstance(error, PeerLostError) and not isinstance(error, PeerLeftError) for error in losses(recorders)
        )

    run_over_tcp(
        3, scenario, num_classes=2, credit_bytes=20_000, grant_window_bytes=50_000, chunk_bytes=16_384, close_s=0.3
    )


def losses(recorders):
    return [error for recorder in recorders for error in recorder.lost.values()]


def test_all_sockets_of_a_peer_may_end_at_once_and_idle_ones_too():
    async def scenario(fabrics, recorders, mail):
        for round_number in range(3):
            for which in range(3):
                cut(fabrics[round_number % 2], 1 - round_number % 2, which)
            received = mail.receive(0, 1, round_number, 9)
            mail.send(1, 0, round_number, b"come what", connection_class=1)
            fabrics[0].send_control(1, b"may %d" % round_number)
            await unless_lost(gather(received), recorders)
            assert received.result() == b"come what"
            await recorders[1].wait_until(lambda n=round_number: len(recorders[1].controls) > n)
        assert recorders[1].controls == [(0, b"may %d" % number) for number in range(3)]
        assert not losses(recorders)

    run_over_tcp(2, scenario, num_classes=2)


@pytest.mark.parametrize("num_vanished", [0, 3])
def test_an_end_that_knows_of_no_break_is_told_by_the_other(num_vanished, monkeypatch):
    """The reset came to rank 0 alone, and rank 1, which dials, has nothing to send: it would learn of it after 2 s."""

    async def scenario(fabrics, recorders, mail):
        loop, vanished, peer = asyncio.get_running_loop(), [], fabrics[0].peer(1)
        connect = loop.sock_connect

        async def vanish(sock, address):
            if len(vanished) < num_vanished:
                vanished.append(address)
                await asyncio.Event().wait()
            await connect(sock, address)

        monkeypatch.setattr(loop, "sock_connect", vanish)
        proxy.swallows_ends = True
        assert peer.transport.suspend(0)
        peer.on_suspended(0, ConnectionResetError())
        received = mail.receive(1, 0, 7, 9)
        mail.send(0, 1, 7, b"come what")
        await unless_lost(gather(received), recorders)
        assert received.result() == b"come what"
        assert [counted(fabric, "reconnects") for fabric in fabrics] == [1, 1]

    proxy = BreakingProxy(1, num_breaks=0, between_bytes=1)
    through_proxy(scenario, proxy, heartbeat_s=0.5, suspect_s=3.0, dead_s=4.0)


def test_a_peer_that_cannot_be_dialled_is_lost_and_the_error_says_why():
    """The proxy resets whatever comes: rank 1, which dials, gives up rank 0 and tells it so."""

    async def scenario(fabrics, recorders, mail):
        proxy.is_open = False
        cut(fabrics[1], 0, 1)
        for recorder in recorders:
            await recorder.wait_until(lambda recorder=recorder: recorder.lost)
        assert "closed the connection without saying goodbye" in str(recorders[1].lost[0])
        assert isinstance(recorders[0].lost[1], PeerLostError)

    proxy = BreakingProxy(0, num_breaks=0, between_bytes=1)
    through_proxy(scenario, proxy)


def test_a_peer_that_does_not_answer_a_dialler_is_lost_in_half_the_time_of_a_silence():
    async def scenario(fabrics, recorders, mail):
        proxy.is_deaf = True
        cut(fabrics[1], 0, 1)
        for recorder in recorders:
            await recorder.wait_until(lambda recorder=recorder: recorder.lost)
        texts = [str(error) for error in losses(recorders)]
        assert any("its connection 0 could not be opened again in 0.6 s" in text for text in texts), texts

    proxy = BreakingProxy(0, num_breaks=0, between_bytes=1)
    through_proxy(scenario, proxy, heartbeat_s=0.2, suspect_s=1.0, dead_s=1.2)


@pytest.mark.parametrize("num_vanished", [2, 3])
def test_a_network_that_is_cut_while_a_connection_is_opened_again_costs_no_rank(num_vanished, monkeypatch):
    """Requests for a connection vanish; TCP would send the second or third one again when it is too late."""

    async def scenario(fabrics, recorders, mail):
        loop = asyncio.get_running_loop()
        connect, vanished = loop.sock_connect, []
        dialled = fabrics[1]._mesh.reach.address_of(0)

        async def vanish(sock, address):
            if address == dialled and len(vanished) < num_vanished:
                vanished.append(address)
                await asyncio.Event().wait()
            await connect(sock, address)

        monkeypatch.setattr(loop, "sock_connect", vanish)
        cut(fabrics[1], 0, 1)
        await unless_lost(Traffic(mail, 1).run(20), recorders)
        assert len(vanished) == num_vanished

    proxy = BreakingProxy(0, num_breaks=0, between_bytes=1)
    through_proxy(scenario, proxy, heartbeat_s=0.5, suspect_s=3.0, dead_s=4.0)


def test_a_connection_that_breaks_again_and_again_without_anything_new_is_a_loss():
    """No connection lives for long enough to move one chunk."""

    async def scenario(fabrics, recorders, mail):
        proxy.most_bytes = 100_000
        mail.receive(0, 1, 7, MIB)
        mail.send(1, 0, 7, bytes(MIB))
        for recorder in recorders:
            await recorder.wait_until(lambda recorder=recorder: recorder.lost)
        texts = [str(error) for error in losses(recorders)]
        assert any("its connection 0 broke 5 times with nothing new in between" in text for text in texts), texts
        reconnects = [counted(fabric, "reconnects") for fabric in fabrics]
        assert 4 <= max(reconnects) <= 5, reconnects

    proxy = BreakingProxy(0, num_breaks=0, between_bytes=1)
    through_proxy(scenario, proxy)


class Tracer:
    """Keeps what a fabric traces."""

    def __init__(self):
        self.instants = []

    def instant(self, name, category, **args):
        self.instants.append((name, args))


def test_the_trace_and_one_line_of_the_log_say_what_was_opened_again(caplog):
    async def main():
        store, tracer = DictStore(), Tracer()
        fabrics = await asyncio.gather(
            *(
                connect_tcp(
                    FabricOptions(shares_memory=False),
                    rank=rank,
                    world_size=2,
                    rendezvous=Rendezvous(store, job_id="syncline"),
                    trace=tracer if rank else None,
                )
                for rank in range(2)
            )
        )
        try:
            mail = Mail(fabrics)
            for tag in range(3):
                cut(fabrics[1], 0, 1)
                await gather(mail.receive(0, 1, tag, 9), mail.send(1, 0, tag, b"come what"))
        finally:
            for fabric in fabrics:
                fabric.abort()
        return tracer.instants

    instants = loops.run(main())
    reopened = [args for name, args in instants if name == "connection was opened again"]
    assert len(reopened) == 3
    assert reopened[0]["peer"] == reopened[0]["connection_class"] == 0
    assert reopened[0]["reason"] in ("its other end was closed", "it was reset")
    lines = [record.getMessage() for record in caplog.records if "was opened again" in record.getMessage()]
    assert len([line for line in lines if line.startswith("rank 1: connection 0 to rank 0")]) == 1
