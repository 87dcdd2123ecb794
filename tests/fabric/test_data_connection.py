"""A data connection on a socket of its own: when it wakes up for bytes that come in crumbs."""

import asyncio
import socket

from syncline.fabric.data_connection import WAKE_BYTES, DataConnection, Outgoing
from syncline.fabric.frames import HEADER_BYTES, FrameType, decode_header, encode_header
from syncline.fabric.protocol import PATIENT, PATIENT_BYTES
from syncline.fabric.turn import TurnEnd


class Receiver:
    """Takes one message."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = memoryview(bytearray(num_bytes))
        self.is_over = asyncio.Event()

    def begin_chunk(self, frame):
        return self.memory

    def end_chunk(self, frame):
        self.is_over.set()


class CountingConnection(DataConnection):
    """Counts how often it is woken."""

    num_reads = 0

    def _read(self):
        self.num_reads += 1
        super()._read()


async def receive_in_crumbs(payload: bytes, crumb_bytes: int) -> tuple[bytes, int, int]:
    """Send a message a crumb at a time; return what came, how often it was read, and what wakes the reader after it."""
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock, _ = listener.accept()
    listener.close()
    receiver = Receiver(len(payload))
    connection = CountingConnection(
        sock,
        TurnEnd(asyncio.get_running_loop()),
        connection_class=0,
        chunk_bytes=1 << 18,
        receiver=receiver,
        on_message_sent=lambda _: None,
        on_end=lambda: None,
        on_broken=lambda error: None,
    )
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


def chunks_of(urgencies, *, num_bytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Send a message of each urgency; return (tag, bytes) of every chunk, in the order in which they go."""

    async def scenario():
        ours, theirs = socket.socketpair()
        connection = DataConnection(
            ours,
            TurnEnd(asyncio.get_running_loop()),
            connection_class=0,
            chunk_bytes=chunk_bytes,
            receiver=Receiver(0),
            on_message_sent=lambda _: None,
            on_end=lambda: None,
            on_broken=lambda error: None,
        )
        for tag, urgency in enumerate(urgencies):
            payload = memoryview(bytes(num_bytes))
            message = Outgoing(
                tag=tag,
                payload=payload,
                num_bytes=num_bytes,
                signature=0,
                urgency=urgency,
                order=tag,
                is_eager=False,
                on_sent=None,
                limit_bytes=num_bytes,
            )
            connection.push(message)
        connection.start()
        theirs.setblocking(False)
        loop, found = asyncio.get_running_loop(), []
        async with asyncio.timeout(10):
            while sum(size for _, size in found) < num_bytes * len(urgencies):
                frame = decode_header(memoryview(await read(loop, theirs, HEADER_BYTES)))
                await read(loop, theirs, frame.chunk_bytes)
                found.append((frame.tag, frame.chunk_bytes))
        connection.close()
        theirs.close()
        return found

    return asyncio.run(scenario())


async def read(loop, sock, num_bytes: int) -> bytes:
    """Read exactly so much."""
    got = b""
    while len(got) < num_bytes:
        got += await loop.sock_recv(sock, num_bytes - len(got))
    return got


def test_patient_messages_go_in_larger_chunks_after_the_others() -> None:
    found = chunks_of((PATIENT, 0), num_bytes=PATIENT_BYTES, chunk_bytes=16 << 10)
    assert [tag for tag, _ in found] == [1] * (len(found) - 1) + [0]
    assert max(size for tag, size in found if tag == 1) == 16 << 10
    assert found[-1] == (0, PATIENT_BYTES)
