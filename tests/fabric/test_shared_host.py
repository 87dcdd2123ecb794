"""Ranks of one machine copy out of each other's memory, if they can prove that it is one machine."""

import os

import loops
import pytest
from fabric_scenarios import Mail, Recorder, connect_all, gather

from syncline.errors import PeerLostError
from syncline.fabric import FabricOptions, shared_host
from syncline.fabric.frames import MEMORY_CLASS
from syncline.fabric.shared_host import OFFER_BYTES, Offer, accept_offer, address_of, read_memory

pytestmark = pytest.mark.usefixtures("wire")

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


def test_an_offer_is_accepted_only_with_its_token():
    offer = Offer()
    encoded = offer.encode()
    assert len(encoded) == OFFER_BYTES
    assert accept_offer(encoded) == os.getpid()
    assert accept_offer(encoded[:-1] + bytes([encoded[-1] ^ 1])) is None
    assert accept_offer(bytes(OFFER_BYTES)) is None
    assert accept_offer(b"") is None


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


def test_a_peer_whose_memory_cannot_be_read_any_more_is_lost(wire, monkeypatch):
    async def scenario(fabrics, recorders, mail):
        def refuse(*_):
            raise ProcessLookupError(3, "No such process")

        monkeypatch.setattr(f"syncline.fabric.{'inbox' if wire == 'python' else 'native_wire'}.read_memory", refuse)
        mail.receive(1, 0, 7, MIB)
        mail.send(0, 1, 7, bytes(MIB))
        await gather(recorders[1].wait_until(lambda: recorders[1].lost))
        assert isinstance(recorders[1].lost[0], PeerLostError)
        assert "its process died or was killed" in str(recorders[1].lost[0])

    run(scenario)
