"""Two senders and one receiver on a virtual clock: the grant scheduler itself, and links that are simple queues.

A granted piece leaves its sender in packets, crosses the sender's own link, and then the one link to the receiver,
where packets queue in the order of arrival (or by class, where the switch honours priorities). A request goes the same
way, as a small packet. A message counts as arrived by chunks, as on the wire. A host answers after ``delay_s``, and
sometimes later.
"""

import heapq
import itertools
import random

PACKET_BYTES = 16 << 10
REQUEST_BYTES = 100
REQUEST_URGENCY = -1


class Link:
    """A queue that drains at ``bytes_per_s``; ``is_strict`` serves the most urgent first."""

    def __init__(self, clock, bytes_per_s, deliver, *, is_strict=False):
        self.clock, self.bytes_per_s, self.deliver, self.is_strict = clock, bytes_per_s, deliver, is_strict
        self.queue, self.is_busy, self.order = [], False, itertools.count()
        self.busy_s = 0.0

    def put(self, packet):
        heapq.heappush(self.queue, (packet["urgency"] if self.is_strict else 0, next(self.order), packet))
        if not self.is_busy:
            self._serve()

    def _serve(self):
        self.is_busy = bool(self.queue)
        if self.is_busy:
            packet = heapq.heappop(self.queue)[2]
            took_s = packet["num_bytes"] / self.bytes_per_s
            self.busy_s += took_s
            self.clock.later(took_s, lambda: (self.deliver(packet), self._serve()))


class Clock:
    """Events in order of time."""

    def __init__(self):
        self.now_s, self._events, self._order = 0.0, [], itertools.count()

    def later(self, delay_s, action):
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._order), action))

    def run(self, until):
        while not until():
            self.now_s, _, action = heapq.heappop(self._events)
            action()


class Incast:
    """Ranks 1 and 2 send to rank 0, whose ``scheduler`` grants."""

    def __init__(self, scheduler, *, bytes_per_s, chunk_bytes, delay_s, clock=None, is_strict=False, late_s=0.0):
        self.clock, self.scheduler = clock or Clock(), scheduler
        self.chunk_bytes, self._delay_s, self._late_s = chunk_bytes, delay_s, late_s
        self._random = random.Random(7)
        self.bottleneck = Link(self.clock, bytes_per_s, self._arrive, is_strict=is_strict)
        self.uplinks = {peer: Link(self.clock, bytes_per_s, self.bottleneck.put) for peer in (1, 2)}
        self.sizes, self.urgencies, self.sent, self.arrived = {}, {}, {}, {}
        self.finished_s = {}
        self.tags = itertools.count(1)
        self.most_underway = 0

    def wish(self, peer, num_bytes, urgency):
        """A sender announces a message; returns its tag."""
        tag = next(self.tags)
        self.sizes[tag], self.urgencies[tag], self.sent[tag], self.arrived[tag] = num_bytes, urgency, 0, 0
        request = {"peer": peer, "tag": tag, "urgency": REQUEST_URGENCY, "num_bytes": REQUEST_BYTES}
        self.clock.later(self._answer_s(), lambda: self.uplinks[peer].put(request))
        return tag

    def wait(self, tag):
        self.clock.run(lambda: tag in self.finished_s)
        return self.finished_s[tag]

    def _answer_s(self):
        """How long a host takes; one in ten times it waits for a core."""
        return self._delay_s + (self._late_s if self._random.random() < 0.1 else 0.0)

    def _grant(self):
        for grant in self.scheduler.grants(now_s=self.clock.now_s):
            self.clock.later(self._answer_s(), lambda grant=grant: self._send(*grant))
        self.most_underway = max(self.most_underway, self.scheduler.underway_bytes)

    def _send(self, peer, tag, limit_bytes):
        while self.sent[tag] < limit_bytes:
            chunk = min(self.chunk_bytes, limit_bytes - self.sent[tag])
            self.sent[tag] += chunk
            left = chunk
            while left:
                size = min(PACKET_BYTES, left)
                left -= size
                packet = {"peer": peer, "tag": tag, "urgency": self.urgencies[tag], "num_bytes": size}
                self.uplinks[peer].put({**packet, "ends_chunk": 0 if left else chunk})

    def _arrive(self, packet):
        if packet["urgency"] == REQUEST_URGENCY:
            tag = packet["tag"]
            self.scheduler.wish(packet["peer"], tag, num_bytes=self.sizes[tag], urgency=self.urgencies[tag])
            self._grant()
            return
        if not packet["ends_chunk"]:
            return
        tag = packet["tag"]
        self.arrived[tag] += packet["ends_chunk"]
        if self.arrived[tag] == self.sizes[tag]:
            self.finished_s[tag] = self.clock.now_s
        self.scheduler.arrived(
            packet["peer"], num_bytes=packet["ends_chunk"], urgency=packet["urgency"], now_s=self.clock.now_s
        )
        self._grant()
