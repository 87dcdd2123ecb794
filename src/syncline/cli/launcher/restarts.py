"""How often, and after which pause, what died is started again. Decides alone: time is passed in."""

from __future__ import annotations

from dataclasses import dataclass, field

from syncline.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """At most ``count`` restarts in any ``period_s`` seconds, with pauses that double up to the longest."""

    count: int = 0
    period_s: float = 3600.0
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ConfigurationError(f"--restarts must be 0 or more, not {self.count}")
        if self.period_s <= 0:
            raise ConfigurationError(f"--restart-period must be more than 0 seconds, not {self.period_s:g}")

    def __str__(self) -> str:
        times = "once" if self.count == 1 else f"{self.count} times"
        return f"{times} in {self.period_s:g} s"


@dataclass(slots=True)
class RestartBudget:
    """What one rank, or one whole job, has used of its limits; restarts that lie back far enough are forgotten."""

    limits: RestartLimits
    taken_s: list[float] = field(default_factory=list)

    def take(self, now_s: float) -> float | None:
        """Take one restart; return the pause before it in seconds, or None if there are no more."""
        self.taken_s = [taken_s for taken_s in self.taken_s if now_s - taken_s < self.limits.period_s]
        if len(self.taken_s) >= self.limits.count:
            return None
        pause_s = min(self.limits.first_pause_s * 2.0 ** len(self.taken_s), self.limits.longest_pause_s)
        self.taken_s.append(now_s)
        return pause_s
