"""What is known of a soak's job that is over: it is all that the oracle judges."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from soak_plan import JobPlan


@dataclass(slots=True, kw_only=True)
class JobRecord:
    """All that is known of a job that is over."""

    plan: JobPlan
    events: list[dict[str, Any]] = field(default_factory=list)
    injected: list[dict[str, Any]] = field(default_factory=list)
    """The faults that took place, with when, in the machine's clock, and who may be lost by each (``blamed``)."""
    statuses: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)
    began_s: float = 0.0
    newcomers: dict[int, float] = field(default_factory=dict)
    """When each process began that came into the job; the first has the number after the last rank's."""
    ended_s: float = 0.0
    hanging: tuple[int, ...] = ()
    """Processes that had not ended at the deadline, and were killed."""
    left_behind: list[str] = field(default_factory=list)

    def of(self, rank: int, *kinds: str) -> list[dict[str, Any]]:
        """Return a process's events of some kinds, in order."""
        return [event for event in self.events if event["rank"] == rank and event["event"] in kinds]

    def began(self, rank: int) -> float:
        """Return when a process began."""
        return self.newcomers.get(rank, self.began_s)
