"""Ranks of one machine copy out of each other's memory, if they can prove that it is one machine."""

import os
import struct
import subprocess
import sys
import threading

import loops
import numpy as np
import pytest
from fabric_scenarios import Mail, Recorder, connect_all, gather
from hostile_peer import open_hostile

from syncline.errors import PeerLostError
from syncline.fabric import FabricOptions, shared_host
from syncline.fabric.frames import MEMORY_CLASS, FrameError, FrameType
from syncline.fabric.shared_host import OFFER_BYTES, MemoryOffers, address_of, read_memory

pytestmark = pytest.mark.usefixtures("on_each_loop")

MIB = 1 << 20


def run(scenario, **settings):
    async def main():
        fabrics = await connect_all(2, FabricOptions(**settings))
        recorders = [Recorder() for _ in fabrics]
        for fabric, recorder in zip(fabrics, recorders, strict=True):
            fabric.set_listener(recorder)
        try:
            mail = Mail(fabrics)
            # Offers and acceptances travel before the first message and its answer.
            await gather(mail.send(0, 1, 1, b"a"), mail.receive(1, 0, 1, 1), mail.send(1, 0, 2, b"b"))
            await gather(mail.receive(0, 1, 2, 1))
            await scenario(fabrics, recorders, mail)
        finally:
            for fabric in fabrics:
                fabric.abort()

    loops.run(main())


def bytes_by_class(fabric):
    return {c.connection_class: c.sent_bytes for c in fabric.statistics().connections if c.sent_bytes}


MAKER, TAKER = (MemoryOffers(rank=rank, key=b"k" * 32) for rank in range(2))


def test_an_offer_is_accepted_by_whom_it_was_made_for_as_long_as_it_is_kept():
    offer = MAKER.make(target=1)
    encoded = offer.encode()
    assert len(encoded) == OFFER_BYTES
    assert TAKER.accept(encoded, source=0) == os.getpid()
    del offer
    assert TAKER.accept(encoded, source=0) is None


def test_an_offer_that_its_sender_has_not_made_for_this_rank_breaks_the_protocol():
    offer = MAKER.make(target=1)
    encoded = offer.encode()
    other_start = MemoryOffers(rank=1, key=b"l" * 32)
    for judge, source in ((MAKER, 1), (TAKER, 2), (other_start, 0), (MemoryOffers(rank=3, key=b"k" * 32), 0)):
        with pytest.raises(FrameError, match=f"a token that rank {source} has not made for rank {judge.rank}"):
            judge.accept(encoded, source=source)
    for damaged in (encoded[:-1] + bytes([encoded[-1] ^ 1]), bytes(OFFER_BYTES), b""):
        with pytest.raises(FrameError, match="has not made"):
            TAKER.accept(damaged, source=0)


@pytest.mark.parametrize("thread_id", [os.getpid, threading.get_native_id])
def test_a_token_that_was_brought_into_this_process_offers_nothing(thread_id):
    """Whoever knows the secret can seal a token for themselves, and send it here as a message."""
    offer = MAKER.make(target=1)
    brought = np.frombuffer(offer.token, dtype=np.uint8).copy()
    ready, over, ids = threading.Event(), threading.Event(), []

    def stay():
        ids.append(thread_id())
        ready.set()
        over.wait(60)

    thread = threading.Thread(target=stay)
    thread.start()
    try:
        assert ready.wait(60)
        payload = struct.pack("!IQ32s", ids[0], brought.ctypes.data, offer.token)
        assert TAKER.accept(payload, source=0) is None
    finally:
        over.set()
        thread.join()


def test_memory_that_is_not_there_is_not_accepted():
    token = MAKER.make(target=1).token
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert TAKER.accept(struct.pack("!IQ32s", other.pid, 8, token), source=0) is None
        other.communicate(b"\n")


def test_memory_that_is_not_there_is_an_error():
    with pytest.raises(OSError, match="reading the memory of process"):
        read_memory(os.getpid(), 8, memoryview(bytearray(4)))
    source, target = memoryview(b"0123456789"), bytearray(4)
    read_memory(os.getpid(), address_of(source) + 3, memoryview(target))
    assert target == b"3456"


def test_large_messages_do_not_touch_the_sockets():
    async def scenario(fabrics, recorders, mail):
        payload = os.urandom(3 * MIB + 17)
        received = mail.receive(1, 0, 7, len(payload))
        await gather(mail.send(0, 1, 7, payload), received)
        assert received.result() == payload
        assert bytes_by_class(fabrics[0]) == {0: 1, MEMORY_CLASS: len(payload)}

    run(scenario)


def test_sockets_are_used_where_memory_cannot_be_read(monkeypatch):
    monkeypatch.setattr(shared_host, "_process_vm_readv", None)

    async def scenario(fabrics, recorders, mail):
        await gather(mail.send(0, 1, 7, bytes(MIB)), mail.receive(1, 0, 7, MIB))
        assert bytes_by_class(fabrics[0]) == {0: MIB + 1}

    run(scenario)


def test_memory_is_copied_without_the_interpreter(monkeypatch):
    async def scenario(fabrics, recorders, mail):
        monkeypatch.setattr(shared_host, "_process_vm_readv", None)  # what Python tries offers with
        payload = os.urandom(3 * MIB + 17)
        received = mail.receive(1, 0, 7, len(payload))
        await gather(mail.send(0, 1, 7, payload), received)
        assert received.result() == payload
        assert bytes_by_class(fabrics[0]) == {0: 1, MEMORY_CLASS: len(payload)}

    run(scenario)


def test_the_more_urgent_message_is_copied_first():
    async def scenario(fabrics, recorders, mail):
        order = []
        for tag, urgency in ((7, 5), (8, 1)):
            received = mail.receive(1, 0, tag, 4 * MIB, urgency=urgency)
            received.add_done_callback(lambda _, tag=tag: order.append(tag))
            mail.send(0, 1, tag, bytes(4 * MIB), urgency=urgency)
        await gather(received)
        assert order[0] == 8

    run(scenario)


def test_a_cancelled_copy_is_not_written_any_more():
    async def scenario(fabrics, recorders, mail):
        destination = bytearray(b"x" * MIB)
        fabrics[1].receive(0, 7, memoryview(destination), signature=7, urgency=0, on_received=lambda: None)
        fabrics[1].cancel(0, 7)
        sent = mail.send(0, 1, 7, bytes(MIB))
        await gather(mail.receive(1, 0, 7, MIB), sent)
        assert destination == b"x" * MIB

    run(scenario)


def test_a_peer_whose_memory_cannot_be_read_any_more_is_lost(monkeypatch):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setattr(MemoryOffers, "accept", lambda *_, **__: ended.pid)

    async def scenario(fabrics, recorders, mail):
        mail.receive(1, 0, 7, MIB)
        mail.send(0, 1, 7, bytes(MIB))
        await gather(recorders[1].wait_until(lambda: recorders[1].lost))
        assert isinstance(recorders[1].lost[0], PeerLostError)
        assert "its process died or was killed" in str(recorders[1].lost[0])

    run(scenario)


def test_a_rank_never_copies_its_own_memory_for_a_peer_that_hands_its_offer_back():
    async def main():
        fabric, peer = await open_hostile()
        recorder = Recorder()
        fabric.set_listener(recorder)
        try:
            _, offer = await peer.read_until(FrameType.OFFER)
            await peer.frame(-1, FrameType.OFFER, payload=offer)
            await recorder.wait_until(lambda: recorder.lost)
            text = "rank 1 (host evil) broke the protocol: it offers memory by a token that rank 1 has not made"
            assert text in str(recorder.lost[1])
        finally:
            fabric.abort()
            peer.close()

    loops.run(main())


def test_memory_is_offered_once():
    async def main():
        fabric, peer = await open_hostile()
        recorder = Recorder()
        fabric.set_listener(recorder)
        try:
            offer = peer.offers.make(target=0)
            for _ in range(2):
                await peer.frame(-1, FrameType.OFFER, payload=offer.encode())
            await recorder.wait_until(lambda: recorder.lost)
            assert "broke the protocol: it offers its memory twice" in str(recorder.lost[1])
        finally:
            fabric.abort()
            peer.close()

    loops.run(main())
