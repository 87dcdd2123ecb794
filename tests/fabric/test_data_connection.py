"""A data connection on a socket of its own: when it wakes up for bytes that come in crumbs."""

import asyncio
import socket

from syncline.fabric.data_connection import WAKE_BYTES, DataConnection
from syncline.fabric.frames import FrameType, encode_header
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
