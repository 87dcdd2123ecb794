"""What is measured of a step, and what follows from it: without threads, ranks or sleeps."""

from __future__ import annotations

import pytest

from syncline.priorities.meter import StepMeter, StepSample, median_of
from syncline.priorities.settings import Priorities
from syncline.updates import class_tuner
from syncline.updates.class_tuner import MAX_PATIENCE, Decision


class Clock:
    """A clock that stands still unless told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def pass_(self, seconds: float) -> None:
        self.now_s += seconds


def measured_step(meter: StepMeter, clock: Clock, *, waits: list[float], computes: list[float]) -> StepSample | None:
    """Two buckets: rear issued at once, front a second later; then a forward pass that needs one after the other."""
    meter.begin_step()
    meter.gather_began(1)
    clock.pass_(1.0)
    meter.gather_began(0)
    clock.pass_(1.0)
    meter.begin_forward()
    for bucket, (wait_s, compute_s) in enumerate(zip(waits, computes, strict=True)):
        meter.needed((bucket,))
        clock.pass_(wait_s)
        meter.gather_ended(bucket)
        meter.available((bucket,))
        clock.pass_(compute_s)
        for _ in range(2):  # a second need of the same bucket ends nothing
            meter.needed((bucket,))
            meter.available((bucket,))
    return meter.end_forward()


def test_waiting_is_not_computing() -> None:
    clock = Clock()
    sample = measured_step(StepMeter([30, 10], clock), clock, waits=[2.0, 4.0], computes=[0.5, 0.25])
    assert sample is not None
    assert sample.forward_s == (0.5, 0.25)
    assert sample.issued_s == (-1.0, -2.0)
    assert sample.time_s == 6.75
    assert sample.bytes_per_s == pytest.approx(40 / 8.5)


def test_a_second_forward_pass_of_a_step_is_not_measured() -> None:
    clock = Clock()
    meter = StepMeter([30, 10], clock)
    assert measured_step(meter, clock, waits=[1.0, 1.0], computes=[1.0, 1.0]) is not None
    meter.begin_forward()
    assert meter.end_forward() is None
    assert meter.end_forward() is None


def test_a_forward_pass_without_all_gathers_is_not_measured() -> None:
    meter = StepMeter([30, 10], Clock())
    meter.begin_step()
    meter.gather_began(0)
    meter.gather_ended(0)
    meter.begin_forward()
    assert meter.end_forward() is None


def test_time_in_which_nothing_is_under_way_does_not_count_for_the_rate() -> None:
    clock = Clock()
    meter = StepMeter([30, 10], clock)
    for bucket in (0, 1):
        meter.gather_began(bucket)
        clock.pass_(2.0)
        meter.gather_ended(bucket)
        clock.pass_(50.0)
    meter.begin_forward()
    sample = meter.end_forward()
    assert sample is not None
    assert sample.bytes_per_s == 10.0


def sample_of(*, front_s: float = 0.0, time_s: float = 1.0) -> StepSample:
    """Two buckets of 100 bytes at 100 bytes per second, issued in reverse; computing takes a second each."""
    return StepSample(forward_s=(1.0, 1.0), issued_s=(front_s, -0.1), bytes_per_s=100.0, time_s=time_s)


def test_one_disturbed_step_does_not_count() -> None:
    samples = [sample_of(time_s=seconds) for seconds in (1.0, 50.0, 1.2)]
    assert median_of(samples) == sample_of(time_s=1.2)


def test_values_survive_a_sum_over_ranks() -> None:
    assert StepSample.of_values(sample_of().values(), 2) == sample_of()


def test_classes_are_chosen_where_the_rear_holds_up_the_front() -> None:
    decision = Decision(Priorities(), (100, 100), backlog_bytes=1000)
    assert decision.retune(sample_of())
    verdict = decision.verdict
    assert verdict is not None
    assert verdict.pays
    assert verdict.chosen.classes == (0, 1)
    assert (verdict.chosen.time_s, verdict.one_class_s) == pytest.approx((3.0, 4.0), abs=0.15)


def test_one_class_is_chosen_where_several_gain_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_tuner, "MIN_GAIN", 0.5)
    decision = Decision(Priorities(), (100, 100), backlog_bytes=1000)
    assert decision.retune(sample_of())
    assert decision.verdict is not None
    assert not decision.verdict.pays
    assert decision.verdict.chosen.classes == (0, 0)


def test_it_is_searched_again_when_the_step_departs_from_the_model_and_only_then() -> None:
    decision = Decision(Priorities(), (100, 100), backlog_bytes=1000)
    decision.retune(sample_of(time_s=4.0))
    assert decision.verdict is not None
    promised_s = decision.verdict.chosen.time_s
    assert not decision.retune(sample_of(time_s=promised_s * 1.09))
    assert decision.retune(sample_of(time_s=promised_s * 1.11))
    assert decision.num_searches == 2
    assert decision.measured_s == promised_s * 1.11


def test_searches_that_change_nothing_become_rare_and_one_that_does_makes_them_frequent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(class_tuner, "MIN_GAIN", 0.0)
    decision = Decision(Priorities(measure_steps=3), (100, 100), backlog_bytes=1000)
    intervals = []
    for _ in range(9):
        decision.retune(sample_of(time_s=9.0))
        intervals.append(decision.num_steps)
    assert intervals == [3, 6, 12, 24, 48, 96, 192, 192, 192]
    assert intervals[-1] == 3 * MAX_PATIENCE
    decision.retune(sample_of(front_s=-5.0, time_s=9.0))  # now the front is issued first
    assert decision.num_steps == 3


def test_classes_that_make_no_forward_pass_faster_are_given_up_for_good() -> None:
    decision = Decision(Priorities(), (100, 100), backlog_bytes=1000)
    decision.retune(sample_of(time_s=4.0))
    assert not decision.has_failed
    assert decision.retune(sample_of(time_s=3.95))
    assert decision.has_failed
    assert decision.verdict is not None
    assert decision.verdict.chosen.classes == (0, 0)
    assert "3.95 s with them and 4 s in one" in decision.explain()
    assert not decision.retune(sample_of(time_s=9.0))
    assert decision.num_searches == 1


def test_classes_that_are_faster_stay() -> None:
    decision = Decision(Priorities(), (100, 100), backlog_bytes=1000)
    decision.retune(sample_of(time_s=4.0))
    assert not decision.retune(sample_of(time_s=3.1))
    assert not decision.has_failed
