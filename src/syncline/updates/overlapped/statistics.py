"""How the overlapped update fared: what was stale, dropped and waited for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlappedStatistics:
    """All counters of one rank since the start."""

    num_steps: int
    num_periods: int
    """Periods that have ended."""
    iteration: int
    """The iteration within the period, which leaves numbers out where this rank is slower than the others."""
    mean_staleness: float
    """Own iterations for which no global gradient was used yet, after a step; of the bucket with the most."""
    max_staleness: int
    share_with_global: float
    """Share of the steps in which a global gradient was used."""
    dropped: tuple[int, ...]
    """For each rank, how many of its pushes the servers had dropped when the last period ended."""
    num_forgotten: int
    """Own pushes that died with a server."""
    waited_staleness_s: float
    """Time in which ``step()`` waited because gradients were too stale."""
    waited_period_s: float
    """Time in which ``step()`` waited for the end of a period."""
    waited_for: dict[int, int]
    """For each rank, in how many waits it was the one that was waited for."""
    lost: tuple[int, ...]
    """Ranks that died or left."""

    def __str__(self) -> str:
        """One line for people."""
        dropped = ", ".join(f"{count} of rank {rank}" for rank, count in enumerate(self.dropped) if count)
        return (
            f"stale {self.mean_staleness:.1f}, at most {self.max_staleness}  global {self.share_with_global:.0%}  "
            f"dropped {dropped or 'none'}  waited {self.waited_staleness_s:.1f}+{self.waited_period_s:.1f} s"
        )


@dataclass(slots=True)
class ClientCounts:
    """The counters, while they run."""

    num_steps: int = 0
    num_periods: int = 0
    sum_staleness: int = 0
    max_staleness: int = 0
    num_with_global: int = 0
    waited_s: dict[str, float] = field(default_factory=lambda: {"staleness": 0.0, "period": 0.0})
    waited_for: Counter[int] = field(default_factory=Counter)

    def note_step(self, *, staleness: int, num_rounds: int) -> None:
        """Count a step."""
        self.num_steps += 1
        self.sum_staleness += staleness
        self.max_staleness = max(self.max_staleness, staleness)
        self.num_with_global += num_rounds > 0

    def note_wait(self, phase: str, seconds: float, awaited: tuple[int, ...]) -> None:
        """Count a wait."""
        self.waited_s[phase] += seconds
        self.waited_for.update(awaited)
