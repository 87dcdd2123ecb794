"""The probe: one rank of each host sends to others at once, as rank 0 orders, and tells how much arrived.

A flow lasts as long as is ordered, and on a slow link until some messages have gone. They grow, so that a slow link has
many and a fast one is not held up by their number; the receiver answers each, and hardly a third of what has arrived
before is under way, so that hardly anything waits in queues when the time is over: nothing else can be measured before
that is gone. What counts is what landed after the first third of the time, when the connection has its pace.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from syncline.discovery.tree_search import Flow, Round
from syncline.fabric.slice_executor import first_tag
from syncline.runtime.port import Port

ROUND_S = 5.0
"""After so long without an end a round has failed: whoever is slower than a few kilobytes a second is not measured."""
FIRST_BYTES, LAST_BYTES = 4 << 10, 1 << 20
NUM_OF_A_SIZE = 8
"""So many messages have one size before the next is twice as large."""
NUM_UNDER_WAY = 3
NUM_LEAST = 30
"""So many are sent even if it is late: of fewer, too much is what a link lets pass at once after a pause."""
LATE = 4.0
"""But not after so many times what was ordered."""
MOST_MESSAGES = 1 << 13
WARM_PART = 0.3
URGENCY = 0


@dataclass(slots=True, kw_only=True)
class _Sending:
    peer: int
    end_s: float
    latest_s: float
    num_sent: int = 0
    num_landed: int = 0


@dataclass(slots=True, kw_only=True)
class _Receiving:
    begin_s: float
    end_s: float
    expected: int | None = None
    posted: int = 0
    landed: list[tuple[float, int]] = field(default_factory=list)
    """When each message was here, and its bytes."""


class Prober:
    """One host's part in it, on the loop's thread alone; on rank 0 also the one that orders."""

    def __init__(self, port: Port, ranks: Sequence[int], *, stream: int) -> None:
        self._port = port
        self._ranks = tuple(ranks)
        self._stream = stream
        self._lump = memoryview(bytearray(LAST_BYTES))
        self._sending: dict[tuple[int, int], _Sending] = {}
        self._receiving: dict[tuple[int, int], _Receiving] = {}
        self._round = 0
        self._rates: dict[Flow, float] = {}
        self._is_over: asyncio.Future[None] | None = None

    async def open(self) -> None:
        """Begin to heed orders; what came before is heard now."""
        self._port.watch_controls(self._stream, self._on_control)

    async def measure(self, flows: Sequence[Flow], flow_s: float) -> Round:
        """Let hosts send to others all at once for so long; :class:`TimeoutError` where some flow does not end."""
        self._round += 1
        self._rates = {}
        self._is_over = asyncio.get_running_loop().create_future()
        for place in sorted({place for flow in flows for place in flow}):
            to = [target for source, target in flows if source == place]
            from_ = [source for source, target in flows if target == place]
            self._tell(place, {"round": self._round, "to": to, "from": from_, "s": flow_s})
        async with asyncio.timeout(ROUND_S):
            while len(self._rates) < len(flows):
                await self._is_over
                self._is_over = asyncio.get_running_loop().create_future()
        return Round(tuple(flows), tuple(self._rates[flow] for flow in flows))

    def _tell(self, place: int, told: dict[str, object]) -> None:
        if (rank := self._ranks[place]) == self._port.rank:
            self._heed(place, told)
        else:
            self._port.tell(rank, json.dumps(told).encode())

    def _on_control(self, peer: int, payload: bytes) -> None:
        self._heed(self._ranks.index(peer), json.loads(payload))

    def _heed(self, place: int, told: dict[str, object]) -> None:
        match told:
            case {"round": int(number), "to": list(targets), "from": list(sources), "s": float(flow_s)}:
                begin_s = self._now_s()
                end_s = begin_s + flow_s
                for source in sources:
                    self._receiving[number, source] = _Receiving(begin_s=begin_s, end_s=end_s)
                    self._post(number, source)
                for target in targets:
                    self._sending[number, target] = _Sending(
                        peer=self._ranks[target], end_s=end_s, latest_s=begin_s + LATE * flow_s
                    )
                    self._send(number, target)
            case {"landed": int(number)}:
                if (number, place) in self._sending:
                    self._sending[number, place].num_landed += 1
                    self._send(number, place)
            case {"sent": int(count), "in": int(number)}:
                self._receiving[number, place].expected = count
                self._look(number, place)
            case {"rate": float(rate), "in": int(number), "from": int(source)}:
                if number == self._round and self._is_over is not None:
                    self._rates[source, place] = rate
                    if not self._is_over.done():
                        self._is_over.set_result(None)

    def _send(self, number: int, target: int) -> None:
        """Send as much as may be under way; say how many messages it were when the time is over."""
        flow = self._sending[number, target]
        while flow.num_sent - flow.num_landed < NUM_UNDER_WAY:
            end_s = flow.latest_s if flow.num_sent < NUM_LEAST else flow.end_s
            if self._now_s() >= end_s or flow.num_sent == MOST_MESSAGES:
                del self._sending[number, target]
                self._tell(target, {"sent": flow.num_sent, "in": number})
                return
            payload = self._lump[: _size(flow.num_sent)]
            self._port.send(flow.peer, self._tag(number, flow.num_sent), payload, urgency=URGENCY)
            flow.num_sent += 1

    def _post(self, number: int, source: int) -> None:
        """Be ready for the messages that may be under way."""
        flow = self._receiving[number, source]
        while flow.posted - len(flow.landed) < NUM_UNDER_WAY and flow.expected is None:
            destination = self._lump[: _size(flow.posted)]  # nobody reads it
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
        flow.landed.append((self._now_s(), _size(len(flow.landed))))
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


def _size(message: int) -> int:
    """Return how long the message of that number is."""
    return min(FIRST_BYTES << (message // NUM_OF_A_SIZE), LAST_BYTES)


def _rate(flow: _Receiving) -> float:
    """Return bytes per second in the part of the time that counts, or of all where it was over by then.

    Between two messages bytes are taken to have come evenly: this thread may have been told late of either.
    """
    times_s = [flow.begin_s, *(landed_s for landed_s, _ in flow.landed)]
    sums = [0, *accumulate(size for _, size in flow.landed)]
    end_s = min(max(flow.end_s, *times_s[: NUM_LEAST + 1]), times_s[-1])
    begin_s = flow.begin_s + WARM_PART * (end_s - flow.begin_s)
    first, last = np.interp((begin_s, end_s), times_s, sums)
    return float(last - first) / max(end_s - begin_s, 1e-6)
