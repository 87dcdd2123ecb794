"""The thread that beats while the loop cannot: it repeats, it never mixes frames, it ends."""

import socket
import time

import pytest
from frames_by_hand import HEADER_BYTES

from syncline.fabric._native import GrantScheduler, NativeTransport
from syncline.fabric.frames import CONTROL_CLASS, FrameType
from syncline.fabric.sizing import GrantWindow

FRAME = 3
"""The kind of event for a control frame, as ``events.hpp`` counts them."""
PATIENCE_S = 60.0


def make_exchange():
    return NativeTransport(GrantScheduler(window=GrantWindow.fixed(1000), quantum_bytes=1000))


def connect(native_transport, sock, peer=1, keys=None):
    sock.setblocking(False)
    native_transport.add_peer(peer, eager_bytes=100, credit_bytes=10_000)
    native_transport.attach_control(peer, sock.fileno(), keys=keys)
    native_transport.start(peer, CONTROL_CLASS)


def read_until(native_transport, is_enough, also=lambda: None):
    """Poll until it is enough; return the frames that came."""
    deadline_s, frames = time.monotonic() + PATIENCE_S, []
    while not is_enough(frames):
        assert time.monotonic() < deadline_s, f"{len(frames)} frames"
        also()
        native_transport.poll()
        while (event := native_transport.next_event()) is not None:
            kind, _, tag, number, _, text = event
            assert kind == FRAME, event
            frames.append((number, tag, text))
        native_transport.finish()
    return frames


@pytest.fixture(params=[None, (b"1" * 16, b"2" * 16)], ids=["checksums", "keys"])
def pair(request):
    keys = request.param
    ours, theirs = socket.socketpair()
    sender, receiver = make_exchange(), make_exchange()
    connect(sender, ours, keys=keys)
    connect(receiver, theirs, keys=keys and keys[::-1])
    yield sender, receiver, ours, theirs
    for native_transport in (sender, receiver):
        native_transport.close_peer(1)
        native_transport.close()
    ours.close()
    theirs.close()


def test_the_last_heartbeat_is_repeated_while_nobody_serves_the_exchange(pair):
    sender, receiver, _, _ = pair
    sender.send_frame(1, FrameType.HEARTBEAT, tag=42)
    sender.finish()
    read_until(receiver, lambda _: receiver.progress(1) == 42)
    receiver.take_heard(1)
    sender.keep_beating(interval_s=0.001, limit_s=PATIENCE_S)
    for _ in range(3):
        read_until(receiver, lambda _: receiver.take_heard(1))
    assert receiver.progress(1) == 42


def test_frames_are_never_mixed(pair):
    """A slow reader, frames larger than the kernel takes at once, and a thread that beats all the time."""
    sender, receiver, ours, theirs = pair
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender.keep_beating(interval_s=0.0002, limit_s=PATIENCE_S)
    num_bytes, num_bursts, burst = 16_000, 40, 5

    def num_beats(frames):
        return (receiver.counters(1)[0][5] - len(frames) * (HEADER_BYTES + num_bytes)) // HEADER_BYTES

    frames = []
    for _ in range(num_bursts):
        first, beats_before = len(frames), num_beats(frames)
        for place in range(first, first + burst):
            sender.send_frame(1, FrameType.CONTROL, tag=place, payload=bytes([place % 251]) * num_bytes)
            sender.finish()
        frames += read_until(receiver, lambda found: len(found) == burst, sender.poll)
        read_until(receiver, lambda _, seen=tuple(frames), before=beats_before: num_beats(seen) > before)
    expected = [(FrameType.CONTROL, place, bytes([place % 251]) * num_bytes) for place in range(num_bursts * burst)]
    assert frames == expected
