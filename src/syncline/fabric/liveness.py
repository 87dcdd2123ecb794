"""Who is still there: heartbeats, suspicion and death, decided without I/O.

A kernel says at once when a peer's process dies, but never when it is stopped or its cable is cut; only silence tells.
Silence is counted in ticks of this process's own attention: if the loop itself did not run for a while (the process was
stopped, or something held the GIL), that while does not count against the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from syncline.fabric.options import FabricOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """``peer`` has been silent for long enough to say so."""

    peer: int
    silence_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Dead:
    """``peer`` has been silent for too long."""

    peer: int
    silence_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """What a look at the clock leads to."""

    must_beat: bool
    verdicts: tuple[Suspect | Dead, ...]
    counted_s: float
    """How much time counts against the others since the last look."""
    gap_s: float
    """How long this process itself was away; 0.0 if it was not."""


class Liveness:
    """Judges peers by their silence. Call :meth:`tick` every ``interval_s``."""

    def __init__(self, *, heartbeat_s: float, suspect_s: float, dead_s: float, now_s: float) -> None:
        self.interval_s = min(heartbeat_s, suspect_s / 3, dead_s / 10)
        self._heartbeat_s = heartbeat_s
        self._suspect_s = suspect_s
        self._dead_s = dead_s
        self._now_s = now_s
        self._since_beat_s = heartbeat_s
        self._silence_s: dict[int, float] = {}

    @classmethod
    def of(cls, options: FabricOptions, *, now_s: float) -> Liveness:
        """Judge by the times of ``options``."""
        return cls(heartbeat_s=options.heartbeat_s, suspect_s=options.suspect_s, dead_s=options.dead_s, now_s=now_s)

    @property
    def suspects(self) -> frozenset[int]:
        """Peers that are silent for three heartbeats, or for ``suspect_s``, but not yet for too long."""
        silent_s = min(self._suspect_s, 3 * self._heartbeat_s)
        return frozenset(peer for peer, silence_s in self._silence_s.items() if silence_s >= silent_s)

    def add(self, peer: int) -> None:
        """Judge ``peer`` from now on."""
        self._silence_s[peer] = 0.0

    def remove(self, peer: int) -> None:
        """Judge ``peer`` no more."""
        self._silence_s.pop(peer, None)

    def tick(self, now_s: float, *, heard: frozenset[int] | set[int]) -> Tick:
        """Take note of the time and of who has been heard since the last tick."""
        passed_s = now_s - self._now_s
        self._now_s = now_s
        gap_s = passed_s if passed_s > 3 * self.interval_s else 0.0
        counted_s = min(passed_s, self.interval_s) if gap_s else passed_s
        verdicts: list[Suspect | Dead] = []
        for peer in self._silence_s:
            verdict = self._judge(peer, counted_s, is_heard=peer in heard)
            if verdict is not None:
                verdicts.append(verdict)
        self._since_beat_s += passed_s
        must_beat = self._since_beat_s >= self._heartbeat_s
        if must_beat:
            self._since_beat_s = 0.0
        return Tick(must_beat=must_beat, verdicts=tuple(verdicts), counted_s=counted_s, gap_s=gap_s)

    def _judge(self, peer: int, counted_s: float, *, is_heard: bool) -> Suspect | Dead | None:
        if is_heard:
            self._silence_s[peer] = 0.0
            return None
        before_s = self._silence_s[peer]
        silence_s = self._silence_s[peer] = before_s + counted_s
        if silence_s >= self._dead_s:
            return Dead(peer=peer, silence_s=silence_s)
        if before_s < self._suspect_s <= silence_s:
            return Suspect(peer=peer, silence_s=silence_s)
        return None
