"""In what chunks a data connection sends, seen by a peer that reads its socket."""

import socket
import time

import pytest
from frames_by_hand import HEADER_BYTES, decode_header, encode_header

from syncline.fabric._native import GrantScheduler, NativeTransport
from syncline.fabric.frames import CONTROL_CLASS, FrameType
from syncline.fabric.protocol import BULK
from syncline.fabric.sizing import GrantWindow

KIB, MIB = 1 << 10, 1 << 20
BULK_BYTES = 64 * KIB


class SendingRank:
    """A rank that sends to a peer, whose two sockets a test has."""

    def __init__(self, *, eager_bytes=0, chunk_bytes=16 * KIB):
        self.transport = NativeTransport(GrantScheduler(window=GrantWindow.fixed(MIB), quantum_bytes=MIB))
        self.transport.add_peer(1, eager_bytes=eager_bytes, credit_bytes=MIB)
        (own_control, self.control), (own_data, self.data) = self.pairs = [socket.socketpair() for _ in range(2)]
        for sock in (own_control, own_data, self.control, self.data):
            sock.setblocking(False)
        self.transport.attach_control(1, own_control.fileno(), keys=None)
        self.transport.attach_data(1, own_data.fileno(), chunk_bytes=chunk_bytes, keys=None)
        for connection_class in (CONTROL_CLASS, CONTROL_CLASS + 1):
            self.transport.start(1, connection_class)
        self.allow(FrameType.CREDIT, message_bytes=MIB)

    def close(self):
        self.transport.close_peer(1)
        self.transport.close()
        for pair in self.pairs:
            for sock in pair:
                sock.close()

    def allow(self, kind, **fields):
        """Let the peer say something."""
        self.control.send(encode_header(kind, CONTROL_CLASS, **fields))
        self.transport.poll()

    def send(self, tag, num_bytes, *, urgency=0):
        payload = memoryview(bytes(num_bytes))
        self.transport.send(1, tag, payload, signature=0, urgency=urgency, connection_class=0)

    def chunks(self, num_bytes):
        """Return the chunks that hold so many bytes of payload, in the order of the socket."""
        stream, found = bytearray(), []
        end = time.monotonic() + 30.0
        while num_bytes:
            assert time.monotonic() < end, f"{num_bytes} bytes do not come"
            self.transport.finish()
            self.transport.poll()
            try:
                stream += self.data.recv(MIB)
            except BlockingIOError:
                continue
            while len(stream) >= HEADER_BYTES and len(stream) >= HEADER_BYTES + decode_header(stream).chunk_bytes:
                frame = decode_header(stream)
                del stream[: HEADER_BYTES + frame.chunk_bytes]
                num_bytes -= frame.chunk_bytes
                found.append((frame.tag, frame.chunk_bytes))
        return found


@pytest.fixture
def open_rank():
    """Open a rank that sends; it is closed in the end."""
    opened = []

    def make(**settings):
        opened.append(SendingRank(**settings))
        return opened[-1]

    yield make
    for rank in opened:
        rank.close()


def test_bulk_messages_go_in_larger_chunks_after_the_others(open_rank):
    rank = open_rank()
    for tag, urgency in ((1, BULK), (2, BULK - 1)):
        rank.send(tag, BULK_BYTES, urgency=urgency)
    rank.transport.finish()
    for tag in (1, 2):
        rank.control.send(encode_header(FrameType.GRANT, CONTROL_CLASS, tag=tag, message_bytes=BULK_BYTES))
    assert rank.chunks(2 * BULK_BYTES) == [(2, 16 * KIB)] * 4 + [(1, BULK_BYTES)]


def test_what_is_sent_without_asking_is_never_divided_where_chunks_are_smaller_than_it(open_rank):
    rank = open_rank(eager_bytes=48 * KIB)
    rank.send(1, 48 * KIB)
    assert rank.chunks(48 * KIB) == [(1, 48 * KIB)]


def test_small_messages_share_a_chunk_and_the_most_urgent_goes_first(open_rank):
    rank = open_rank(eager_bytes=KIB)
    for tag, urgency in ((1, 5), (2, 3), (3, 4)):
        rank.send(tag, KIB, urgency=urgency)
    assert rank.chunks(3 * KIB) == [(2, KIB), (3, KIB), (1, KIB)]
