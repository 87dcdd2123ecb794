"""A rank in a process of its own, for tests that need to kill, stop or measure one; run as a script.

It connects through a directory as the store, then obeys the first argument: see ``MAIN``.
"""

import asyncio
import json
import os
import signal
import sys

import loops

from meeting_stores import DirectoryStore
from syncline.fabric import FabricOptions, Rendezvous, connect_tcp

MORE_MESSAGES = 10


class Reporter:
    """Prints what the fabric tells, a JSON object on each line."""

    def __init__(self):
        self.changed = asyncio.Event()

    def on_peer_lost(self, peer, error):
        say(event="lost", peer=peer, kind=type(error).__name__, text=str(error))
        self.changed.set()

    def on_control(self, peer, payload):
        say(event="control", peer=peer, text=payload.decode())

    def on_stall(self):
        say(event="stall")


class Progress:
    """Counts messages; asked for it, says when ``MORE_MESSAGES`` more have come."""

    def __init__(self):
        self._num_received = 0
        self._goal = None

    def ask(self):
        self._goal = self._num_received + MORE_MESSAGES

    def note(self):
        self._num_received += 1
        if self._num_received == self._goal:
            say(event="progress")


class Tracer:
    """Prints what the fabric traces."""

    def instant(self, name, category, **args):
        say(event="trace", name=name, **args)


def say(**record):
    print(json.dumps(record), flush=True)


async def native_transport(fabric, *, num_bytes, num_messages, num_inflight, progress=None):
    """Send messages to the next rank and receive them from the one before, some at a time, until all are there."""
    progress = progress or Progress()
    after, before = (fabric.rank + 1) % fabric.world_size, (fabric.rank - 1) % fabric.world_size
    payload = memoryview(bytearray(num_bytes))
    left = 2 * num_messages
    done = asyncio.get_running_loop().create_future()
    buffers = [memoryview(bytearray(num_bytes)) for _ in range(num_inflight)]
    next_send = next_receive = 0

    def finish():
        nonlocal left
        left -= 1
        if not left:
            done.set_result(None)

    def send_more():
        nonlocal next_send
        if next_send < num_messages:
            tag, next_send = next_send, next_send + 1
            fabric.send(
                after,
                tag,
                payload,
                signature=1,
                urgency=0,
                connection_class=0,
                on_sent=lambda: (send_more(), finish()),
            )

    def receive_more(place):
        nonlocal next_receive
        if next_receive < num_messages:
            tag, next_receive = next_receive, next_receive + 1
            fabric.receive(
                before,
                tag,
                buffers[place],
                signature=1,
                urgency=0,
                on_received=lambda: (progress.note(), receive_more(place), finish()),
            )

    for place in range(num_inflight):
        receive_more(place)
        send_more()
    await done


async def measure(fabric, arguments):
    """Print the rate at which messages go round."""
    loop = asyncio.get_running_loop()
    await native_transport(fabric, num_bytes=arguments["num_bytes"], num_messages=16, num_inflight=4)
    start_s = loop.time()
    await native_transport(fabric, **arguments)
    rate = arguments["num_bytes"] * arguments["num_messages"] / (loop.time() - start_s)
    say(event="rate", bytes_per_s=rate)
    await fabric.close()


async def traffic(fabric, arguments):
    """Send and receive until a peer is lost, then wait for the order to end."""
    reporter = Reporter()
    fabric.set_listener(reporter)
    progress = Progress()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, progress.ask)
    say(event="ready", pid=os.getpid())
    task = asyncio.create_task(native_transport(fabric, progress=progress, **arguments))
    while len(fabric.statistics().lost_peers) < fabric.world_size - 1:
        reporter.changed.clear()
        await reporter.changed.wait()
    task.cancel()
    say(event="alone")
    fabric.abort()


MAIN = {"measure": measure, "traffic": traffic}


async def main(what, rank, world_size, store, options, arguments):
    fabric = await connect_tcp(
        FabricOptions(**options),
        rank=rank,
        world_size=world_size,
        rendezvous=Rendezvous(DirectoryStore(store), job_id="test"),
        trace=Tracer(),
    )
    await MAIN[what](fabric, arguments)


if __name__ == "__main__":
    loops.run(
        main(
            sys.argv[1],
            int(sys.argv[2]),
            int(sys.argv[3]),
            sys.argv[4],
            json.loads(sys.argv[5]),
            json.loads(sys.argv[6]),
        )
    )
