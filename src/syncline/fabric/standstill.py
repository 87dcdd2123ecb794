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
        self._has_advised = False

    def ran(self, now_s: float) -> None:
        """Note that the loop runs now."""
        gap_s = now_s - self._ran_s
        self._ran_s = now_s
        if gap_s > self._least_s:
            self._gap_s, self._ended_s = gap_s, now_s

    def advise(self, gap_s: float) -> str:
        """Say what it means for a user that the loop did not run, and what to do; empty after the first time."""
        if self._has_advised:
            return ""
        self._has_advised = True
        return (
            f"this process's communication thread did not run for {gap_s:.1f} s, so nothing was sent or answered "
            "meanwhile. Either the whole process stood still (suspended, in a debugger, swapped out, or without a "
            "processor on a crowded machine: look at its memory and load), or one call held the Python interpreter "
            "(C code that keeps the GIL: py-spy dump --pid PID shows it). The others give up a rank that is silent for "
            f"{self._remembered_s:g} s; where such pauses are meant, raise init(silence_s=...) on all ranks. Further "
            "pauses are in the trace alone"
        )

    def away_s(self, now_s: float) -> float:
        """Return for how long this process did not run, if that is not long past or just over; else 0.0."""
        gap_s = now_s - self._ran_s
        if gap_s > self._least_s:
            return gap_s
        return self._gap_s if now_s - self._ended_s <= self._remembered_s else 0.0


def describe_absence(away_s: float) -> str:
    """``"did not run for 12.3 s (it was stopped or suspended, or its communication loop was held up)"``."""
    return f"did not run for {away_s:.1f} s (it was stopped or suspended, or its communication loop was held up)"
