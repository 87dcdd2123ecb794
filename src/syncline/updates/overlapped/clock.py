"""A worker's iteration number within its period, and when the period ends for it."""

from __future__ import annotations


class PeriodClock:
    """Counts the iterations 1 to ``period`` (K), never lagging behind the fleet.

    A worker that learns that the M contributors of a global gradient have all done iteration j goes on with j + 1 at
    least: it leaves numbers out, uses only G(j) with j no newer than its own iteration, and ends its period together
    with the others, having done as many steps as it could.
    """

    def __init__(self, period: int) -> None:
        self.period = period
        self.begin_period()

    def begin_period(self) -> None:
        """Start at iteration 0: nothing was done."""
        self.iteration = 0
        self.num_steps = 0
        self.num_samples = 0.0

    def tick(self, *, fleet: int, weight: float) -> int:
        """Begin the next iteration, with ``weight`` samples; ``fleet`` is the iteration that the fleet has done."""
        self.iteration = min(self.period, max(self.iteration, fleet) + 1)
        self.num_steps += 1
        self.num_samples += weight
        return self.iteration

    def catch_up(self, *, reached: int) -> None:
        """After a wait, go on from the iteration that the fleet has ``reached`` meanwhile."""
        self.iteration = min(self.period, max(self.iteration, reached))

    @property
    def is_last(self) -> bool:
        """Whether this iteration ends the period."""
        return self.iteration >= self.period
