"""What the TCP fabric adds: order by urgency, damage found, nothing left behind."""

import asyncio
import random
import re
import socket
import threading

import loops
import pytest
from bit_flipping_proxy import BitFlippingProxy
from fabric_scenarios import (
    Mail,
    Recorder,
    connect_all,
    gather,
    num_descriptors,
    random_traffic,
    run_over_tcp,
    sockets_of,
)

from meeting_stores import DictStore, ProxyStore
from syncline.errors import PeerLostError
from syncline.fabric import FabricOptions, GivenUpError, PeerLeftError, Rendezvous, connect_tcp
from syncline.fabric.frames import FrameType
from syncline.topology.topology import Topology

pytestmark = pytest.mark.usefixtures("on_each_loop")

MIB = 1 << 20


@pytest.mark.parametrize("ends_by", ["close", "abort"])
def test_nothing_is_left_behind(ends_by):
    async def cycle():
        fabrics = await connect_all(3, FabricOptions(num_classes=2))
        mail = Mail(fabrics)
        mail.receive(0, 1, 5, 10)
        mail.send(0, 1, 6, bytes(100))
        await gather(mail.send(0, 1, 7, bytes(MIB)), mail.receive(1, 0, 7, MIB))
        if ends_by == "close":
            await gather(*(fabric.close() for fabric in fabrics), deadline_s=60.0)
        else:
            for fabric in fabrics:
                fabric.abort()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        loop = asyncio.get_running_loop()
        assert not loop._selector.get_map().keys() - {loop._ssock.fileno()}
        assert not [timer for timer in loop._scheduled if not timer.cancelled()]

    num_threads = threading.active_count()
    loops.run(cycle())
    before = num_descriptors()
    for _ in range(5):
        loops.run(cycle())
    assert num_descriptors() == before
    assert threading.active_count() == num_threads


def test_a_rank_that_gives_up_while_connecting_leaves_nothing():
    async def main():
        task = asyncio.create_task(
            connect_tcp(FabricOptions(), rank=0, world_size=2, rendezvous=Rendezvous(DictStore(), job_id="syncline"))
        )
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    loops.run(main())
    before = num_descriptors()
    loops.run(main())
    assert num_descriptors() == before


@pytest.mark.parametrize("sources", [(1, 1), (1, 2)], ids=["same sender", "two senders"])
def test_an_urgent_message_overtakes_bulk(sources):
    async def scenario(fabrics, recorders, mail):
        bulk_source, urgent_source = sources
        bulk_bytes, num_bulk, order = 2 * MIB, 16, []
        futures = []
        for tag in range(num_bulk):
            futures.append(mail.receive(0, bulk_source, tag, bulk_bytes, urgency=9))
            mail.send(bulk_source, 0, tag, bytes(bulk_bytes), urgency=9)
        await futures[0]
        urgent = mail.receive(0, urgent_source, 99, MIB, urgency=0)
        mail.send(urgent_source, 0, 99, bytes(MIB), urgency=0)
        for name, future in [("urgent", urgent), *(("bulk", future) for future in futures)]:
            future.add_done_callback(lambda _, name=name: order.append(name))
        await gather(urgent, *futures)
        assert order.index("urgent") <= 4, "at most what was granted before goes ahead"

    run_over_tcp(3, scenario, grant_window_bytes=2 * MIB, buffer_bytes=64 << 10)


def test_each_class_has_its_own_connection():
    async def scenario(fabrics, recorders, mail):
        await gather(
            *(mail.send(0, 1, tag, bytes(1000 * (tag + 1)), connection_class=tag) for tag in range(3)),
            *(mail.receive(1, 0, tag, 1000 * (tag + 1)) for tag in range(3)),
        )
        sent = {entry.connection_class: entry for entry in fabrics[0].statistics().connections}
        received = {entry.connection_class: entry for entry in fabrics[1].statistics().connections}
        assert sorted(sent) == [-1, 0, 1, 2]
        for tag in range(3):
            assert (sent[tag].sent_bytes, sent[tag].sent_messages) == (1000 * (tag + 1), 1)
            assert (received[tag].received_bytes, received[tag].received_messages) == (1000 * (tag + 1), 1)
            assert sent[tag].queued_bytes == 0
        assert sent[-1].overhead_bytes > 0

    run_over_tcp(2, scenario, num_classes=3)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_marks_and_priorities_are_set(address):
    async def scenario(fabrics, recorders, mail):
        for fabric, other in ((fabrics[0], 1), (fabrics[1], 0)):
            for sock, mark, priority in zip(sockets_of(fabric, other), (46, 34, 8), (6, 5, 4), strict=True):
                level, name = (
                    (socket.IPPROTO_IPV6, socket.IPV6_TCLASS) if ":" in address else (socket.IPPROTO_IP, socket.IP_TOS)
                )
                assert sock.getsockopt(level, name) & 0xFC == mark << 2
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == priority
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run_over_tcp(2, scenario, address=address, num_classes=2, dscp=(34, 8))


def test_hosts_come_from_the_topology():
    topology = Topology.flat(2, rate=1e9)

    async def scenario(fabrics, recorders, mail):
        assert fabrics[0].describe_peer(1) == "rank 1 (host h1)"
        assert repr(fabrics[0]) == "<TcpFabric rank 0 of 2: 1 peers>"
        assert repr(fabrics[0].peer(1)) == "<Peer rank 1 (host h1): ready>"

    run_over_tcp(2, scenario, topology=topology)


@pytest.mark.parametrize(("place", "num_flips"), [(500, 1), (5_000, 3), (300_007, 1), (900_000, 1), (5_000, 1000)])
def test_a_bit_that_flips_on_the_way_is_found_and_sent_again_unless_that_happens_each_time(place, num_flips):
    async def main():
        proxy = BitFlippingProxy(place, num_flips)
        store = ProxyStore(proxy, await proxy.listen())
        fabrics = await connect_all(2, FabricOptions(shares_memory=False), store=store)
        recorders = [Recorder() for _ in fabrics]
        for fabric, recorder in zip(fabrics, recorders, strict=True):
            fabric.set_listener(recorder)
        mail = Mail(fabrics)
        payload = random.Random(place).randbytes(MIB)
        received = mail.receive(0, 1, 1, MIB)
        mail.send(1, 0, 1, payload)
        if num_flips < 5:
            await gather(received)
            assert received.result() == payload
            assert proxy.num_flipped == num_flips
            assert not recorders[0].lost
        else:
            await asyncio.gather(*(recorder.wait_until(lambda r=recorder: r.lost) for recorder in recorders))
            assert not received.done()
            text = str(recorders[0].lost[1])
            assert re.search(r"failed (its|their) checksum", text) or "closed its connections to this rank" in text
            assert any("broke 5 times" in str(*recorder.lost.values()) for recorder in recorders)
        for fabric in fabrics:
            fabric.abort()
        await proxy.close()

    loops.run(main())


def test_news_that_many_pass_on_name_who_told_first_and_nobody_else():
    async def scenario(fabrics, recorders, mail):
        told = "sent nothing for 9.9 s (as " + fabrics[1].describe_peer(2) + " reports)"
        fabrics[0].on_broken(fabrics[0].peer(1), told, must_tell=True)
        await recorders[2].wait_until(lambda: 1 in recorders[2].lost)
        assert str(recorders[2].lost[1]).endswith(told)
        assert str(recorders[2].lost[1]).count("reports") == 1

    run_over_tcp(3, scenario)


def test_news_of_a_loss_names_the_cause():
    async def scenario(fabrics, recorders, mail):
        peer = fabrics[0].peer(1)
        fabrics[0].on_broken(peer, "sent nothing for 9.9 s", must_tell=True)
        await recorders[2].wait_until(lambda: 1 in recorders[2].lost)
        assert str(recorders[2].lost[1]).endswith(
            "sent nothing for 9.9 s (as " + fabrics[1].describe_peer(0) + " reports)"
        )
        assert recorders[2].lost[1].rank == 1
        await recorders[1].wait_until(lambda: len(recorders[1].lost) == 2)
        assert "closed its connections to this rank, because rank 1 sent nothing" in str(recorders[1].lost[0])

    run_over_tcp(3, scenario)


def test_of_two_that_lose_each_other_all_lose_the_higher_one():
    """Rank 2 finds rank 1 silent, and rank 1 lives: 0 and 3 go on with 1, whoever told them what first."""

    async def scenario(fabrics, recorders, mail):
        fabrics[2].on_broken(fabrics[2].peer(1), "sent nothing for 9.9 s", must_tell=True)
        for rank in (0, 1, 3):
            await recorders[rank].wait_until(lambda r=rank: 2 in recorders[r].lost)
        await recorders[2].wait_until(lambda: len(recorders[2].lost) == 3)
        assert [set(recorders[rank].lost) for rank in (0, 1, 3)] == [{2}] * 3
        assert "gave up rank 1, which sent nothing for 9.9 s (as " in str(recorders[0].lost[2])

    run_over_tcp(4, scenario)


def test_who_is_given_up_by_hearsay_accuses_nobody():
    """Rank 0 loses rank 1, and 3 believes it at once; rank 1 must not take rank 3 along, as long as 2 has not heard."""

    async def scenario(fabrics, recorders, mail):
        fabrics[2].peer(0)._handlers[FrameType.LOST] = lambda tag, payload: None
        fabrics[0].on_broken(fabrics[0].peer(1), "sent nothing for 9.9 s", must_tell=False)
        await recorders[1].wait_until(lambda: 3 in recorders[1].lost)
        assert type(recorders[1].lost[3]) is GivenUpError
        fabrics[1].send_control(2, b"after whatever it told")
        await recorders[2].wait_until(lambda: recorders[2].controls)
        assert 3 not in recorders[2].lost

    run_over_tcp(4, scenario)


def test_close_does_not_wait_for_ever_for_a_receive():
    async def scenario(fabrics, recorders, mail):
        mail.send(0, 1, 1, bytes(MIB))
        await gather(fabrics[0].close())
        await recorders[1].wait_until(lambda: recorders[1].lost)
        assert type(recorders[1].lost[0]) is PeerLostError
        assert "closed its fabric after waiting 0.2 s for this rank to receive" in str(recorders[1].lost[0])

    run_over_tcp(2, scenario, close_s=0.2)


def test_a_rank_that_closes_is_seen_to_leave_by_one_that_sends_to_it():
    async def scenario(fabrics, recorders, mail):
        for tag in range(20):
            mail.send(1, 0, tag, bytes(MIB))
        await gather(fabrics[0].close(), deadline_s=60.0)
        await recorders[1].wait_until(lambda: recorders[1].lost)
        assert isinstance(recorders[1].lost[0], PeerLeftError)
        await gather(fabrics[1].close(), deadline_s=60.0)

    run_over_tcp(2, scenario)


@pytest.mark.parametrize("error", [ValueError("bug"), OSError("bug"), EOFError("bug")])
def test_a_callback_that_fails_does_not_break_the_connection(error):
    async def scenario(fabrics, recorders, mail):
        caught = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: caught.append(context["exception"]))

        def fail(*_arguments):
            raise error

        recorders[1].on_control = fail
        fabrics[0].send_control(1, b"x")
        fabrics[1].receive(0, 1, memoryview(bytearray(5)), signature=7, urgency=0, on_received=fail)
        fabrics[0].send(1, 1, memoryview(bytes(5)), signature=7, urgency=0, connection_class=0, on_sent=fail)
        await gather(mail.send(0, 1, 2, bytes(MIB)), mail.receive(1, 0, 2, MIB))
        assert caught == [error] * 3
        assert not recorders[1].lost

    run_over_tcp(2, scenario)


@pytest.mark.parametrize("seed", range(10))
def test_random_traffic_with_cancellations(seed):
    async def scenario(fabrics, recorders, mail):
        kept, cancelled = await random_traffic(fabrics, mail, random.Random(seed), 150)
        await gather(*(future for *_, future in kept))
        assert all(future.result() == payload for *_, payload, future in kept)
        await gather(*(fabric.close() for fabric in fabrics), deadline_s=60.0)
        assert not any(future.done() for future in cancelled)
        assert not any(recorder.lost for recorder in recorders)

    run_over_tcp(
        3, scenario, num_classes=2, credit_bytes=20_000, grant_window_bytes=50_000, chunk_bytes=16_384, close_s=0.2
    )


def test_who_ends_for_a_loss_that_is_not_seen_here_yet_is_lost_for_what_it_said():
    """Rank 2 ends since rank 0 is lost, which rank 1 has not found yet: then it hears nothing more of rank 2."""

    async def scenario(fabrics, recorders, mail):
        fabrics[1].peer(0)._handlers[FrameType.LOST] = lambda tag, payload: None  # which passes on what rank 2 said
        fabrics[2].peer(1).send_frame(FrameType.LOST, tag=0, payload=b"is lost: as a test has it")
        fabrics[2].abort("it ended with PeerLostError: rank 0 (host memory) is lost")
        await recorders[1].wait_until(lambda: recorders[1].lost)
        assert str(recorders[1].lost[2]).endswith("is lost: it ended with PeerLostError: rank 0 (host memory) is lost")

    run_over_tcp(3, scenario)


def test_others_hear_of_the_first_loss_first():
    """Rank 3 ends since rank 2 is lost, and rank 1 believes that once it has lost rank 2 itself."""

    async def scenario(fabrics, recorders, mail):
        for lost in (2, 3):
            fabrics[3].peer(1).send_frame(FrameType.LOST, tag=lost, payload=b"is lost: as a test has it")
        fabrics[3].send_control(1, b"told")
        await recorders[1].wait_until(lambda: recorders[1].controls)
        assert not recorders[1].lost, "who has lost a rank below its own is not believed while that one lives"
        fabrics[1].peer(2).on_broken(EOFError())
        await recorders[0].wait_until(lambda: len(recorders[0].lost) == 2)
        assert list(recorders[0].lost) == [2, 3]

    run_over_tcp(4, scenario)
