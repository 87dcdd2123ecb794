"""What other ranks tell of calls that this one has not made yet: kept until it makes them, and only so much of it.

A rank may be many calls ahead, but not without end: each of its calls holds a buffer there. One that tells more than
any job needs is broken or hostile, and keeping it all would end in a process that the kernel kills.
"""

from __future__ import annotations

from collections import Counter

from syncline.runtime.control import ControlError

CallKey = tuple[int, int]
"""Stream, and running number in it (its lowest bits, as in tags)."""

MAX_EARLY_BYTES = 16 << 20
"""What one rank may tell of calls that this one has not made; some forty thousand calls."""
COST_BYTES = 256
"""What keeping anything costs beside its text."""
RANK_BYTES = 64
"""What a rank in a set costs."""


class EarlyQuota:
    """How much is kept of what each rank told early."""

    def __init__(self, max_bytes: int = MAX_EARLY_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes: Counter[int] = Counter()

    def charge(self, peer: int, num_bytes: int) -> None:
        """Note that so much more of ``peer`` is to be kept; ControlError if that is too much, and nothing is noted."""
        if self._bytes[peer] + num_bytes > self._max_bytes:
            raise ControlError(f"more than {self._max_bytes >> 20} MiB about calls that this rank has not made")
        self._bytes[peer] += num_bytes

    def release(self, peer: int, num_bytes: int) -> None:
        """Note that so much is kept no longer."""
        self._bytes[peer] -= num_bytes


class EarlyWaits:
    """Whom other ranks wait for in calls that this rank has not made yet, and what those calls are."""

    def __init__(self, quota: EarlyQuota) -> None:
        self._quota = quota
        self._said: dict[CallKey, dict[int, tuple[frozenset[int], str]]] = {}

    def note(self, key: CallKey, peer: int, awaited: frozenset[int], what: str) -> None:
        """Keep whom ``peer`` waits for in the call ``what``, in place of what it said of this call before."""
        said = self._said.get(key, {})
        if peer in said:
            self._quota.release(peer, _cost(*said.pop(peer)))
        self._quota.charge(peer, _cost(awaited, what))
        self._said.setdefault(key, {})[peer] = (awaited, what)

    def take(self, key: CallKey) -> dict[int, frozenset[int]]:
        """Return what was said of a call that begins now."""
        said = self._said.pop(key, {})
        for peer, (awaited, what) in said.items():
            self._quota.release(peer, _cost(awaited, what))
        return {peer: awaited for peer, (awaited, _) in said.items()}

    def calls_of(self, peer: int) -> list[str]:
        """Return the calls in which ``peer`` waits and which this rank has not made."""
        return [said[peer][1] for said in self._said.values() if peer in said]


def _cost(awaited: frozenset[int], what: str) -> int:
    return COST_BYTES + RANK_BYTES * len(awaited) + len(what)
