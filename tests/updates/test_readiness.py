"""What a meter of steps hears of parameters, and in which order; the clock is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from syncline.errors import UpdateError
from syncline.priorities.meter import StepMeter
from syncline.updates.sharded_updater import Readiness


class Clock:
    """A clock that stands still unless told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def measured(clock: Clock, ready: Readiness) -> StepMeter:
    """Let a meter watch; the only bucket is gathered from 1 to 2 s, and needed 3 s after the forward pass began."""
    meter = StepMeter([100], clock)
    ready.watch(meter)
    ready.begin()
    clock.now_s = 1.0
    ready.gather(0)
    meter.begin_forward()
    clock.now_s = 4.0
    return meter


def test_a_wait_counts_as_waiting_and_its_end_as_the_arrival() -> None:
    clock = Clock()

    @contextmanager
    def waiting() -> Iterator[None]:
        clock.now_s = 9.0
        ready.finish(0)  # as another thread does
        yield

    ready = Readiness(1, waiting)
    meter = measured(clock, ready)
    ready.wait((0,), 5.0)
    clock.now_s = 11.0
    sample = meter.end_forward()
    assert sample is not None
    assert sample.forward_s == (5.0,), "3 s before the first need count for the first bucket, and 2 s after it"
    assert sample.issued_s == (0.0,)
    assert sample.bytes_per_s == 100 / 8.0
    assert sample.time_s == 10.0


def test_parameters_that_are_there_are_needed_too_but_not_waited_for() -> None:
    clock = Clock()

    def waiting() -> None:
        raise AssertionError("nobody waits")

    ready = Readiness(1, waiting)  # type: ignore[arg-type]
    meter = measured(clock, ready)
    ready.finish(0)
    ready.wait((0,), 5.0)
    sample = meter.end_forward()
    assert sample is not None
    assert sample.forward_s == (3.0,)


def test_what_another_thread_needs_is_no_part_of_the_forward_pass() -> None:
    clock = Clock()
    ready, meter = Readiness(2), StepMeter([100, 100], clock)
    ready.watch(meter)
    meter.begin_forward()
    for bucket in (0, 1):
        ready.gather(bucket)
        ready.finish(bucket)
    clock.now_s = 3.0
    other = threading.Thread(target=ready.wait, args=((1,), 5.0))
    other.start()
    other.join()
    clock.now_s = 5.0
    ready.wait((0,), 5.0)
    clock.now_s = 6.0
    sample = meter.end_forward()
    assert sample is not None
    assert sample.forward_s == (6.0, 0.0), "one stretch of computing, to which the other thread put no end"


def test_the_backstop_says_that_the_fault_is_of_this_very_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.updates.sharded_updater.GRACE_S", 0.0)
    ready = Readiness(2)
    ready.begin()
    ready.finish(1)
    with pytest.raises(UpdateError, match=r"own update thread does not go on \(buckets \[0\]\)"):
        ready.wait((0, 1), 0.01)


def test_a_wait_ends_with_the_failure_and_not_at_the_deadline_of_the_collective_beneath() -> None:
    ready = Readiness(1)
    ready.begin()
    failing = threading.Timer(0.05, ready.fail, args=(KeyError("first"),))
    failing.start()
    with pytest.raises(KeyError, match="first"):
        ready.wait((0,), 0.001)
    failing.join()
