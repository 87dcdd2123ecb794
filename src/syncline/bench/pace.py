"""How often a method is measured: a number of rounds, or fewer where they take long."""

from __future__ import annotations

from dataclasses import dataclass

from syncline.errors import ConfigurationError

DEFAULT_BUDGET_S = 60.0
MIN_ROUNDS = 3
"""With fewer there is no spread to speak of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """``num_warm_ups`` rounds that do not count, then ``num_rounds`` that do.

    A method that has taken ``budget_s`` seconds gets no more than ``MIN_ROUNDS`` rounds, and no second warm-up once it
    has taken a quarter of it: a slow peer must not make a benchmark endless.
    """

    num_rounds: int = 5
    num_warm_ups: int = 2
    budget_s: float = DEFAULT_BUDGET_S

    def __post_init__(self) -> None:
        if self.num_rounds < 1 or self.num_warm_ups < 0:
            raise ConfigurationError(
                f"a benchmark has at least 1 round and 0 warm-ups, not {self.num_rounds} and {self.num_warm_ups}"
            )
        if not self.budget_s > 0:
            raise ConfigurationError(f"a method's budget is more than 0 s, not {self.budget_s:g} s")


class Tally:
    """The rounds of one method so far; every rank must tell it the same times."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._num_warm_ups = 0
        self._spent_s = 0.0
        self.seconds: list[float] = []
        """What the counted rounds measured."""

    @property
    def wants_more(self) -> bool:
        """Whether another round is due."""
        if self._is_warming_up:
            return True
        enough = self._pace.num_rounds
        return len(self.seconds) < (min(MIN_ROUNDS, enough) if self._spent_s >= self._pace.budget_s else enough)

    def add(self, measured_s: float, *, elapsed_s: float) -> None:
        """Take note of a round that took ``elapsed_s`` and whose figure is ``measured_s``."""
        if self._is_warming_up:
            self._num_warm_ups += 1
        else:
            self.seconds.append(measured_s)
        self._spent_s += elapsed_s

    @property
    def _is_warming_up(self) -> bool:
        if self.seconds or self._num_warm_ups >= self._pace.num_warm_ups:
            return False
        return not self._num_warm_ups or self._spent_s < self._pace.budget_s / 4
