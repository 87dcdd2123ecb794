"""A data connection on a socket of its own: when it wakes up for bytes that come in crumbs."""

import asyncio
import socket

from syncline.fabric.data_connection import WAKE_BYTES, DataConnection, Outgoing
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


class CountingConnection(DataConnection):
    """Counts how often it is woken."""

    num_reads = 0

    def _read(self):
        self.num_reads += 1
        super()._read()


def connect(sock, receiver, *, chunk_bytes=MAX_CHUNK_BYTES, kind=DataConnection):
    """Make the connection of class 0 of a socket, of which nobody is told anything."""
    return kind(
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
    async with asyncio.timeout(10):
        while len(transport) < num_bytes:
            transport += await asyncio.get_running_loop().sock_recv(sock, MIB)


async def receive_in_crumbs(payload: bytes, crumb_bytes: int) -> tuple[bytes, int, int]:
    """Send a message a crumb at a time; return what came, how often it was read, and what wakes the reader after it."""
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock, _ = listener.accept()
    listener.close()
    receiver = Receiver(len(payload))
    connection = connect(sock, receiver, kind=CountingConnection)
    connection.start()
    header = encode_header(
        FrameType.EAGER, 0, tag=1, signature=2, message_bytes=len(payload), offset=0, payload=memoryview(payload)
    )
    with sender:
        for start in range(0, len(header + payload), crumb_bytes):
            sender.sendall((header + payload)[start : start + crumb_bytes])
            for _ in range(3):
                await asyncio.sleep(0)  # the loop looks at the socket in between
        async with asyncio.timeout(10):
            await receiver.is_over.wait()
        wakes_at_bytes = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)
        connection.close()
    return bytes(receiver.memory), connection.num_reads, wakes_at_bytes


def test_a_chunk_in_crumbs_wakes_the_loop_seldom_and_for_its_last_byte() -> None:
    num_bytes, crumb_bytes = 5 * WAKE_BYTES + 77, 1448
    payload = bytes(k % 251 for k in range(num_bytes))
    received, num_reads, wakes_at_bytes = asyncio.run(receive_in_crumbs(payload, crumb_bytes))
    assert received == payload
    assert num_reads <= 2 * (num_bytes // WAKE_BYTES + 1)
    assert num_reads < num_bytes // crumb_bytes // 4
    assert wakes_at_bytes == 1, "the next header is waited for by the byte"


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
        waiting_bytes = connection._buffers_bytes
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
