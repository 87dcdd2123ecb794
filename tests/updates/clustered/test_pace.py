import pytest

from syncline.machines.features import summarise
from syncline.updates.clustered.grouping import Pace


class Clock:
    """Tells the time that it is set to."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def warm(clock: Clock) -> Pace:
    """Return what has one period behind it, in which all took long."""
    pace = Pace(clock)
    pace.began()
    clock.now_s += 10_000.0
    pace.computed(is_batch=True)
    pace.end_period()
    assert "batch_s" not in summarise(pace.history)
    return pace


def test_a_batchs_own_time_leaves_out_what_others_took() -> None:
    clock = Clock()
    pace = warm(clock)
    for own_s, waited_s in ((2.0, 0.0), (4.0, 30.0)):
        pace.began()
        clock.now_s += own_s + waited_s
        pace.waited(waited_s)
        pace.computed(is_batch=True)
        clock.now_s += 50.0  # until the mean is there
    pace.end_period()
    pace.end_period()
    assert [period.get("batch_s") for period in pace.history] == [None, pytest.approx(3.0), None]
    assert summarise(pace.history)["batch_s"] == pytest.approx(3.0)
    assert summarise(pace.history)["available_memory_bytes"] > 0


def test_periods_count_alike_and_one_without_a_batch_says_nothing_of_it() -> None:
    clock = Clock()
    pace = warm(clock)
    for own_s in (1.0, None, 5.0):
        pace.began()
        clock.now_s += own_s or 1000.0
        pace.computed(is_batch=own_s is not None)
        pace.end_period()
    assert summarise(pace.history)["batch_s"] == pytest.approx(3.0)
