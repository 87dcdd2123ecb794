"""A receiver that cancels while granted bytes are leaving still gets what it granted, and the sender ends once."""

import asyncio

import loops
import pytest
from fabric_scenarios import Recorder, socket_buffers
from hostile_peer import open_hostile

from syncline.fabric.frames import CONTROL_CLASS, FrameType

pytestmark = pytest.mark.usefixtures("on_each_loop")

GRANTED_BYTES = (200_000, 400_000)
"""A chunk each; the buffers of the sockets hold a small part of one."""


def test_what_was_granted_while_a_chunk_left_is_sent_after_a_discard():
    payload = bytes(place % 251 for place in range(600_000))
    sent = []

    async def main():
        with socket_buffers(4096):
            fabric, peer = await open_hostile(chunk_bytes=200_000)
        recorder = Recorder()
        fabric.set_listener(recorder)
        try:
            fabric.send(
                1,
                5,
                memoryview(payload),
                signature=7,
                urgency=0,
                connection_class=0,
                on_sent=lambda: sent.append(len(received)),
            )
            received = bytearray()
            request, _ = await peer.read_until(FrameType.REQUEST)
            assert request.message_bytes == len(payload)
            for number, limit in enumerate(GRANTED_BYTES):
                await peer.frame(CONTROL_CLASS, FrameType.GRANT, tag=5, message_bytes=limit)
                await peer.frame(CONTROL_CLASS, FrameType.CONTROL, payload=b"granted")
                await recorder.wait_until(lambda told=number + 1: len(recorder.controls) == told)
            await peer.frame(CONTROL_CLASS, FrameType.DISCARD, tag=5)
            await peer.frame(CONTROL_CLASS, FrameType.CONTROL, payload=b"discarded")
            await recorder.wait_until(lambda: len(recorder.controls) == 3)
            assert not sent, "what was granted is still leaving"
            while len(received) < GRANTED_BYTES[-1]:
                async with asyncio.timeout(60):
                    frame, chunk = await peer.read_frame(0)
                assert (frame.type, frame.tag, frame.offset) == (FrameType.DATA, 5, len(received))
                received += chunk
            assert received == payload[: GRANTED_BYTES[-1]]
            await peer.frame(CONTROL_CLASS, FrameType.CONTROL, payload=b"over")
            await recorder.wait_until(lambda: sent and len(recorder.controls) == 4)
            assert len(sent) == 1
            assert not recorder.lost
        finally:
            fabric.abort()
            peer.close()

    loops.run(main())
