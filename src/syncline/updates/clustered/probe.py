"""The probe: each host's first rank measures the network to the others, for features that no topology tells.

    echoes    to every other host at once, first and after each try of a rate; the fastest of all counts, since a busy
              machine answers late now and then, but hardly each time
    rates     to a few others in turn (`rotation`): messages of 64 KiB, 128 KiB, ... up to 2 MiB, one after the other,
              until one takes long enough to be timed, twice: what held one up will hardly hold up the next as well;
              all hosts send and receive at the same time, as in training

Each part has a deadline; whoever does not answer by then is left out. A host sends at most 8 MiB to each that it tries,
so on a fast network all of it takes some 0.1 s, and on any one at most 9 deadlines of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from syncline.machines.network import NetworkMeasurement, rate_of, rotation
from syncline.runtime.port import Port
from syncline.runtime.tags import first_tag
from syncline.topology import Topology
from syncline.updates.control import ControlStream

NUM_ECHOES = 3
FIRST_BYTES, LAST_BYTES = 64 << 10, 2 << 20
NUM_SIZES = (LAST_BYTES // FIRST_BYTES).bit_length()
NUM_TIMES = 2
LONG_ENOUGH_S = 0.02
PART_S = 1.0
LOOP_S = 5.0
ECHO, ANSWER, BULK, RECEIPT = range(3, 7)
"""Lanes of a stream, beside those of the protocol's messages."""
URGENCY = 0


def probe_network(
    control: ControlStream, port: Port, topology: Topology, *, stream: int, echoes: bool = True, rates: bool = True
) -> list[NetworkMeasurement]:
    """Return what each host measured, in the topology's order, the same on every rank; every rank calls it."""
    firsts = [host.ranks[0].rank for host in topology.hosts]
    steps = rotation(len(firsts)) if rates else ()
    probe = Probe(port, firsts, stream=stream) if port.rank in firsts else None
    if probe is not None:
        port.run(probe.open(steps), LOOP_S)
    control.all_gather(None, "readiness for a look at the network")
    for number, step in enumerate((None, *steps)):
        if probe is not None and step is not None:
            port.run(probe.send(number, step), PART_S + LOOP_S)
        control.all_gather(None, "end of a transfer")
        if probe is not None and (echoes or step is None):
            port.run(probe.echo(number), PART_S + LOOP_S)
        control.all_gather(None, "end of echoes")
    gathered = control.all_gather(None if probe is None else probe.measurement.as_pairs(), "the network as measured")
    port.call_soon(port.close)
    return [NetworkMeasurement.of_pairs(gathered[first]) for first in firsts]


@dataclass(slots=True)
class _Found:
    echoes_s: dict[int, float] = field(default_factory=dict)
    timed: dict[int, dict[int, float]] = field(default_factory=dict)
    """For each of those that were tried, the least seconds until a message of so many bytes was receipted."""


class Probe:
    """One host's part in it. On the loop's thread alone, and it reads time only from the loop."""

    def __init__(self, port: Port, firsts: Sequence[int], *, stream: int) -> None:
        self._port = port
        self._firsts = tuple(firsts)
        self._place = self._firsts.index(port.rank)
        self._stream = stream
        self._found = _Found()
        self._lump = memoryview(bytearray(LAST_BYTES))

    @property
    def measurement(self) -> NetworkMeasurement:
        """What was measured up to now; the fastest of all echoes counts, also of those after a rate was tried."""
        echoes_s = dict(self._found.echoes_s)
        rates = {
            place: rate_of(sorted(timed.items()), echo_s=echoes_s.get(place, 0.0)) if timed else FIRST_BYTES / PART_S
            for place, timed in self._found.timed.items()
        }
        return NetworkMeasurement(echoes_s=echoes_s, rates=rates)

    async def open(self, steps: Sequence[int]) -> None:
        """Begin to answer the others; try k, from 1, is ``steps[k - 1]`` places on."""
        for place, peer in enumerate(self._firsts):
            if place != self._place:
                for number in range(NUM_ECHOES * (1 + len(steps))):
                    self._answer(peer, number)
        for number, step in enumerate(steps, 1):
            self._acknowledge(self._firsts[self._place - step], number, size=0, again=0)

    async def echo(self, number: int) -> None:
        """Measure how long echoes take to each of the others, after try ``number``."""
        places = [(self._place + step) % len(self._firsts) for step in range(1, len(self._firsts))]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PART_S):
                await asyncio.gather(*(self._echo(place, number) for place in places))

    async def send(self, number: int, step: int) -> None:
        """Measure the rate to the host ``step`` places on."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PART_S):
                await self._send((self._place + step) % len(self._firsts), number)

    async def _echo(self, place: int, after_try: int) -> None:
        peer = self._firsts[place]
        for number in range(after_try * NUM_ECHOES, (after_try + 1) * NUM_ECHOES):
            start_s = self._now_s()
            answered = self._expect(peer, self._tag(ANSWER, number))
            self._port.send(peer, self._tag(ECHO, number), memoryview(bytearray(1)), urgency=URGENCY)
            await answered
            taken_s = self._now_s() - start_s
            self._found.echoes_s[place] = min(taken_s, self._found.echoes_s.get(place, taken_s))

    async def _send(self, place: int, number: int) -> None:
        """Send longer and longer messages until one takes much longer than an echo, twice."""
        long_s = max(LONG_ENOUGH_S, 4 * self._found.echoes_s.get(place, 0.0))
        timed = self._found.timed[place] = {}  # empty if not even the first is there in time
        for size in range(NUM_SIZES):
            num_bytes = FIRST_BYTES << size
            for again in range(NUM_TIMES):
                taken_s = await self._time(place, number, size, again)
                timed[num_bytes] = min(taken_s, timed.get(num_bytes, taken_s))
                if taken_s <= long_s:
                    break
            else:
                return

    async def _time(self, place: int, number: int, size: int, again: int) -> float:
        peer, message = self._firsts[place], NUM_TIMES * size + again
        start_s = self._now_s()
        arrived = self._expect(peer, self._tag(RECEIPT, number, message))
        self._port.send(peer, self._tag(BULK, number, message), self._lump[: FIRST_BYTES << size], urgency=URGENCY)
        await arrived
        return self._now_s() - start_s

    def _answer(self, peer: int, number: int) -> None:
        answer = memoryview(bytearray(1))
        send = partial(self._port.send, peer, self._tag(ANSWER, number), answer, urgency=URGENCY)
        self._receive(peer, self._tag(ECHO, number), memoryview(bytearray(1)), send)

    def _acknowledge(self, peer: int, number: int, *, size: int, again: int) -> None:
        """Answer each message of a try with a receipt, and be ready for the next ones: as large, and larger."""
        message = NUM_TIMES * size + again

        def received() -> None:
            if again + 1 < NUM_TIMES:
                self._acknowledge(peer, number, size=size, again=again + 1)
            if again == 0 and size + 1 < NUM_SIZES:
                self._acknowledge(peer, number, size=size + 1, again=0)
            receipt = memoryview(bytearray(1))
            self._port.send(peer, self._tag(RECEIPT, number, message), receipt, urgency=URGENCY)

        self._receive(peer, self._tag(BULK, number, message), memoryview(bytearray(FIRST_BYTES << size)), received)

    def _receive(self, peer: int, tag: int, destination: memoryview, received: Callable[[], None]) -> None:
        self._port.receive(peer, tag, destination, urgency=URGENCY, on_received=received)

    def _expect(self, peer: int, tag: int) -> asyncio.Future[None]:
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def received() -> None:
            if not arrived.done():
                arrived.set_result(None)

        self._receive(peer, tag, memoryview(bytearray(1)), received)
        return arrived

    def _tag(self, lane: int, number: int, message: int = 0) -> int:
        return first_tag(self._stream, number, lane) + message

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
