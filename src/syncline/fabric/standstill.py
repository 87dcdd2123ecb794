"""Whether this process itself stood still: what ends meanwhile is no fault of the peer at the other end.

A process that is stopped (SIGSTOP, a debugger, a suspended machine), or whose loop is held up, is given up by its
peers; when it goes on, it sees their connections closed. Its own clock tells that it was away. Pure: times in, times
out.
"""

from __future__ import annotations

MISSED_INTERVALS = 3
"""So many looks at the clock in a row are not missed by a loop that is only busy."""


class Standstill:
    """Remembers for ``remembered_s`` that the loop, which looks at its clock every ``interval_s``, did not run."""

    def __init__(self, *, interval_s: float, remembered_s: float, now_s: float) -> None:
        self._least_s = MISSED_INTERVALS * interval_s
        self._remembered_s = remembered_s
        self._ran_s = now_s
        self._ended_s = now_s
        self._gap_s = 0.0

    def ran(self, now_s: float) -> None:
        """Note that the loop runs now."""
        gap_s = now_s - self._ran_s
        self._ran_s = now_s
        if gap_s > self._least_s:
            self._gap_s, self._ended_s = gap_s, now_s

    def away_s(self, now_s: float) -> float:
        """Return for how long this process did not run, if that is not long past or just over; else 0.0."""
        gap_s = now_s - self._ran_s
        if gap_s > self._least_s:
            return gap_s
        return self._gap_s if now_s - self._ended_s <= self._remembered_s else 0.0


def describe_absence(away_s: float) -> str:
    """``"did not run for 12.3 s (it was stopped or suspended, or its communication loop was held up)"``."""
    return f"did not run for {away_s:.1f} s (it was stopped or suspended, or its communication loop was held up)"
