"""How often, and after which pause, what died is started again. Decides alone: time is passed in."""

from __future__ import annotations

from dataclasses import dataclass, field

from syncline.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """At most ``count`` restarts in any ``period_s`` seconds, with pauses that double up to the longest.

    What then runs for twice the longest pause begins again with the first, as Kubernetes has it: its faults are rare.
    """

    count: int = 0
    period_s: float = 3600.0
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ConfigurationError(f"--restarts must be 0 or more, not {self.count}")
        if self.period_s <= 0:
            raise ConfigurationError(f"--restart-period must be more than 0 seconds, not {self.period_s:g}")

    @property
    def well_s(self) -> float:
        """How long what runs well runs, at least."""
        return 2 * self.longest_pause_s

    def __str__(self) -> str:
        times = "once" if self.count == 1 else f"{self.count} times"
        return f"{times} in {self.period_s:g} s"


@dataclass(slots=True)
class RestartBudget:
    """What one rank, or one whole job, has used of its limits; restarts that lie back far enough are forgotten."""

    limits: RestartLimits
    taken_s: list[float] = field(default_factory=list)
    num_doubled: int = 0
    """How often the next pause is doubled."""

    def take(self, now_s: float, *, ran_s: float) -> float | None:
        """Take one restart of what ran for so long; return the pause before it in seconds, or None if no more is left.

        >>> budget = RestartBudget(RestartLimits(count=9))
        >>> [budget.take(100.0, ran_s=ran_s) for ran_s in (5.0, 5.0, 5.0, 60.0)]
        [1.0, 2.0, 4.0, 1.0]
        """
        self.taken_s = [taken_s for taken_s in self.taken_s if now_s - taken_s < self.limits.period_s]
        if len(self.taken_s) >= self.limits.count:
            return None
        if ran_s >= self.limits.well_s:
            self.num_doubled = 0
        pause_s = min(self.limits.first_pause_s * 2.0**self.num_doubled, self.limits.longest_pause_s)
        self.num_doubled += 1
        self.taken_s.append(now_s)
        return pause_s
