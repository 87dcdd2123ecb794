"""A data connection on a socket of its own: in what chunks it sends, and what it makes of bytes in crumbs."""

import asyncio
import socket

import pytest

from syncline.fabric import data_connection
from syncline.fabric.data_connection import DataConnection, Outgoing
from syncline.fabric.frames import HEADER_BYTES, FrameType, decode_header, encode_header
from syncline.fabric.options import MAX_CHUNK_BYTES
from syncline.fabric.protocol import BULK, BULK_BYTES
from syncline.fabric.tick import TickEnd

MIB = 1 << 20


class Receiver:
    """Takes one message."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = memoryview(bytearray(num_bytes))
        self.is_over = asyncio.Event()

    def begin_chunk(self, frame):
        return self.memory

    def end_chunk(self, frame):
        self.is_over.set()


class NoReceiver:
    """Whoever only sends receives nothing."""


def connect(sock, receiver, *, chunk_bytes=MAX_CHUNK_BYTES):
    """Make the connection of class 0 of a socket, of which nobody is told anything."""
    return DataConnection(
        sock,
        TickEnd(asyncio.get_running_loop()),
        connection_class=0,
        chunk_bytes=chunk_bytes,
        receiver=receiver,
        on_message_sent=lambda _: None,
        on_end=lambda: None,
        on_broken=lambda error: None,
    )


def outgoing(*, tag, num_bytes, urgency, is_eager=False):
    payload = memoryview(bytes(num_bytes))
    return Outgoing(
        tag=tag,
        payload=payload,
        num_bytes=num_bytes,
        signature=0,
        urgency=urgency,
        order=tag,
        is_eager=is_eager,
        on_sent=None,
        limit_bytes=num_bytes,
    )


def frames_of(transport):
    place = 0
    while place + HEADER_BYTES <= len(transport):
        frame = decode_header(memoryview(transport)[place : place + HEADER_BYTES])
        assert frame.chunk_bytes <= MAX_CHUNK_BYTES
        yield frame
        place += HEADER_BYTES + frame.chunk_bytes


async def read_on(sock, transport, num_bytes):
    """Read until so much is in ``transport``, at least."""
    async with asyncio.timeout(60):
        while len(transport) < num_bytes:
            transport += await asyncio.get_running_loop().sock_recv(sock, MIB)


async def receive_in_crumbs(payload: bytes, crumb_bytes: int) -> bytes:
    """Send a message a crumb at a time; return what came."""
    ours, theirs = socket.socketpair()
    receiver = Receiver(len(payload))
    connection = connect(ours, receiver)
    connection.start()
    header = encode_header(
        FrameType.EAGER, 0, tag=1, signature=2, message_bytes=len(payload), offset=0, payload=memoryview(payload)
    )
    with theirs:
        for start in range(0, len(header + payload), crumb_bytes):
            assert not receiver.is_over.is_set(), "it is not over before its last byte"
            theirs.sendall((header + payload)[start : start + crumb_bytes])
            for _ in range(3):
                await asyncio.sleep(0)  # the loop looks at the socket in between
        async with asyncio.timeout(60):
            await receiver.is_over.wait()
        connection.close()
    return bytes(receiver.memory)


@pytest.mark.parametrize("crumb_bytes", [1, 7, HEADER_BYTES, 1448])
def test_a_chunk_in_crumbs_arrives_whole(crumb_bytes: int) -> None:
    payload = bytes(k % 251 for k in range(3 * crumb_bytes + 77))
    assert asyncio.run(receive_in_crumbs(payload, crumb_bytes)) == payload


def test_an_urgent_message_waits_for_at_most_one_other_on_its_connection() -> None:
    """Count the frames in the order of the wire, behind a kernel buffer that is full."""

    async def main():
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        theirs.setblocking(False)
        connection, transport = connect(ours, NoReceiver()), bytearray()
        connection.start()
        connection.push(outgoing(tag=1, num_bytes=16 * MIB, urgency=9))
        await read_on(theirs, transport, 5 * MIB)
        waiting_bytes = sum(map(len, connection.stream.unsent))
        num_begun = -(-connection.sent_bytes // MAX_CHUNK_BYTES)
        connection.push(outgoing(tag=2, num_bytes=MIB, urgency=0))
        await read_on(theirs, transport, 17 * MIB)
        connection.close()
        theirs.close()
        tags = [frame.tag for frame in frames_of(transport)]
        assert waiting_bytes <= MAX_CHUNK_BYTES + HEADER_BYTES
        assert 0 < num_begun == tags.index(2) < 64
        assert tags[num_begun : num_begun + 4] == [2] * 4, "the urgent message goes before all that was not begun"
        assert tags.count(1) == 64

    asyncio.run(main())


def test_bulk_messages_go_in_larger_chunks_after_the_others() -> None:
    async def main():
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        connection, transport = connect(ours, NoReceiver(), chunk_bytes=16 << 10), bytearray()
        connection.push(outgoing(tag=1, num_bytes=BULK_BYTES, urgency=BULK))
        connection.push(outgoing(tag=2, num_bytes=BULK_BYTES, urgency=BULK - 1))
        connection.start()
        await read_on(theirs, transport, 2 * BULK_BYTES + 5 * HEADER_BYTES)
        connection.close()
        theirs.close()
        chunks = [(frame.tag, frame.chunk_bytes) for frame in frames_of(transport)]
        assert chunks == [(2, 16 << 10)] * 4 + [(1, BULK_BYTES)]

    asyncio.run(main())


def test_what_is_sent_without_asking_is_never_divided_where_chunks_are_smaller_than_it() -> None:
    async def main():
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        connection, transport = connect(ours, NoReceiver(), chunk_bytes=16 << 10), bytearray()
        connection.push(outgoing(tag=1, num_bytes=48 << 10, urgency=0, is_eager=True))
        connection.push(outgoing(tag=2, num_bytes=48 << 10, urgency=1))
        connection.start()
        await read_on(theirs, transport, (96 << 10) + 4 * HEADER_BYTES)
        connection.close()
        theirs.close()
        chunks = [(frame.tag, frame.chunk_bytes) for frame in frames_of(transport)]
        assert chunks == [(1, 48 << 10)] + [(2, 16 << 10)] * 3

    asyncio.run(main())


async def told_resent(monkeypatch, counts):
    """Send a message in as many chunks as there are counts; return what they say was sent again."""
    left = iter(counts)
    monkeypatch.setattr(data_connection, "resent_segments", lambda _: next(left))
    one, other = socket.socketpair()
    one.setblocking(False)
    other.setblocking(False)
    connection = connect(one, NoReceiver(), chunk_bytes=4096)
    connection.push(outgoing(tag=1, num_bytes=4096 * len(counts), urgency=0))
    transport = bytearray()
    await read_on(other, transport, (4096 + HEADER_BYTES) * len(counts))
    connection.close()
    other.close()
    return [frame.flags for frame in frames_of(transport)]


def test_a_chunk_says_what_was_sent_again_since_the_last_one(monkeypatch):
    found = asyncio.run(told_resent(monkeypatch, [0, 3, 3, 2, 4, 1 << 20]))
    assert found == [0, 3, 0, 0, 1, 0xFFFF], "what came twice is taken back, and does not count again"
