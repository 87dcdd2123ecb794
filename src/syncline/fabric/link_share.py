"""One receiver's share of a link that several receivers draw over.

If all of them draw, each may have its part of the link's window under way, and the queue in front of the link does not
overflow. If some do not, that is seen without asking them: what was granted arrives sooner than a full queue would let
it. Then the share grows by one quantum for each of its lengths that arrives, and shrinks again, faster, once arrivals
take longer than the target (delay-based congestion control, as in Swift, SIGCOMM 2020, but at the receiver).

How long the queue is, nobody says. Where it is shorter than the parts, packets are lost, and delay does not tell: so
senders do. Where more than a fiftieth of a share's length was lost on the way (BBRv2 draws the line there too), the
share shrinks below its part; it grows back as TCP does, but slowly: by one segment for each ``LENGTHS`` of its lengths
that arrive, since a loss costs more than a share that is a little small. Everything here is pure: time comes in as an
argument.
"""

from __future__ import annotations

from collections import deque

from syncline.fabric.protocol import BULK, BULK_BYTES

SEGMENT_BYTES = 1448
"""What a TCP segment carries where a frame has 1500 bytes."""
TOLERATED = 50
"""One byte of so many may be lost."""
LENGTHS = 8


class LinkShare:
    """What one receiver may have under way on a link, but for one quantum.

    ``part_bytes`` is its part if all receivers draw, ``most_bytes`` what no one may exceed, ``least_bytes`` what is
    left where much is lost (its part, if 0), ``target_s`` how long an arrival may take, from its grant on, before the
    share shrinks.
    """

    def __init__(self, part_bytes: int, *, most_bytes: int = 0, least_bytes: int = 0, target_s: float = 0.0) -> None:
        self.part_bytes = part_bytes
        self.least_bytes = min(part_bytes, least_bytes or part_bytes)
        self.limit_bytes = part_bytes
        self.underway_bytes = 0
        self.waiting: set[int] = set()
        """Senders that were passed over because the share was used up."""
        self.most_bytes = max(part_bytes, most_bytes)
        self.target_s = target_s
        self._granted_bytes = 0
        self._arrived_bytes = 0
        self._judged_bytes = self._lost_bytes = 0
        self._grants: deque[tuple[int, float]] = deque()

    def quantum_bytes(self, urgency: int) -> int:
        """Return what one grant takes of it at most: smaller ones cost the ranks more than a shorter queue gains."""
        return max(1 if urgency < BULK else BULK_BYTES, min(self.part_bytes // 2, self.limit_bytes))

    @property
    def is_used_up(self) -> bool:
        """Whether the next grant must wait for an arrival."""
        return self.underway_bytes >= self.limit_bytes

    def granted(self, num_bytes: int, now_s: float) -> None:
        """Count what may be sent from now on."""
        self.underway_bytes += num_bytes
        self._granted_bytes += num_bytes
        self._grants.append((self._granted_bytes, now_s))

    def arrived(self, num_bytes: int, now_s: float) -> None:
        """Count what is here, and learn from how long it took; of several senders, as if they came in turn."""
        granted_s = self._count_out(num_bytes)
        self._judged_bytes += num_bytes
        if self._judged_bytes >= self.limit_bytes and self._is_lossy():
            self.limit_bytes = max(self.least_bytes, self.limit_bytes * 7 // 10)
            return
        if granted_s is None:
            return
        if now_s - granted_s > self.target_s:
            self.limit_bytes = max(min(self.part_bytes, self.limit_bytes), self.limit_bytes - num_bytes // 2)
        elif self.limit_bytes < self.part_bytes:
            grown_bytes = max(1, num_bytes * SEGMENT_BYTES // (LENGTHS * self.limit_bytes))
            self.limit_bytes = min(self.part_bytes, self.limit_bytes + grown_bytes)
        elif self.waiting:
            grown_bytes = max(1, num_bytes * self.quantum_bytes(0) // self.limit_bytes)
            self.limit_bytes = min(self.most_bytes, self.limit_bytes + grown_bytes)

    def lost(self, num_segments: int) -> None:
        """Count segments that a sender had to send again."""
        self._lost_bytes += num_segments * SEGMENT_BYTES

    def _is_lossy(self) -> bool:
        """Judge what came since the last judgement."""
        is_lossy = self._lost_bytes * TOLERATED > self._judged_bytes
        self._judged_bytes = self._lost_bytes = 0
        return is_lossy

    def forgotten(self, num_bytes: int) -> None:
        """Count what was granted and will not come."""
        self._count_out(num_bytes)

    def _count_out(self, num_bytes: int) -> float | None:
        """Return when the last grant that is now complete was given, if one is."""
        self.underway_bytes -= num_bytes
        self._arrived_bytes += num_bytes
        granted_s = None
        while self._grants and self._grants[0][0] <= self._arrived_bytes:
            granted_s = self._grants.popleft()[1]
        return granted_s
