"""Whether the ranks make the same calls: each compares its own with what the rank before it describes.

If any two ranks differ, then somewhere in the circle two neighbours do, and one of them sees it and tells everyone.
A rank whose own part was complete by then (a broadcast that came from ranks that agree with it) gets the error at its
next call; every rank that still waits gets it at once. Pure bookkeeping.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from syncline.runtime.call import Description
from syncline.runtime.early import COST_BYTES, CallKey, EarlyQuota

_MAX_REMEMBERED = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """Two ranks that call different things at the same place."""

    peer: int
    theirs: Description
    ours: Description


class Agreement:
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
