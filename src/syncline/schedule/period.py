"""How many steps a period has where the user names no number: the fewest whose rounds the links carry meanwhile.

Sites that average more often need fewer samples, the more so the more their data differ, until rounds hold up steps. So
a period begins short, and becomes longer where all ranks were held up by rounds. What holds up the rank that is held up
least is not that others are late, but links, or the arithmetic of rounds. Where ranks were not held up for a while,
half the period is tried; each time that this fails, the next trial comes twice as late.

All ranks judge by the same numbers after the same round, so they have the same period at each step. Which it is depends
on measured times.
"""

from __future__ import annotations

import math

USUAL = 16
"""Where it is not chosen, and the longest that is advised: what more steps cost in samples is not predicted."""
SHORTEST, LONGEST = 2, 1 << 12
"""A round is merged a step after it began: with a period of one step nothing would be without one under way, which took
more samples than two."""
MATTERS = 0.05
"""The part of a period for which rounds may hold up steps."""
CLEARLY = 0.5
"""So much is judged at once."""
LEAST_STEPS = 16
"""Fewer are not judged: a machine is busy for a moment."""
PATIENCE = 8
"""Judgements."""
_SHORTEST_S = 1e-9


def shortest_period(round_s: float, step_s: float) -> int:
    """Return how many steps of ``step_s`` carry what rounds take in all, or nearly: on what a job settles."""
    return max(SHORTEST, _power_of_two((1 - MATTERS) * round_s / max(step_s, _SHORTEST_S)))


def _power_of_two(least: float) -> int:
    """Return the first from ``least`` up, :data:`LONGEST` at most."""
    return 1 << math.ceil(math.log2(max(1.0, min(least, LONGEST))))


class AutomaticPeriod:
    """The period of a job, as it is now; every rank has one, and asks it the same.

    >>> period = AutomaticPeriod()
    >>> period.num_steps, period.judge(0.9), period.num_steps
    (2, True, 32)
    """

    def __init__(self) -> None:
        self.num_steps = SHORTEST
        self._num_periods = 0
        """Since it was judged last."""
        self._num_calm, self._patience = 0, PATIENCE
        self._is_trial = False

    def begin(self) -> None:
        """Judge by what comes from now on."""
        self._num_periods = 0

    def judge(self, held_up: float) -> bool:
        """End a period; ``held_up``: the part of the time since :meth:`begin` that rounds took of every rank at least.

        Return whether it was judged, and begun anew.
        """
        self._num_periods += 1
        if self._num_periods * self.num_steps < LEAST_STEPS and held_up < CLEARLY:
            return False
        if held_up > MATTERS:
            self._patience *= 2 if self._is_trial else 1
            longer = max(2, _power_of_two(1 / max(1 - held_up, 1 / LONGEST)))
            self.num_steps = min(LONGEST, self.num_steps * longer)
            self._num_calm, self._is_trial = 0, False
        else:
            self._num_calm, self._is_trial = self._num_calm + 1, False
            if self._num_calm >= self._patience and self.num_steps > SHORTEST:
                self.num_steps //= 2
                self._num_calm, self._is_trial = 0, True
        self._num_periods = 0
        return True
