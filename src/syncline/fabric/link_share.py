"""One receiver's share of a link that several receivers draw over.

If all of them draw, each may have its part of the link's window under way, and the queue in front of the link does not
overflow. If some do not, that is seen without asking them: what was granted arrives sooner than a full queue would let
it. Then the share grows by one quantum for each of its lengths that arrives, and shrinks again, faster, once arrivals
take longer than the target (delay-based congestion control, as in Swift, SIGCOMM 2020, but at the receiver). Everything
here is pure: time comes in as an argument.
"""

from __future__ import annotations

from collections import deque

from syncline.fabric.protocol import BULK, BULK_BYTES


class LinkShare:
    """What one receiver may have under way on a link, but for one quantum.

    ``part_bytes`` is its part if all receivers draw, ``most_bytes`` what no one may exceed, ``target_s`` how long an
    arrival may take, from its grant on, before the share shrinks.
    """

    def __init__(self, part_bytes: int, *, most_bytes: int = 0, target_s: float = 0.0) -> None:
        self.part_bytes = part_bytes
        self.limit_bytes = part_bytes
        self.underway_bytes = 0
        self.waiting: set[int] = set()
        """Senders that were passed over because the share was used up."""
        self.most_bytes = max(part_bytes, most_bytes)
        self.target_s = target_s
        self._granted_bytes = 0
        self._arrived_bytes = 0
        self._grants: deque[tuple[int, float]] = deque()

    def quantum_bytes(self, urgency: int) -> int:
        """Return what one grant takes of it at most: smaller ones cost the ranks more than a shorter queue gains."""
        return max(1 if urgency < BULK else BULK_BYTES, self.part_bytes // 2)

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
        if granted_s is None:
            return
        if now_s - granted_s > self.target_s:
            self.limit_bytes = max(self.part_bytes, self.limit_bytes - num_bytes // 2)
        elif self.waiting:
            grown_bytes = max(1, num_bytes * self.quantum_bytes(0) // self.limit_bytes)
            self.limit_bytes = min(self.most_bytes, self.limit_bytes + grown_bytes)

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
