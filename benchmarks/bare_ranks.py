"""Many ranks without PyTorch on one machine: how they start, what each holds, and who hears of one that is killed.

    python benchmarks/bare_ranks.py 16 64 128

For each number of ranks: seconds until all are connected and have summed 4 KiB once; what one uses of a processor until
then; the descriptors and the memory (MiB, resident, of which 38 are Python, numpy and this library) of who has most;
seconds of one more sum; and, as one rank is killed while all others sum, seconds until the median and the last of them
have an error, and how many of these errors name the rank.

    python benchmarks/bare_ranks.py --idle 8 32 64

Ranks close connections that are idle for so many seconds (60 by themselves). Told are the descriptors of who has most,
and seconds: at the start, after a sum of 16 MiB for which all pairs connect, after one more, after three times that
many seconds, and after a sum that opens them again.

    python benchmarks/bare_ranks.py --together 128 512

The ranks' ends of the fabric are all in this process, on one loop, as so many processes do not start on a few cores:
seconds until all are connected; the descriptors and MiB of each, on average, beside what Python and numpy take once in
each process; seconds until all have heard what one tells; and until all know of one that is gone without a word.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import signal
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np

from syncline.errors import SynclineError
from syncline.fabric import FabricOptions, connect_tcp, new_event_loop
from syncline.fabric.rendezvous import AnyRendezvous, Generation, Member
from syncline.runtime import Communicator
from syncline.runtime.reduction import numpy_reduction
from syncline.topology import Topology

CONNECT_S = 300.0
NUM_ELEMENTS = 1024
MANY_ELEMENTS = 4 << 20


class Table:
    """What the ranks tell each other before they are connected, in the parent; a thread serves each of them."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def serve(self, pipe: Connection) -> None:
        """Answer one rank until it ends."""
        while True:
            try:
                key, value, timeout_s = pipe.recv()
            except (EOFError, OSError):
                return
            with self._changed:
                if value is None:
                    self._changed.wait_for(partial(self._values.__contains__, key), timeout_s)
                else:
                    self._values[key] = value
                    self._changed.notify_all()
                pipe.send(self._values.get(key))


class PipeStore:
    """A rank's end of the table: a store."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._is_free = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        """Let the others read it."""
        self._ask(key, value, 0.0)

    def get(self, key: str) -> bytes | None:
        """Return what some rank has set."""
        return self._ask(key, None, 0.0)

    def _ask(self, *question: Any) -> bytes | None:
        with self._is_free:
            self._pipe.send(question)
            answer: bytes | None = self._pipe.recv()
            return answer


def be_rank(
    rank: int, num_ranks: int, dead_s: float, idle_s: float | None, store: Connection, pipe: Connection
) -> None:
    """Start, sum, tell the parent, and sum so many numbers each time that it says so; die if it says so."""
    idle: dict[str, Any] = {} if idle_s is None else {"idle_s": idle_s}
    options = FabricOptions(address="127.0.0.1", connect_s=CONNECT_S, dead_s=dead_s, **idle)
    settings: dict[str, Any] = {"store": PipeStore(store), "options": options, "topology": Topology.flat(num_ranks)}
    numbers: Any = np.ones(NUM_ELEMENTS if idle_s is None else MANY_ELEMENTS, np.float32)
    buffer, kind = memoryview(numbers).cast("B"), numpy_reduction("float32")
    num_inherited, began_s = _num_descriptors(), time.monotonic()
    try:
        communicator = Communicator.connect(rank=rank, world_size=num_ranks, **settings)
    except SynclineError as error:
        pipe.send((time.monotonic(), str(error)))
        return
    with communicator:  # who leaves it lets others read why first
        try:
            communicator.all_reduce(buffer[: 4 * NUM_ELEMENTS], kind).wait()
            used = (time.process_time(), _num_descriptors() - num_inherited, _memory_mib())
            pipe.send((time.monotonic() - began_s, *used))
            while (asked := pipe.recv()) != "die":
                began_s = time.monotonic()
                if asked:
                    communicator.all_reduce(buffer[: 4 * asked], kind).wait()
                pipe.send((time.monotonic() - began_s, _num_descriptors() - num_inherited))
        except SynclineError as error:
            pipe.send((time.monotonic(), str(error)))
            return
        os.kill(os.getpid(), signal.SIGKILL)


def _memory_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def measure(num_ranks: int, dead_s: float, idle_s: float | None) -> str:
    """Return a row of the table."""
    table, context = Table(), get_context("fork")
    stores, pipes = ([context.Pipe() for _ in range(num_ranks)] for _ in range(2))
    ranks = [
        context.Process(target=be_rank, args=(rank, num_ranks, dead_s, idle_s, stores[rank][1], pipes[rank][1]))
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    for store, _ in stores:
        threading.Thread(target=table.serve, args=(store,), daemon=True).start()
    ends = [pipe for pipe, _ in pipes]
    started = [end.recv() for end in ends]
    failed = sorted(each for each in started if isinstance(each[1], str))  # by when
    if failed:
        row = f"| {num_ranks} | {len(failed)} failed: {failed[0][1]} |"
    else:
        row = f"| {num_ranks} | {_lose_one(ends, started) if idle_s is None else _let_rest(ends, started, idle_s)} |"
    for rank in ranks:
        rank.kill()
        rank.join()
    return row


class MeetingInProcess:
    """Where ranks meet that are all here: a rendezvous."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._members: dict[int, Member] = {}
        self._are_here = asyncio.Event()

    async def meet(self, member: Member, **_: object) -> Generation:
        """Wait for all."""
        self._members[member.rank] = member
        if len(self._members) == self._num_ranks:
            self._are_here.set()
        await self._are_here.wait()
        members = tuple(self._members[rank] for rank in range(self._num_ranks))
        return Generation(epoch=1, job_nonce=bytes(32), members=members)

    async def watch(self) -> None:
        """Hear of nobody who ends."""
        await asyncio.Event().wait()

    async def rest(self) -> None:
        """Look for nobody any more."""

    async def give_up(self, reason: str) -> None:
        """Tell nobody: all would be seen here."""


class Ear:
    """Counts what a fabric tells; ``heard`` is set when all have heard so much."""

    def __init__(self) -> None:
        self.num_awaited = 0
        self.heard = asyncio.Event()

    def on_peer_lost(self, *_: object) -> None:
        """Hear of a loss."""
        self.num_awaited -= 1
        if self.num_awaited == 0:
            self.heard.set()

    on_control = on_peer_lost

    def on_stall(self) -> None:
        """Hear that some rank has hung."""

    async def seconds(self, num_awaited: int, act: Callable[[], object]) -> float:
        """Return how long it takes until so many have heard what ``act`` brings about."""
        self.num_awaited, self.heard = num_awaited, asyncio.Event()
        began_s = time.monotonic()
        act()
        await self.heard.wait()
        return time.monotonic() - began_s


async def measure_together(num_ranks: int) -> str:
    """Return a row of the table of ranks in one process."""
    times: dict[str, Any] = {
        "connect_s": 3600.0,
        "handshake_s": 600.0,
        "heartbeat_s": 300.0,
        "suspect_s": 900.0,
        "dead_s": 1800.0,
    }
    options = FabricOptions(address="127.0.0.1", held_s=1800.0, shares_memory=False, binds_thread=False, **times)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    before, meeting, began_s = (_num_descriptors(), _memory_mib()), MeetingInProcess(num_ranks), time.monotonic()
    fabrics = await asyncio.gather(
        *(
            connect_tcp(options, rank=rank, world_size=num_ranks, rendezvous=cast("AnyRendezvous", meeting))
            for rank in range(num_ranks)
        )
    )
    took_s = time.monotonic() - began_s
    each = [(now - then) / num_ranks for now, then in zip((_num_descriptors(), _memory_mib()), before, strict=True)]
    ear = Ear()
    for fabric in fabrics:
        fabric.set_listener(ear)
    others, lost = range(1, num_ranks), fabrics[num_ranks // 2]
    told_s = await ear.seconds(num_ranks - 1, lambda: fabrics[0].tell(others, b"hello"))
    lost.living = list  # type: ignore[method-assign]  # it tells nobody
    known_s = await ear.seconds(num_ranks - 1, lost.abort)
    for fabric in fabrics:
        fabric.abort()
    return f"| {num_ranks} | {took_s:.1f} | {each[0]:.0f} | {each[1]:.1f} | {told_s:.2f} | {known_s:.2f} |"


def _all(ends: list[Connection], num_elements: int) -> tuple[float, int]:
    """Let all sum so many numbers; return the most seconds, and the most descriptors."""
    for end in ends:
        end.send(num_elements)
    seconds, descriptors = zip(*(end.recv() for end in ends), strict=True)
    return max(seconds), max(descriptors)


def _let_rest(ends: list[Connection], started: list[tuple[float, float, int, float]], idle_s: float) -> str:
    first, again = (_all(ends, MANY_ELEMENTS) for _ in range(2))
    time.sleep(3 * idle_s)
    _, num_left = _all(ends, 0)
    woken = _all(ends, MANY_ELEMENTS)
    at_start = max(descriptors for _, _, descriptors, _ in started)
    return f"{at_start} | {first[0]:.2f} | {first[1]} | {again[0]:.2f} | {num_left} | {woken[0]:.2f} | {woken[1]}"


def _lose_one(ends: list[Connection], started: list[tuple[float, float, int, float]]) -> str:
    seconds, used_s, descriptors, memory_mib = zip(*started, strict=True)
    again_s, _ = _all(ends, NUM_ELEMENTS)
    lost = len(ends) // 2
    others = [end for rank, end in enumerate(ends) if rank != lost]
    for end in others:
        end.send(NUM_ELEMENTS)
    died_s = time.monotonic()
    ends[lost].send("die")
    told = [end.recv() for end in others]
    heard_s = sorted(at_s - died_s for at_s, _ in told)
    num_right = sum(f"rank {lost} " in text for _, text in told)
    return (
        f"{max(seconds):.1f} | {statistics.median(used_s):.2f} | {max(descriptors)} | {max(memory_mib):.0f} | "
        f"{again_s:.3f} | {statistics.median(heard_s):.2f} | {heard_s[-1]:.2f} | {num_right} of {len(told)}"
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, nargs="+")
    parser.add_argument("--silence", type=float, default=10.0, help="seconds after which a silent rank is lost")
    parser.add_argument("--idle", type=float, help="seconds after which idle connections are closed")
    parser.add_argument("--together", action="store_true", help="all ranks in this process")
    options = parser.parse_args()
    columns: tuple[str, ...] = (
        "ranks",
        "start",
        "processor",
        "descriptors",
        "MiB",
        "again",
        "half know",
        "all know",
        "name it",
    )
    if options.idle is not None:
        columns = ("ranks", "at the start", "first", "descriptors", "again", "after the rest", "woken", "descriptors")
    if options.together:
        columns = ("ranks", "start", "descriptors of each", "MiB of each", "all hear", "all know")
    print(f"| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|")
    for num_ranks in options.ranks:
        if options.together:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                print(runner.run(measure_together(num_ranks)), flush=True)
            continue
        print(measure(num_ranks, options.silence, options.idle), flush=True)


if __name__ == "__main__":
    main()
