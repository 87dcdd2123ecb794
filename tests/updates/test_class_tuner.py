"""When the tuner opens connections, assigns classes and goes back: a model of two buckets, without ranks or sockets."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from syncline.errors import ConfigurationError
from syncline.priorities.meter import StepMeter
from syncline.priorities.settings import Priorities
from syncline.updates import class_tuner
from syncline.updates.bucket_collectives import BucketCollectives
from syncline.updates.class_tuner import ClassTuner

NUM_BYTES = (100, 100)


class RecordingCollectives:
    """Writes down what is asked of it; sums are those of a rank with a twin that measures the same."""

    rank, world_size = 0, 2

    def __init__(self) -> None:
        opened = SimpleNamespace(open=lambda _, *, only_check: self.note_opening("check" if only_check else "open"))
        self.communicator = SimpleNamespace(max_inflight_bytes=1000, connection_classes=opened)
        self.control = self
        self.trace = SimpleNamespace(instant=self.note)
        self.classes: tuple[int, ...] = (0, 0)
        self.log: list[Any] = []
        self.error: Exception | None = None

    def assign_classes(self, classes: Sequence[int], priorities: Priorities) -> None:
        self.log.append(tuple(classes))
        self.classes = tuple(classes)

    def note_opening(self, what: str) -> None:
        self.log.append(what)
        if self.error is not None:
            raise self.error

    def start_sum(self, values: torch.Tensor, label: str) -> SimpleNamespace:
        values.mul_(2)
        return SimpleNamespace(wait=lambda: None)

    def note(self, what: str, category: str, **facts: object) -> None:
        assert facts["classes"] == self.classes, "what is told has been done"


class Forward:
    """Forward passes of a model whose rear bucket is gathered first; each bucket computes for a second."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.meters: list[StepMeter] = []

    def watch(self, meter: StepMeter) -> None:
        self.meters.append(meter)

    def step(self, tuner: ClassTuner, *, wait_s: float) -> None:
        """Step, and pass forward with so long a wait for the front bucket; the rear is there by then."""
        tuner.begin_step()
        for meter in self.meters:
            meter.gather_began(1)
            self.now_s += 0.1
            meter.gather_began(0)
        tuner.end_step()
        tuner.begin_forward()
        for meter in self.meters:
            for bucket in (0, 1):
                meter.needed((bucket,))
                self.now_s += wait_s if bucket == 0 else 0.0
                for arrived in (1, 0) if bucket == 0 else ():
                    meter.gather_ended(arrived)
                meter.available((bucket,))
                self.now_s += 1.0
        tuner.end_forward()


def tuner_of(
    model: RecordingCollectives,
    forward: Forward,
    *,
    is_asked_for: bool = False,
    num_bytes: Sequence[int] = NUM_BYTES,
    **terms: Any,
) -> ClassTuner:
    priorities = Priorities(measure_steps=2, **terms)
    collectives = cast("BucketCollectives", model)
    return ClassTuner(collectives, num_bytes, priorities, is_asked_for=is_asked_for, clock=lambda: forward.now_s)


def test_nothing_is_opened_before_a_search_finds_that_several_classes_pay() -> None:
    model, forward = RecordingCollectives(), Forward()
    tuner = tuner_of(model, forward)
    tuner.tune(forward.watch)
    assert model.log == ["check"]
    for _ in range(2):
        forward.step(tuner, wait_s=4.0)
        assert model.log == ["check"]
    forward.step(tuner, wait_s=4.0)
    assert model.log == ["check", (0, 1)]
    assert tuner.statistics().is_on


def test_classes_that_do_not_hold_what_was_promised_are_given_back() -> None:
    model, forward = RecordingCollectives(), Forward()
    tuner = tuner_of(model, forward)
    tuner.tune(forward.watch)
    for _ in range(12):
        forward.step(tuner, wait_s=4.0)  # no shorter in two classes than it was in one
    assert model.log == ["check", (0, 1), (0, 0)]
    assert not tuner.statistics().is_on


def test_classes_that_do_not_pay_open_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_tuner, "MIN_GAIN", 10.0)
    model, forward = RecordingCollectives(), Forward()
    tuner = tuner_of(model, forward)
    tuner.tune(forward.watch)
    for _ in range(12):
        forward.step(tuner, wait_s=4.0)
    assert model.log == ["check", (0, 0)]


def test_what_a_user_asks_for_is_open_from_the_start() -> None:
    model, forward = RecordingCollectives(), Forward()
    tuner_of(model, forward, is_asked_for=True).tune(forward.watch)
    assert model.log == ["open"]


def test_fixed_proportions_hold_before_anything_is_measured() -> None:
    model, forward = RecordingCollectives(), Forward()
    tuner = tuner_of(model, forward, search="equal", num_classes=2, dscp=None)
    assert model.log == [(0, 1)]
    tuner.tune(forward.watch)
    for _ in range(6):
        forward.step(tuner, wait_s=4.0)
    assert model.log == [(0, 1)]
    assert not forward.meters, "there is nothing to measure"


def test_a_model_of_one_bucket_is_left_alone() -> None:
    model, forward = RecordingCollectives(), Forward()
    tuner_of(model, forward, num_bytes=(100,)).tune(forward.watch)
    assert not model.log
    assert not forward.meters


def test_what_could_not_be_opened_later_is_told_at_the_start() -> None:
    model, forward = RecordingCollectives(), Forward()
    model.error = ConfigurationError("too few files")
    with pytest.raises(ConfigurationError, match="too few files"):
        tuner_of(model, forward).tune(forward.watch)
