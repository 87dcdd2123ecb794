"""A peer that breaks the protocol loses its connections; it cannot make this process allocate or crash."""

import asyncio
import contextlib
import random
import re
import socket
import struct
import tracemalloc

import loops
import pytest
from fabric_scenarios import Recorder
from frames_by_hand import HEADER_BYTES, encode_header
from hostile_peer import open_hostile

from syncline.errors import PeerLostError
from syncline.fabric.frames import FrameType
from syncline.fabric.protocol import COST_BYTES, MAX_BACKLOG_BYTES, ListenerSlot
from syncline.fabric.shared_host import address_of


def run(scenario, **settings):
    async def main():
        fabric, peer = await open_hostile(**settings)
        recorder = Recorder()
        fabric.set_listener(recorder)
        try:
            await scenario(fabric, peer, recorder)
        finally:
            fabric.abort()
            peer.close()

    loops.run(main())


def refused(*steps, match, **settings):
    """Send the frames of ``steps`` and expect the loss of the peer with a text that holds ``match``."""

    async def scenario(fabric, peer, recorder):
        for connection_class, kind, fields in steps:
            await peer.frame(connection_class, kind, **fields)
        await recorder.wait_until(lambda: recorder.lost)
        assert isinstance(recorder.lost[1], PeerLostError)
        assert match in str(recorder.lost[1])
        assert str(recorder.lost[1]).startswith("rank 1 (host evil) broke the protocol")
        assert match in await peer.verdict()

    run(scenario, **settings)


def test_data_that_was_not_granted():
    refused((0, FrameType.DATA, {"tag": 5, "message_bytes": 10, "payload": b"x" * 10}), match="were not granted")


async def read_headers(fabric, connection_class, num_headers):
    """Wait until the fabric has read so many headers of a data connection."""
    async with asyncio.timeout(60):
        while True:
            found = fabric.statistics().connections
            if any(
                c.connection_class == connection_class and c.overhead_bytes >= num_headers * HEADER_BYTES for c in found
            ):
                return
            await asyncio.sleep(0)


@pytest.mark.parametrize("num_claimed", [200_000, 100_000], ids=["whole", "half"])
def test_a_granted_chunk_on_two_connections_lands_once(num_claimed):
    """The second claim would outlive the message, or count its bytes twice and report a message that is not whole."""

    async def scenario(fabric, peer, recorder):
        received = []
        destination = memoryview(bytearray(200_000))
        fabric.receive(1, 7, destination, signature=5, urgency=0, on_received=lambda: received.append(7))
        await peer.frame(-1, FrameType.REQUEST, tag=7, signature=5, message_bytes=200_000)
        header, _ = await peer.read_until(FrameType.GRANT)
        assert header.message_bytes == 200_000
        payload = b"A" * num_claimed
        frames = [
            encode_header(FrameType.DATA, k, tag=7, signature=5, message_bytes=200_000, payload=payload) + payload
            for k in range(2)
        ]
        before = {c.connection_class: c.overhead_bytes // HEADER_BYTES for c in fabric.statistics().connections}
        await peer.send(1, frames[1][:60])
        await read_headers(fabric, 1, before[1] + 1)
        await peer.send(0, frames[0])
        await recorder.wait_until(lambda: recorder.lost)
        text = f"bytes 0 to {num_claimed} of message 0x7 are sent again while they arrive on another connection"
        assert f"rank 1 (host evil) broke the protocol: {text}" in str(recorder.lost[1])
        assert not received

    run(scenario, num_classes=2, shares_memory=False)


def test_an_empty_chunk_of_a_granted_message():
    async def scenario(fabric, peer, recorder):
        fabric.receive(1, 7, memoryview(bytearray(90_000)), signature=5, urgency=0, on_received=lambda: None)
        await peer.frame(-1, FrameType.REQUEST, tag=7, signature=5, message_bytes=90_000)
        await peer.read_until(FrameType.GRANT)
        await peer.frame(0, FrameType.DATA, tag=7, signature=5, message_bytes=90_000)
        await recorder.wait_until(lambda: recorder.lost)
        assert "bytes 0 to 0 of message 0x7 were not granted" in str(recorder.lost[1])

    run(scenario, shares_memory=False)


def test_an_empty_chunk_of_a_message_that_is_copied_out_of_memory():
    async def scenario(fabric, peer, recorder):
        offer = peer.offers.make(target=0)
        await peer.frame(-1, FrameType.OFFER, payload=offer.encode())
        await peer.read_until(FrameType.ACCEPT)
        # The connections have their turn after each MiB that is copied, so the chunk is read before the copy is over.
        source, destination = memoryview(bytes(16 << 20)), memoryview(bytearray(16 << 20))
        fabric.receive(1, 7, destination, signature=5, urgency=0, on_received=lambda: None)
        message = {"tag": 7, "signature": 5, "message_bytes": source.nbytes}
        await peer.frame(-1, FrameType.REQUEST, **message, offset=address_of(source))
        await peer.frame(0, FrameType.DATA, **message)
        await recorder.wait_until(lambda: recorder.lost)
        assert "bytes 0 to 0 of message 0x7 were not granted" in str(recorder.lost[1])

    run(scenario)


def test_more_than_the_credit():
    messages = [(0, FrameType.EAGER, {"tag": tag, "message_bytes": 4096, "payload": bytes(4096)}) for tag in range(5)]
    refused(*messages, match="exceeds the credit of 20000 bytes", credit_bytes=20_000)


def test_many_empty_messages_cost_credit_too():
    messages = [(0, FrameType.EAGER, {"tag": tag}) for tag in range(400)]
    refused(*messages, match="exceeds the credit of 16384 bytes", credit_bytes=16_384)


def test_the_same_message_twice():
    message = (0, FrameType.EAGER, {"tag": 1, "message_bytes": 1, "payload": b"x"})
    refused(message, message, match="in part or twice")


def test_a_small_message_in_parts():
    refused((0, FrameType.EAGER, {"tag": 1, "message_bytes": 10, "payload": b"x"}), match="in part or twice")


def test_a_request_twice():
    request = (-1, FrameType.REQUEST, {"tag": 1, "message_bytes": 1 << 40})
    refused(request, request, match="comes twice")


def test_too_many_requests():
    async def scenario(fabric, peer, recorder):
        frames = (encode_header(FrameType.REQUEST, -1, tag=tag, message_bytes=1 << 60) for tag in range(17_000))
        await peer.send(-1, *frames)
        await recorder.wait_until(lambda: recorder.lost)
        assert "one of more than 16384" in str(recorder.lost[1])

    run(scenario)


@pytest.mark.parametrize("kind", [FrameType.GRANT, FrameType.DISCARD])
def test_a_grant_of_what_was_not_announced(kind):
    refused((-1, kind, {"tag": 9, "message_bytes": 5}), match="which was not announced")


def test_a_grant_beyond_the_message():
    async def scenario(fabric, peer, recorder):
        fabric.send(1, 4, memoryview(bytes(100_000)), signature=0, urgency=0, connection_class=0)
        header, _ = await peer.read_until(FrameType.REQUEST)
        assert (header.tag, header.message_bytes) == (4, 100_000)
        await peer.frame(-1, FrameType.GRANT, tag=4, message_bytes=100_001)
        await recorder.wait_until(lambda: recorder.lost)
        assert "grant of message 0x4 up to byte 100001 of 100000" in str(recorder.lost[1])

    run(scenario)


@pytest.mark.parametrize("kind", [FrameType.GRANT, FrameType.HEARTBEAT, FrameType.CONTROL, FrameType.LOST])
def test_control_frames_on_a_data_connection(kind):
    refused((0, kind, {}), match="on a connection of class 0")


@pytest.mark.parametrize("kind", [FrameType.EAGER, FrameType.DATA])
def test_data_frames_on_the_control_connection(kind):
    refused((-1, kind, {}), match="on the control connection")


def test_a_control_frame_that_is_too_large():
    refused((-1, FrameType.CONTROL, {"payload": bytes(16_385)}), match="control frame of 16385 bytes")


def test_control_messages_before_anybody_listens_are_kept_up_to_a_bound():
    num_bytes = 16_384

    async def main():
        fabric, peer = await open_hostile()
        recorder = Recorder()
        try:
            frame = encode_header(FrameType.CONTROL, -1, payload=bytes(num_bytes)) + bytes(num_bytes)
            for _ in range(2 + MAX_BACKLOG_BYTES // (num_bytes + COST_BYTES) // 64):
                with contextlib.suppress(OSError):
                    await peer.send(-1, frame * 64)
            with pytest.raises(PeerLostError):
                async with asyncio.timeout(60):
                    await fabric.wait_for_peer(fabric.peer(1), lambda: False)
            fabric.set_listener(recorder)
            await recorder.wait_until(lambda: recorder.lost)
            text = "rank 1 (host evil) broke the protocol: it sent over 16 MiB of control messages to nobody yet"
            assert str(recorder.lost[1]) == text
            assert len(recorder.controls) <= MAX_BACKLOG_BYTES // (num_bytes + COST_BYTES)
        finally:
            fabric.abort()
            peer.close()

    loops.run(main())


def test_data_after_the_end():
    refused((0, FrameType.END, {}), (0, FrameType.EAGER, {"tag": 1}), match="after its end")


def test_garbage_in_place_of_a_frame():
    async def scenario(fabric, peer, recorder):
        await peer.send(0, b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n")
        await recorder.wait_until(lambda: recorder.lost)
        assert "not one of ours" in str(recorder.lost[1])

    run(scenario)


def test_half_a_frame_and_then_nothing_is_a_silent_loss():
    async def scenario(fabric, peer, recorder):
        await peer.send(0, encode_header(FrameType.EAGER, 0, tag=1, payload=b"x" * 50)[:20])
        peer.sockets[0].shutdown(socket.SHUT_WR)
        await recorder.wait_until(lambda: recorder.lost)
        text = "rank 1 (host evil) is lost: its side closed the connection without saying goodbye"
        assert str(recorder.lost[1]).startswith(text)
        assert "died" not in str(recorder.lost[1])

    run(scenario)


def test_half_an_early_message_and_then_nothing_is_not_kept():
    async def scenario(fabric, peer, recorder):
        await peer.send(0, encode_header(FrameType.EAGER, 0, tag=1, message_bytes=50, payload=b"x" * 50), b"x" * 20)
        peer.sockets[0].shutdown(socket.SHUT_WR)
        await recorder.wait_until(lambda: recorder.lost)
        assert fabric.statistics().unexpected_bytes == 0

    run(scenario)


def test_a_connection_that_is_reset_does_not_mean_that_a_process_died():
    async def scenario(fabric, peer, recorder):
        peer.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.sockets[0].close()
        await recorder.wait_until(lambda: recorder.lost)
        assert str(recorder.lost[1]).startswith("rank 1 (host evil) is lost: the connection was reset by its side, or")
        assert "died" not in str(recorder.lost[1])

    run(scenario)


def test_a_rank_that_stood_still_does_not_blame_whoever_gave_it_up():
    async def scenario(fabric, peer, recorder):
        loop = asyncio.get_running_loop()
        now_s = loop.time
        loop.time = lambda: now_s() + 60.0
        peer.sockets[0].shutdown(socket.SHUT_WR)
        await recorder.wait_until(lambda: recorder.lost)
        text = r"rank 0 \(host .+\) did not run for 60\.. s \(it was stopped or suspended, .+\), and then found rank 1 "
        assert re.match(text + r"\(host evil\) gone: it is lost: its side closed", str(recorder.lost[1]))

    run(scenario)


def test_what_a_peer_says_is_shown_in_one_line_and_bounded():
    async def scenario(fabric, peer, recorder):
        await peer.frame(-1, FrameType.LOST, tag=0, payload=b"says \x1b[2J\nERROR:" + b"x" * 9000)
        await recorder.wait_until(lambda: recorder.lost)
        assert "because rank 0 says \\x1b[2J\\nERROR:xxx" in str(recorder.lost[1])
        assert len(str(recorder.lost[1])) < 1200

    run(scenario)


def test_a_damaged_payload_is_named_and_not_delivered():
    async def scenario(fabric, peer, recorder):
        received = []
        fabric.receive(1, 1, memoryview(bytearray(50)), signature=0, urgency=0, on_received=lambda: received.append(1))
        await peer.send(0, encode_header(FrameType.EAGER, 0, tag=1, message_bytes=50, payload=b"x" * 50), b"y" * 50)
        await recorder.wait_until(lambda: recorder.lost)
        assert "rank 1 (host evil) is lost, as a frame was damaged: 50 bytes of message 0x1" in str(recorder.lost[1])
        assert not received
        assert "check memory, cable" in await peer.verdict()

    run(scenario)


def test_a_silent_peer_dies_by_the_clock():
    async def scenario(fabric, peer, recorder):
        await recorder.wait_until(lambda: recorder.lost)
        assert "rank 1 (host evil) sent nothing for 0." in str(recorder.lost[1])
        assert "sent nothing for 0." in await peer.verdict()

    run(scenario, heartbeat_s=0.05, suspect_s=0.1, dead_s=0.3)


def random_frame(generator):
    kind = generator.choice(list(FrameType))
    connection_class = generator.choice([-1, 0, generator.randrange(-2, 3)])
    payload = generator.randbytes(generator.choice([0, 0, 1, 50, 5000]))
    sizes = [0, 1, len(payload), 1 << 63, generator.getrandbits(64)]
    header = encode_header(
        kind,
        connection_class,
        tag=generator.choice([0, 1, 2, generator.getrandbits(64)]),
        signature=generator.choice([0, generator.getrandbits(32)]),
        message_bytes=generator.choice(sizes),
        offset=generator.choice([0, 0, *sizes]),
        payload=payload,
    )
    return bytearray(header + payload)


@pytest.mark.parametrize("seed", range(30))
def test_random_frames_end_in_a_loss_and_nothing_else(seed):
    async def scenario(fabric, peer, recorder):
        generator = random.Random(seed)
        fabric.receive(1, 1, memoryview(bytearray(50)), signature=0, urgency=0, on_received=lambda: None)
        fabric.receive(1, 2, memoryview(bytearray(1 << 20)), signature=0, urgency=0, on_received=lambda: None)
        fabric.send(1, 1, memoryview(bytes(100_000)), signature=0, urgency=0, connection_class=0)
        try:
            for _ in range(1000):
                frame = random_frame(generator)
                if generator.random() < 0.02:
                    frame[generator.randrange(len(frame))] ^= 1 << generator.randrange(8)
                await peer.send(generator.choice([-1, 0]), frame)
                await asyncio.sleep(0)
        except OSError:
            pass
        peer.close()
        await recorder.wait_until(lambda: recorder.lost)
        assert fabric.statistics().unexpected_bytes <= 50_000

    tracemalloc.start()
    try:
        run(scenario, credit_bytes=50_000)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_the_header_is_small():
    assert HEADER_BYTES == 48


def test_classes_that_are_opened_before_the_last_ones_were_agreed():
    opening = (-1, FrameType.OPEN, {"payload": b"4 classes"})
    refused(opening, opening, match="opens further connections before the last ones were agreed")


def test_empty_messages_before_anybody_listens_are_bounded_too():
    listener_slot = ListenerSlot()
    num_kept = MAX_BACKLOG_BYTES // COST_BYTES
    assert all(listener_slot.has_room(1, 0) for _ in range(num_kept))
    assert not listener_slot.has_room(1, 0)
    assert listener_slot.has_room(2, 0)
    listener_slot.listen(Recorder())
    assert listener_slot.has_room(1, 16_384)
