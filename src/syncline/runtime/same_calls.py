"""Whether the ranks make the same calls: each compares its own with what the rank before it describes.

If any two ranks differ, then somewhere in the circle two neighbours do, and one of them sees it and tells everyone.
A rank whose own part was complete by then (a broadcast that came from ranks that agree with it) gets the error at its
next call; every rank that still waits gets it at once. Pure bookkeeping.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

from syncline.runtime.call import Description
from syncline.runtime.control import ControlError

# What other ranks tell of calls that this one has not made yet: kept until it makes them, and only so much of it.
#
# A rank may be many calls ahead, but not without end: each of its calls holds a buffer there. One that tells more than
# any job needs is broken or hostile, and keeping it all would end in a process that the kernel kills.


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
            self._quota.release(peer, _cost_of_early(*said.pop(peer)))
        self._quota.charge(peer, _cost_of_early(awaited, what))
        self._said.setdefault(key, {})[peer] = (awaited, what)

    def take(self, key: CallKey) -> dict[int, frozenset[int]]:
        """Return what was said of a call that begins now."""
        said = self._said.pop(key, {})
        for peer, (awaited, what) in said.items():
            self._quota.release(peer, _cost_of_early(awaited, what))
        return {peer: awaited for peer, (awaited, _) in said.items()}

    @property
    def is_any(self) -> bool:
        """Whether any rank waits in a call that this one has not made."""
        return bool(self._said)

    def calls_of(self, peer: int) -> list[str]:
        """Return the calls in which ``peer`` waits and which this rank has not made."""
        return [said[peer][1] for said in self._said.values() if peer in said]


def _cost_of_early(awaited: frozenset[int], what: str) -> int:
    return COST_BYTES + RANK_BYTES * len(awaited) + len(what)


_MAX_REMEMBERED = 256


class Disagreement(NamedTuple):
    """Two ranks that call different things at the same place."""

    peer: int
    theirs: Description
    ours: Description


class SameCalls:
    """Own calls, of which the latest are remembered after their end, and descriptions that came before the own call."""

    def __init__(self, predecessor: int, quota: EarlyQuota) -> None:
        self._predecessor = predecessor
        self._quota = quota
        self._own: OrderedDict[CallKey, Description] = OrderedDict()
        self._early: dict[CallKey, list[tuple[int, Description]]] = {}
        self._open: set[CallKey] = set()

    def made(self, key: CallKey, ours: Description) -> tuple[bool, Disagreement | None]:
        """Note an own call; returns whether the rank before agreed already, and who disagrees."""
        self._own[key] = ours
        self._open.add(key)
        is_agreed = False
        early = self._early.pop(key, ())
        for peer, theirs in early:
            self._quota.release(peer, _cost(theirs))
        for peer, theirs in early:
            if theirs.identity != ours.identity:
                return False, Disagreement(peer=peer, theirs=theirs, ours=ours)
            is_agreed = is_agreed or peer == self._predecessor
        return is_agreed, None

    def heard(self, key: CallKey, peer: int, theirs: Description) -> tuple[bool, Disagreement | None]:
        """Note another rank's call; returns as :meth:`made`. ControlError if it tells too much of calls to come."""
        ours = self._own.get(key)
        if ours is None:
            self._quota.charge(peer, _cost(theirs))
            self._early.setdefault(key, []).append((peer, theirs))
            return False, None
        if theirs.identity != ours.identity:
            return False, Disagreement(peer=peer, theirs=theirs, ours=ours)
        return peer == self._predecessor, None

    def ended(self, key: CallKey) -> None:
        """Note that an own call has ended; the oldest of those are forgotten."""
        self._open.discard(key)
        while len(self._own) - len(self._open) > _MAX_REMEMBERED:
            oldest = next(known for known in self._own if known not in self._open)
            del self._own[oldest]


def _cost(theirs: Description) -> int:
    return COST_BYTES + len(theirs.identity) + len(theirs.text)
