"""How many steps a period has: of parties that compute at different speeds, and where the user names no number.

A party that computes at half speed makes half as many steps in a period (:func:`own_steps`), so that all come to a
round together, and nobody waits.

Where the user names no number, a period has the fewest steps whose rounds the links carry meanwhile.

Sites that average more often need fewer samples, the more so the more their data differ, until rounds hold up steps. So
a period begins short, and becomes longer where all ranks were held up by rounds. What holds up the rank that is held up
least is not that others are late, but links, or the arithmetic of rounds. Where ranks were not held up for a while,
half the period is tried; each time that this fails, the next trial comes twice as late. Where rates of links are known,
a period is what these say as soon as all have timed a step. To begin short holds up the first steps for a transfer of
all parameters: where that would be noticed, it begins long.

All ranks judge by the same numbers after the same round, so they have the same period at each step. Which it is depends
on measured times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

USUAL = 16
"""Where it is not chosen, and the longest that is advised: what more steps cost in samples is not predicted."""
SHORTEST, LONGEST = 2, 1 << 12
"""A round is merged a step after it began: with a period of one step nothing would be without one under way, which took
more samples than two."""
LESS = 0.8
"""What a step by another rule takes at most, as a part of a step now, where that rule is worth a word to a user."""
NOTICED_S = 1.0
"""Rounds of all parameters that take longer, by prediction, are not what a job begins with."""
MATTERS = 0.05
"""The part of a period for which rounds may hold up steps."""
CLEARLY = 0.5
"""So much is judged at once."""
LEAST_STEPS = 16
"""Fewer are not judged: a machine is busy for a moment."""
PATIENCE = 8
"""Judgements."""
ALIKE = 0.9
"""Parties that are as fast as the fastest, or nearly, make as many steps: what is measured is never the same."""
_SHORTEST_S = 1e-9


def own_steps(period: int, speed: float) -> int:
    """Return how many steps a party makes in a period whose fastest party makes ``period``; ``speed``: its own, of 1.

    >>> own_steps(16, 0.5), own_steps(16, 0.95), own_steps(16, 0.01)
    (8, 16, 1)
    """
    return period if speed >= ALIKE else max(1, round(period * speed))


def measured_speeds(held_up_s: Sequence[float], taken_s: Sequence[float], num_steps: Sequence[float]) -> list[float]:
    """Return how fast each rank computes, as parts of the fastest; nothing if they have made too few steps to tell.

    ``held_up_s``: for how long rounds held each up, in ``taken_s``, in which it made ``num_steps``.

    >>> measured_speeds([0.0, 0.0], [1.5, 3.0], [16, 16])
    [1.0, 0.5]
    """
    if max(num_steps) < LEAST_STEPS // 2 or min(num_steps) <= 0:
        return []
    steps_s = list(map(_step_s, held_up_s, taken_s, num_steps))
    return [min(steps_s) / own_s for own_s in steps_s]


def _step_s(held_up_s: float, taken_s: float, num_steps: float) -> float:
    """Return what one of so many steps took without what held them up."""
    return max(_SHORTEST_S, taken_s - held_up_s) / num_steps


def common_fragments(most: int, fewest_steps: int) -> int:
    """Return in how many fragments parties exchange of which one makes no more steps: a power of two, or the most.

    >>> common_fragments(16, 20), common_fragments(16, 7), common_fragments(10, 10)
    (16, 4, 10)
    """
    return most if fewest_steps >= most else 1 << (fewest_steps.bit_length() - 1)


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

    def __init__(self, longest: int = LONGEST, *, first: int = SHORTEST) -> None:
        self.num_steps, self._longest = first, longest
        self._num_periods = 0
        """Since it was judged last."""
        self._num_calm, self._patience = 0, PATIENCE
        self._is_trial = False

    def begin(self) -> None:
        """Judge by what comes from now on."""
        self._num_periods = 0

    def predict(self, round_s: float, step_s: float) -> None:
        """Have as many steps as carry rounds that take so long."""
        self.num_steps = min(self._longest, shortest_period(round_s, step_s))

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
            self.num_steps = min(self._longest, self.num_steps * longer)
            self._num_calm, self._is_trial = 0, False
        else:
            self._num_calm, self._is_trial = self._num_calm + 1, False
            if self._num_calm >= self._patience and self.num_steps > SHORTEST:
                self.num_steps //= 2
                self._num_calm, self._is_trial = 0, True
        self._num_periods = 0
        return True


class PartyPeriod:
    """The period of a job as one party has it: its own number of steps, and how many fragments all can have.

    ``period``: steps of the fastest party, or ``"auto"``; None: as that, but :data:`USUAL` at most. ``speeds``: of this
    party and of the slowest, as parts of the fastest; None: they are measured, and begin alike. ``round_s``: what
    rounds of all parameters take by prediction, 0 where nobody knows; ``most``: into how many fragments these go.

    >>> period = PartyPeriod(16, speeds=None)
    >>> period.judge(held_up_s=[0.0, 0.0], taken_s=[1.5, 1.4], num_steps=[15, 7], party=[1])
    True
    >>> period.own_steps, period.num_fragments(16)
    (8, 8)
    """

    def __init__(
        self,
        period: int | Literal["auto"] | None,
        *,
        speeds: tuple[float, float] | None = (1.0, 1.0),
        round_s: float = 0.0,
        most: int = SHORTEST,
    ) -> None:
        is_given, longest = isinstance(period, int), LONGEST if period == "auto" else USUAL
        first = common_fragments(USUAL, max(SHORTEST, most)) if round_s > NOTICED_S else SHORTEST
        self._automatic = None if is_given else AutomaticPeriod(longest, first=first)
        self._round_s = 0.0 if is_given else round_s
        self._all_as_many = speeds == (1.0, 1.0)
        self._given = period if isinstance(period, int) else SHORTEST
        self._is_measured = speeds is None
        self._speeds = speeds or (1.0, 1.0)
        self.is_found = self._automatic is not None or speeds is None
        """Whether it follows from what is measured."""

    @property
    def awaits_times(self) -> bool:
        """Whether it is predicted as soon as all ranks have timed a step."""
        return self._round_s > 0

    @property
    def _num_steps(self) -> int:
        return self._given if self._automatic is None else self._automatic.num_steps

    @property
    def own_steps(self) -> int:
        """Of this party."""
        return own_steps(self._num_steps, self._speeds[0])

    def num_fragments(self, most: int) -> int:
        """Return in how many fragments, of so many at most, a period goes: a step begins one round at most."""
        return common_fragments(min(most, self._num_steps), own_steps(self._num_steps, self._speeds[1]))

    def begin(self) -> None:
        """Judge by what comes from now on."""
        if self._automatic is not None:
            self._automatic.begin()

    def judge(
        self,
        *,
        held_up_s: Sequence[float],
        taken_s: Sequence[float],
        num_steps: Sequence[float],
        party: Sequence[int],
    ) -> bool:
        """End a period, and find those that follow; return whether it was judged, and a judgement begins anew.

        Of each rank, since the last judgement: for how long rounds held it up, in what time, and its steps. ``party``:
        the ranks of this one's, which are as fast as the slowest of them.
        """
        if self._automatic is not None and self.awaits_times:
            if min(num_steps) < 1:
                return False
            steps_s = map(_step_s, held_up_s, taken_s, num_steps)
            self._automatic.predict(self._round_s, max(steps_s) if self._all_as_many else min(steps_s))
            self._round_s = 0.0
        elif self._automatic is not None:
            held_up = min(held_s / whole_s for held_s, whole_s in zip(held_up_s, taken_s, strict=True))
            if not self._automatic.judge(held_up=held_up):
                return False
        elif not self._is_measured or max(num_steps) < LEAST_STEPS // 2:
            return False
        if self._is_measured and (speeds := measured_speeds(held_up_s, taken_s, num_steps)):
            self._speeds = min(speeds[rank] for rank in party), min(speeds)
        return True
