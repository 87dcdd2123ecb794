"""Who is still there, and can be sent to: heartbeats, suspicion and death, decided without I/O.

A kernel says at once when a peer's process dies, but never when it is stopped or its cable is cut; only silence tells.
Silence is counted in ticks of this process's own attention: if the loop itself did not run for a while (the process was
stopped, or something held the GIL), that while does not count against the others. Such a process is given up by its
peers, and sees their connections closed when it goes on: its own clock tells that this is no fault of theirs.

Heartbeats are small packets. Where the way to a peer loses large ones, as with interfaces of unequal MTU, it is heard
all the time and gets no data: so it also counts for how long data is sent in vain to a peer that is heard.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from syncline.fabric.options import FabricOptions

MISSED_INTERVALS = 3
"""So many looks at the clock in a row are not missed by a loop that is only busy."""


class Suspect(NamedTuple):
    """``peer`` has been silent for long enough to say so, or for too long; or heard, and without data for so long."""

    peer: int
    silence_s: float
    is_dead: bool = False
    is_heard: bool = False


class Tick(NamedTuple):
    """What a look at the clock leads to."""

    must_beat: bool
    verdicts: tuple[Suspect, ...]
    counted_s: float
    """How much time counts against the others since the last look."""
    gap_s: float
    """How long this process itself was away; 0.0 if it was not."""


class Liveness:
    """Judges peers by their silence. Call :meth:`tick` every ``interval_s``."""

    def __init__(self, options: FabricOptions, *, now_s: float) -> None:
        self.interval_s = min(options.heartbeat_s, options.suspect_s / 3, options.dead_s / 10)
        self._heartbeat_s = options.heartbeat_s
        self._suspect_s = options.suspect_s
        self._dead_s = options.dead_s
        self._now_s = now_s
        self._since_beat_s = options.heartbeat_s
        self._silence_s: dict[int, float] = {}
        self._stuck_s: dict[int, float] = {}
        self._gap_s, self._gap_ended_s = 0.0, now_s
        self._has_advised = False

    @property
    def suspects(self) -> frozenset[int]:
        """Peers that are silent for three heartbeats, or for ``suspect_s``, but not yet for too long."""
        return frozenset(filter(self._is_silent, self._silence_s))

    def _is_silent(self, peer: int) -> bool:
        return self._silence_s[peer] >= min(self._suspect_s, 3 * self._heartbeat_s)

    def add(self, peer: int) -> None:
        """Judge ``peer`` from now on."""
        self._silence_s[peer] = 0.0

    def remove(self, peer: int) -> None:
        """Judge ``peer`` no more."""
        self._silence_s.pop(peer, None)
        self._stuck_s.pop(peer, None)

    def tick(self, now_s: float, *, heard: Set[int], stuck: Set[int] = frozenset()) -> Tick:
        """Take note of the time, of who has been heard since the last tick, and to whom no data came since then."""
        passed_s = now_s - self._now_s
        self._now_s = now_s
        gap_s = passed_s if passed_s > MISSED_INTERVALS * self.interval_s else 0.0
        if gap_s:
            self._gap_s, self._gap_ended_s = gap_s, now_s
        counted_s = min(passed_s, self.interval_s) if gap_s else passed_s
        verdicts: list[Suspect] = []
        for peer in self._silence_s:
            verdict = self._judge(peer, counted_s, is_heard=peer in heard, is_stuck=peer in stuck)
            if verdict is not None:
                verdicts.append(verdict)
        self._since_beat_s += passed_s
        must_beat = self._since_beat_s >= self._heartbeat_s
        if must_beat:
            self._since_beat_s = 0.0
        return Tick(must_beat=must_beat, verdicts=tuple(verdicts), counted_s=counted_s, gap_s=gap_s)

    def away_s(self, now_s: float) -> float:
        """Return for how long this process did not run, if that is just over, or not longer ago than ``dead_s``."""
        gap_s = now_s - self._now_s
        if gap_s > MISSED_INTERVALS * self.interval_s:
            return gap_s
        return self._gap_s if now_s - self._gap_ended_s <= self._dead_s else 0.0

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
            f"{self._dead_s:g} s; where such pauses are meant, raise init(silence_s=...) on all ranks. Further "
            "pauses are in the trace alone"
        )

    def _judge(self, peer: int, counted_s: float, *, is_heard: bool, is_stuck: bool) -> Suspect | None:
        before_s = self._silence_s[peer]
        silence_s = self._silence_s[peer] = 0.0 if is_heard else before_s + counted_s
        # A network that was cut is silent as well; what was lost meanwhile TCP sends again when it is not any more.
        stuck_s = self._stuck_s.get(peer, 0.0) + counted_s if is_stuck and not self._is_silent(peer) else 0.0
        self._stuck_s[peer] = stuck_s
        if stuck_s >= self._dead_s:
            return Suspect(peer=peer, silence_s=stuck_s, is_dead=True, is_heard=True)
        if silence_s >= self._dead_s:
            return Suspect(peer=peer, silence_s=silence_s, is_dead=True)
        if before_s < self._suspect_s <= silence_s:
            return Suspect(peer=peer, silence_s=silence_s)
        return None


def describe_absence(away_s: float) -> str:
    """``"did not run for 12.3 s (it was stopped or suspended, or its communication loop was held up)"``."""
    return f"did not run for {away_s:.1f} s (it was stopped or suspended, or its communication loop was held up)"
