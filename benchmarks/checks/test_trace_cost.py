"""What a trace that is off costs in every collective."""

from __future__ import annotations

import timeit
from collections.abc import Callable

from syncline.observe import Trace

LIMIT_S = 2e-6
"""A microsecond, and as much for the call of the lambda."""


def test_a_trace_that_is_off_costs_less_than_a_microsecond(say: Callable[[str], None]) -> None:
    trace = Trace()
    seconds = min(timeit.repeat(lambda: trace.span("x", "compute", 0, 1, step=1), number=10_000, repeat=5)) / 10_000
    say(f"{seconds * 1e9:.0f} ns with the lambda (less than {LIMIT_S * 1e9:.0f})")
    assert seconds < LIMIT_S
