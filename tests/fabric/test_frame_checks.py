"""Frames that only the holder of a key can make: what somebody changes, repeats, leaves out or moves is refused."""

import asyncio
import struct
from zlib import crc32

import loops
import pytest
from fabric_scenarios import Recorder, gather, run_over_tcp
from frames_by_hand import BODY_BYTES, HEADER_BYTES, encode_header, make_checks
from hostile_peer import open_hostile

from meeting_stores import DictStore
from syncline.errors import HandshakeError, PeerLostError
from syncline.fabric import FabricOptions, Rendezvous, connect_tcp
from syncline.fabric._native import KeyedChecks, umac32
from syncline.fabric.frames import MEMORY_CLASS, FrameType
from syncline.fabric.handshake import FrameKeys, derive_frame_keys

SECRET = b"s" * 32
PAYLOADS = [b"first" * 30, b"second" * 30, b"third" * 30]


def with_correct_crcs(frame):
    """Return the frame with checksums that fit: what somebody who knows no key can do."""
    body, payload = frame[: BODY_BYTES - 4], frame[HEADER_BYTES:]
    body += struct.pack("<I", crc32(payload))
    return body + struct.pack("<I", crc32(body)) + payload


def flipped(frame, place):
    changed = bytearray(frame)
    changed[place] ^= 1
    return bytes(changed)


TAMPERINGS = {
    "a payload bit": lambda one, two, three: [one, flipped(two, -7), three],
    "a payload bit and the checksums": lambda one, two, three: [one, with_correct_crcs(flipped(two, -7)), three],
    "a header bit and the checksums": lambda one, two, three: [one, with_correct_crcs(flipped(two, 8)), three],
    "the header of another frame": lambda one, two, three: [one, two[:HEADER_BYTES] + one[HEADER_BYTES:] + b"x" * 30],
    "repeated": lambda one, two, three: [one, one, two, three],
    "left out": lambda one, two, three: [one, three],
    "swapped": lambda one, two, three: [one, three, two],
    "no key": lambda one, two, three: [one, with_correct_crcs(two), three],
}


def over_authenticated(scenario):
    """Run ``scenario(fabric, peer, recorder)``: rank 0, which authenticates frames, and a peer that a test drives."""

    async def main():
        fabric, peer = await open_hostile(secret=SECRET, authenticate_frames=True, shares_memory=False)
        recorder = Recorder()
        fabric.set_listener(recorder)
        try:
            async with asyncio.timeout(60):
                await scenario(fabric, peer, recorder)
        finally:
            fabric.abort()
            peer.close()

    loops.run(main())


@pytest.mark.parametrize("tampering", TAMPERINGS)
def test_what_is_tampered_with_ends_the_peer_before_it_is_heard(tampering):
    async def scenario(fabric, peer, recorder):
        frames = [b"".join(peer.make_frame(-1, FrameType.CONTROL, payload=payload)) for payload in PAYLOADS]
        await peer.send(-1, *TAMPERINGS[tampering](*frames))
        assert "the authentication code does not fit" in await peer.verdict()
        await recorder.wait_until(lambda: recorder.lost)
        assert recorder.controls == [(1, PAYLOADS[0])]

    over_authenticated(scenario)


@pytest.mark.parametrize("tampering", TAMPERINGS)
def test_data_that_is_tampered_with_never_arrives(tampering):
    async def scenario(fabric, peer, recorder):
        arrived = []
        buffers = [bytearray(len(payload)) for payload in PAYLOADS]
        for tag, buffer in enumerate(buffers):
            fabric.receive(
                1, tag, memoryview(buffer), signature=7, urgency=0, on_received=lambda tag=tag: arrived.append(tag)
            )
        frames = [
            b"".join(
                peer.make_frame(0, FrameType.EAGER, tag=tag, signature=7, message_bytes=len(payload), payload=payload)
            )
            for tag, payload in enumerate(PAYLOADS)
        ]
        await peer.send(0, *TAMPERINGS[tampering](*frames))
        assert "the authentication code does not fit" in await peer.verdict()
        await recorder.wait_until(lambda: recorder.lost)
        assert set(arrived) <= {0}
        assert buffers[0] == PAYLOADS[0]

    over_authenticated(scenario)


def test_frames_that_nobody_touched_are_taken():
    async def scenario(fabric, peer, recorder):
        for payload in PAYLOADS:
            await peer.frame(-1, FrameType.CONTROL, payload=payload)
        await recorder.wait_until(lambda: len(recorder.controls) == len(PAYLOADS))
        assert recorder.controls == [(1, payload) for payload in PAYLOADS]

    over_authenticated(scenario)


def test_a_frame_of_another_connection_or_of_the_other_direction_is_refused():
    async def scenario(fabric, peer, recorder):
        sending = peer.checks[0][0]  # the keys of class 0
        await peer.send(-1, encode_header(FrameType.CONTROL, -1, payload=b"x", checks=sending), b"x")
        assert "the authentication code does not fit" in await peer.verdict()

    over_authenticated(scenario)
    one, other = (derive_frame_keys(b"k" * 32, b"transcript", is_dialer=is_dialer) for is_dialer in (True, False))
    assert (one.sending, one.receiving) == (other.receiving, other.sending)
    assert one.sending != one.receiving
    assert derive_frame_keys(b"k" * 32, b"another", is_dialer=True).sending not in one
    assert derive_frame_keys(b"l" * 32, b"transcript", is_dialer=True).sending not in one


@pytest.mark.parametrize(
    ("addresses", "secret", "expected"),
    [
        (("127.0.0.1", "127.0.0.1"), SECRET, False),
        (("127.0.0.1", "127.0.0.2"), SECRET, True),
        (("127.0.0.1", "127.0.0.2"), None, False),
    ],
    ids=["one machine", "two machines", "no secret"],
)
def test_where_nobody_says_frames_are_authenticated_between_machines_with_a_secret(addresses, secret, expected):
    async def main():
        store = DictStore()
        fabrics = await gather(
            *(
                connect_tcp(
                    FabricOptions(address=address, secret=secret),
                    rank=rank,
                    world_size=len(addresses),
                    rendezvous=Rendezvous(store, job_id="syncline"),
                )
                for rank, address in enumerate(addresses)
            )
        )
        assert [fabric._options.authenticate_frames for fabric in fabrics] == [expected] * len(fabrics)
        await gather(*(fabric.close() for fabric in fabrics))

    loops.run(main())


@pytest.mark.parametrize("wants", [(False, True), (True, False), (True, True, False)])
def test_ranks_that_differ_are_told_on_both_sides(wants):
    async def main():
        store = DictStore()
        results = await gather(
            *(
                connect_tcp(
                    FabricOptions(secret=SECRET, authenticate_frames=is_wanted),
                    rank=rank,
                    world_size=len(wants),
                    rendezvous=Rendezvous(store, job_id="syncline"),
                )
                for rank, is_wanted in enumerate(wants)
            ),
            return_exceptions=True,
        )
        for error in results:
            assert isinstance(error, HandshakeError | PeerLostError)
            assert "authenticate_frames (SYNCLINE_AUTHENTICATE_FRAMES)" in str(error)

    loops.run(main())


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (b"", "113145FB"),
        (b"aaa", "3B91D102"),
        (b"a" * 2**10, "599B350B"),
        (b"a" * 2**15, "58DCF532"),
        (b"a" * 2**20, "DB6364D1"),
        (b"abc", "ABF3A3A0"),
        (b"abc" * 500, "ABEB3C8B"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} bytes",
)
def test_codes_are_those_of_rfc_4418(message, code):
    key, nonce = b"abcdefghijklmnop", int.from_bytes(b"bcdefghi", "big")
    assert f"{umac32(key, nonce, message):08X}" == code
    # in parts: the payload's code of a frame has twice its number as its nonce
    checks = KeyedChecks(key)
    for _ in range(3):
        checks.next_frame()
    for start in range(0, len(message), 700):
        checks.add(memoryview(message)[start : start + 700])
    assert checks.payload_field(b"") == umac32(key, 6, message)


def beat(number, *, key, payload=b""):
    """Return a heartbeat beside the stream, as the compiled transport's thread makes it."""
    _, checks = make_checks(FrameKeys(key, key))
    header = encode_header(FrameType.HEARTBEAT, -1, tag=5, signature=1, offset=number, checks=checks)
    body = header[: BODY_BYTES - 4] + bytes(4)
    return body + struct.pack("<I", checks.header_field(body)) + payload


@pytest.mark.parametrize("numbers", [(1, 2, 2), (7, 6), (1, 9, 1)])
def test_a_heartbeat_beside_the_stream_is_heard_once(numbers):
    async def scenario(fabric, peer, recorder):
        key = peer.keys[-1].sending
        for number in numbers[:-1]:
            await peer.send(-1, beat(number, key=key))
            await peer.frame(-1, FrameType.CONTROL, payload=b"go on")  # the stream's own numbers go on
        await recorder.wait_until(lambda: len(recorder.controls) == len(numbers) - 1)
        await peer.send(-1, beat(numbers[-1], key=key))
        assert "the authentication code does not fit" in await peer.verdict()

    over_authenticated(scenario)


def test_a_heartbeat_beside_the_stream_without_the_key_is_refused():
    async def scenario(fabric, peer, recorder):
        await peer.send(-1, beat(1, key=b"x" * 16))
        assert "the authentication code does not fit" in await peer.verdict()

    over_authenticated(scenario)


def test_ranks_of_one_machine_still_copy_from_memory_to_memory():
    async def scenario(fabrics, recorders, mail):
        payload = bytes(range(256)) * 8192
        for tag in range(3):
            received = mail.receive(1, 0, tag, len(payload))
            await gather(mail.send(0, 1, tag, payload), received)
            assert received.result() == payload
        classes = {entry.connection_class for entry in fabrics[1].statistics().connections}
        assert MEMORY_CLASS in classes

    run_over_tcp(2, scenario, shares_memory=True, secret=SECRET, authenticate_frames=True)
