"""The probe: one rank of each host sends to others at once, as rank 0 orders, and tells how much arrived.

A flow lasts as long as is ordered, and on a slow link until some messages have gone. They grow, so that a slow link has
many and a fast one is not held up by their number; the receiver answers each, and hardly a third of what has arrived
before is under way, so that hardly anything waits in queues when the time is over: nothing else can be measured before
that is gone. What counts is what landed after the first third of the time, when the connection has its pace.

Where a round trip takes milliseconds the kernels know it. Then what was answered in the last one, and half as much
again, is under way, in messages so small that nobody asks before they are sent; a flow lasts for NUM_ROUND_TRIPS more,
as TCP needs that many to come to its pace, and what lands late in that time counts.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, permutations

import numpy as np

from syncline.discovery.tree_search import Flow, Round
from syncline.fabric.sizing import FAR_S
from syncline.fabric.slice_executor import first_tag
from syncline.runtime.port import Port

ROUND_S = 5.0
"""After so long without an end a round has failed: whoever is slower than a few kilobytes a second is not measured."""
FIRST_BYTES, LAST_BYTES = 4 << 10, 1 << 20
NUM_OF_A_SIZE, NUM_OF_A_SIZE_FAR = 8, 32
"""So many messages have one size before the next is twice as large; of a slow and far flow few are large, as all that
are under way when its time is over are waited for."""
NUM_UNDER_WAY = 3
NUM_LEAST = 30
"""So many are sent even if it is late: of fewer, too much is what a link lets pass at once after a pause."""
LATE = 2.5
"""But not after so many times what was ordered."""
MOST_MESSAGES = 1 << 13
WARM_PART, FAR_WARM_PART = 0.3, 0.6
FAR_BYTES = 16 << 10
"""Of its largest message."""
NUM_ROUND_TRIPS, MOST_ROUND_TRIP_S = 8, 0.3
FAR_GROWTH = 1.5
"""So many times the messages that were answered in the last round trip are under way."""
NUM_POSTED_FAR = 32
"""Receives that are posted at once; what comes beyond them waits in the credit of its sender."""
URGENCY = 0
Ends = tuple[int, float]
"""The other host of a flow, and the seconds there and back."""


@dataclass(slots=True, kw_only=True)
class _Sending:
    peer: int
    end_s: float
    latest_s: float
    round_trip_s: float
    num_sent: int = 0
    num_landed: int = 0
    answered_s: deque[float] = field(default_factory=deque)
    """When messages were answered, of a flow that is far: those of the last round trip."""

    @property
    def num_under_way(self) -> float:
        """How many messages may be."""
        return NUM_UNDER_WAY + FAR_GROWTH * len(self.answered_s)

    def answer(self, now_s: float) -> None:
        """Take note of one that has landed."""
        self.num_landed += 1
        if self.round_trip_s >= FAR_S:
            self.answered_s.append(now_s)
            while self.answered_s[0] < now_s - self.round_trip_s:
                self.answered_s.popleft()


@dataclass(slots=True, kw_only=True)
class _Receiving:
    begin_s: float
    end_s: float
    latest_s: float
    round_trip_s: float
    expected: int | None = None
    posted: int = 0
    landed: list[tuple[float, int]] = field(default_factory=list)
    """When each message was here, and its bytes."""


class Prober:
    """One host's part in it, on the loop's thread alone; on rank 0 also the one that orders.

    ``known_s(one, other)`` is the round trip between two hosts of which no kernel knows, as they have no connection.
    """

    def __init__(
        self, port: Port, ranks: Sequence[int], *, stream: int, known_s: Callable[[int, int], float] = lambda *_: 0.0
    ) -> None:
        self._port = port
        self._ranks = tuple(ranks)
        self._stream = stream
        self._lump = memoryview(bytearray(LAST_BYTES))
        self._sending: dict[tuple[int, int], _Sending] = {}
        self._receiving: dict[tuple[int, int], _Receiving] = {}
        self._round = 0
        self._rates: dict[Flow, float] = {}
        self._told_trips: dict[int, list[float]] = {}
        """By host, the round trips to all hosts, in seconds, as it told them."""
        self._trips: dict[Flow, float] = {}
        self._known_s = known_s
        self._news = asyncio.Event()

    async def open(self) -> None:
        """Begin to heed orders; what came before is heard now."""
        self._port.watch_controls(self._stream, self._on_control)

    async def round_trips(self) -> dict[Flow, float]:
        """Return the seconds from each host to each other and back, as far as kernels know; ask them once."""
        if not self._trips:
            told = self._told_trips
            for place in range(len(self._ranks)):
                self._tell(place, {"trips": True})
            await self._until(lambda: len(told) == len(self._ranks))
            self._trips = {
                (one, other): min(filter(None, (told[one][other], told[other][one])), default=self._known_s(one, other))
                for one, other in permutations(told, 2)
            }
        return self._trips

    async def measure(self, flows: Sequence[Flow], flow_s: float) -> Round:
        """Let hosts send to others all at once for so long; :class:`TimeoutError` where some flow does not end."""
        trips = await self.round_trips()
        self._round += 1
        self._rates = {}
        trip_s = max((trips[flow] for flow in flows if trips[flow] >= FAR_S), default=0.0)
        pace_s = NUM_ROUND_TRIPS * min(trip_s, MOST_ROUND_TRIP_S)
        times = {"s": flow_s + pace_s, "late": LATE * flow_s + 2 * pace_s}
        for place in sorted({place for flow in flows for place in flow}):
            to = [[target, trips[source, target]] for source, target in flows if source == place]
            from_ = [[source, trips[source, target]] for source, target in flows if target == place]
            self._tell(place, {"round": self._round, "to": to, "from": from_, **times})
        await self._until(lambda: len(self._rates) == len(flows), more_s=2 * pace_s)
        return Round(tuple(flows), tuple(self._rates[flow] for flow in flows))

    async def _until(self, is_whole: Callable[[], bool], more_s: float = 0.0) -> None:
        async with asyncio.timeout(ROUND_S + more_s):
            while not is_whole():
                self._news.clear()
                await self._news.wait()

    def _tell(self, place: int, told: dict[str, object]) -> None:
        if (rank := self._ranks[place]) == self._port.rank:
            self._heed(place, told)
        else:
            self._port.tell(rank, json.dumps(told).encode())

    def _on_control(self, peer: int, payload: bytes) -> None:
        self._heed(self._ranks.index(peer), json.loads(payload))

    def _heed(self, place: int, told: dict[str, object]) -> None:
        match told:
            case {"round": int(number), "to": list(to), "from": list(from_), "s": float(flow_s), "late": float(late_s)}:
                self._begin(number, to, from_, flow_s, late_s)
            case {"landed": int(number)}:
                if (number, place) in self._sending:
                    self._sending[number, place].answer(self._now_s())
                    self._send(number, place)
            case {"trips": True}:
                trips = self._port.round_trips()
                self._tell(0, {"trips": [trips.get(rank, 0.0) for rank in self._ranks]})
            case {"trips": list(trips)}:
                self._told_trips[place] = trips
                self._news.set()
            case {"sent": int(count), "in": int(number)}:
                self._receiving[number, place].expected = count
                self._post(number, place)
                self._look(number, place)
            case {"rate": float(rate), "in": int(number), "from": int(source)}:
                if number == self._round:
                    self._rates[source, place] = rate
                    self._news.set()

    def _begin(
        self, number: int, targets: Sequence[Ends], sources: Sequence[Ends], flow_s: float, late_s: float
    ) -> None:
        begin_s = self._now_s()
        for source, trip_s in sources:
            self._receiving[number, source] = _Receiving(
                begin_s=begin_s, end_s=begin_s + flow_s, latest_s=begin_s + late_s, round_trip_s=trip_s
            )
            self._post(number, source)
        for target, trip_s in targets:
            self._sending[number, target] = _Sending(
                peer=self._ranks[target], end_s=begin_s + flow_s, latest_s=begin_s + late_s, round_trip_s=trip_s
            )
            self._send(number, target)

    def _send(self, number: int, target: int) -> None:
        """Send as much as may be under way; say how many messages it were when the time is over."""
        flow = self._sending[number, target]
        while flow.num_sent - flow.num_landed < flow.num_under_way:
            end_s = flow.latest_s if flow.num_sent < NUM_LEAST else flow.end_s
            if self._now_s() >= end_s or flow.num_sent == MOST_MESSAGES:
                del self._sending[number, target]
                self._tell(target, {"sent": flow.num_sent, "in": number})
                return
            payload = self._lump[: _size(flow.num_sent, flow.round_trip_s)]
            self._port.send(flow.peer, self._tag(number, flow.num_sent), payload, urgency=URGENCY)
            flow.num_sent += 1

    def _post(self, number: int, source: int) -> None:
        """Be ready for the messages that may be under way."""
        flow = self._receiving[number, source]
        most = NUM_UNDER_WAY if flow.round_trip_s < FAR_S else NUM_POSTED_FAR
        while flow.posted - len(flow.landed) < most and (flow.expected is None or flow.posted < flow.expected):
            destination = self._lump[: _size(flow.posted, flow.round_trip_s)]  # nobody reads it
            tag = self._tag(number, flow.posted)
            flow.posted += 1
            self._port.receive(
                self._ranks[source],
                tag,
                destination,
                urgency=URGENCY,
                on_received=lambda: self._on_landed(number, source),
            )

    def _on_landed(self, number: int, source: int) -> None:
        flow = self._receiving[number, source]
        flow.landed.append((self._now_s(), _size(len(flow.landed), flow.round_trip_s)))
        self._tell(source, {"landed": number})
        self._post(number, source)
        self._look(number, source)

    def _look(self, number: int, source: int) -> None:
        """Tell rank 0 the rate, once all is here that was sent."""
        flow = self._receiving[number, source]
        if flow.expected is None or len(flow.landed) < flow.expected:
            return
        for message in range(flow.expected, flow.posted):
            self._port.cancel(self._ranks[source], self._tag(number, message))
        del self._receiving[number, source]
        self._tell(0, {"rate": _rate(flow), "in": number, "from": source})

    def _tag(self, number: int, message: int) -> int:
        return first_tag(self._stream, number, 0) + message

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


def _size(message: int, round_trip_s: float) -> int:
    """Return how long the message of that number is."""
    is_far = round_trip_s >= FAR_S
    times = message // (NUM_OF_A_SIZE_FAR if is_far else NUM_OF_A_SIZE)
    return min(FIRST_BYTES << times, FAR_BYTES if is_far else LAST_BYTES)


def _rate(flow: _Receiving) -> float:
    """Return bytes per second in the part of the time that counts, or of all where it was over by then.

    Between two messages bytes are taken to have come evenly: this thread may have been told late of either.
    """
    times_s = [flow.begin_s, *(landed_s for landed_s, _ in flow.landed)]
    sums = [0, *accumulate(size for _, size in flow.landed)]
    is_far = flow.round_trip_s >= FAR_S
    # Flows that share a link count until the same time: what lands later had the link of those that have ended.
    least_s = flow.end_s if is_far else min(max(flow.end_s, *times_s[: NUM_LEAST + 1]), flow.latest_s)
    end_s = min(least_s, times_s[-1])
    warm_part = FAR_WARM_PART if is_far else WARM_PART
    begin_s = flow.begin_s + warm_part * (end_s - flow.begin_s)
    first, last = np.interp((begin_s, end_s), times_s, sums)
    return float(last - first) / max(end_s - begin_s, 1e-6)
