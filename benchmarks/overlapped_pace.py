"""How fast a fleet computed, from the moments at which each rank ended its steps.

Where ranks share processors, one that is done early leaves its part to the others, which then look faster than they
are. So speeds are taken over the time in which *every* rank was at work: from when the last began to when the first
was done, with steps that lie only partly in it counted by their part. All moments are of one clock, that of the machine
on which all ranks run (``time.monotonic``).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

Moments = Sequence[float]
"""When a rank began, and when each of its steps ended; rising, in seconds."""


def steps_until(moments: Moments, end_s: float) -> float:
    """Return the steps of one rank until ``end_s``; of the one under way then, the part of its time that has passed."""
    number = bisect.bisect_right(moments, end_s) - 1
    if number < 0:
        return 0.0
    if number >= len(moments) - 1:
        return float(len(moments) - 1)
    return number + (end_s - moments[number]) / (moments[number + 1] - moments[number])


def common_pace(ranks: Sequence[Moments]) -> tuple[float, float]:
    """Return the steps of a rank, on average, while all were at work, and for how many seconds that was."""
    start_s = max(moments[0] for moments in ranks)
    end_s = min(moments[-1] for moments in ranks)
    steps = [steps_until(moments, end_s) - steps_until(moments, start_s) for moments in ranks]
    return sum(steps) / len(steps), end_s - start_s


def rate(ranks: Sequence[Moments]) -> float:
    """Return the steps per second of a rank, on average, while all were at work."""
    steps, seconds = common_pace(ranks)
    return steps / seconds


def rate_between_ends(ranks: Sequence[Moments], period: int) -> float:
    """Return the same without the ends of periods: the last step of each, with the average in it, is left out.

    All ranks make ``period`` steps in a period; what is left over in the end is too.
    """
    num_steps = min(len(moments) for moments in ranks) - 1
    parts = [
        common_pace([moments[first : min(first + period, num_steps + 1)] for moments in ranks])
        for first in range(0, num_steps, period)
    ]
    return sum(steps for steps, _ in parts) / sum(seconds for _, seconds in parts)
