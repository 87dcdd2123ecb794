"""Tunes the buckets of one model to connection classes while it trains; the training thread is never held up for it.

At the end of the last step of a review each rank starts one small sum over all ranks: its median sample. At the
following step the sum is there, equal to the bit on all ranks, so all take the same decision and go over to the new
classes at the same step. (Results do not depend on classes; that all change together keeps the wire as modelled.)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from syncline.runtime.work import Work
from syncline.topology.priorities import Priorities
from syncline.updates.bucket import Bucket
from syncline.updates.bucket_collectives import BucketCollectives
from syncline.updates.class_tuning.decision import Decision
from syncline.updates.class_tuning.meter import StepMeter, StepSample, median_of

_log = logging.getLogger(__name__)

Wait = Callable[[Iterable[int]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassStatistics:
    """Which bucket is in which class, and why; times are those of the last search, None if there was none."""

    classes: tuple[int, ...]
    num_bytes: tuple[int, ...]
    """Size of each bucket."""
    forward_s: tuple[float, ...] | None = None
    """Measured computing time of each bucket's modules, the mean over ranks."""
    arrivals_s: tuple[float, ...] | None = None
    """When the model lets each bucket arrive, counted from the beginning of the forward pass."""
    predicted_s: float | None = None
    """The forward pass in the model."""
    one_class_s: float | None = None
    """The same with a single class."""
    measured_s: float | None = None
    """The forward pass as last measured."""
    num_searches: int = 0

    @property
    def is_on(self) -> bool:
        """Whether several classes are used."""
        return len(set(self.classes)) > 1


class Untuned:
    """Classes that stay as they were assigned: fixed proportions, or one class for all."""

    def __init__(self, collectives: BucketCollectives, buckets: Iterable[Bucket]) -> None:
        self._num_bytes = tuple(bucket.plan.num_bytes for bucket in buckets)
        self._collectives = collectives

    def begin_forward(self) -> None:
        """Nothing is measured."""

    def end_forward(self) -> None:
        """Nothing is measured."""

    def wait(self, buckets: Iterable[int], wait: Wait) -> None:
        """Wait for buckets."""
        wait(buckets)

    def begin_step(self) -> None:
        """Nothing changes."""

    def end_step(self) -> None:
        """Nothing is reviewed."""

    def finish(self) -> None:
        """Nothing is under way."""

    def statistics(self) -> ClassStatistics:
        """Return the classes."""
        return ClassStatistics(classes=self._collectives.classes, num_bytes=self._num_bytes)


class ClassTuner(Untuned):
    """Measures, agrees, searches; all buckets are in one class until then.

    ``is_asked_for``: the user chose these priorities themselves, so that they are warned if they do not pay.
    """

    def __init__(
        self, collectives: BucketCollectives, buckets: Iterable[Bucket], priorities: Priorities, *, is_asked_for: bool
    ) -> None:
        super().__init__(collectives, buckets)
        self._level = logging.WARNING if is_asked_for else logging.INFO
        self._meter = StepMeter(self._num_bytes, time.monotonic)
        backlog_bytes = collectives.communicator.max_inflight_bytes
        self._decision = Decision(priorities, self._num_bytes, backlog_bytes=backlog_bytes)
        self._samples: list[StepSample] = []
        self._num_steps = 0
        self._pending: tuple[Work, torch.Tensor] | None = None
        self._has_told = False
        collectives.watch_gathers(self._meter.gather_began, self._meter.gather_ended)

    def begin_forward(self) -> None:
        """Begin to measure a forward pass that a step may follow."""
        self._meter.begin_forward()

    def end_forward(self) -> None:
        """Keep what was measured."""
        sample = self._meter.end_forward()
        if sample is not None:
            self._samples.append(sample)

    def wait(self, buckets: Iterable[int], wait: Wait) -> None:
        """Wait for buckets, and note what was computed before."""
        self._meter.wait(buckets, wait)

    def begin_step(self) -> None:
        """Take a review that is there; every rank calls this before each step."""
        self._meter.begin_step()
        if self._pending is None:
            return
        work, totals = self._pending
        self._pending = None
        work.wait()
        *values, num_ranks = totals.tolist()
        if num_ranks:
            self._take(StepSample.of_values([value / num_ranks for value in values], len(self._num_bytes)))

    def end_step(self) -> None:
        """Begin a review if it is time; every rank calls this after each step."""
        self._num_steps += 1
        if self._num_steps < self._decision.num_steps:
            return
        self._num_steps = 0
        width = 2 * len(self._num_bytes) + 2
        values = [*median_of(self._samples).values(), 1.0] if self._samples else [0.0] * (width + 1)
        self._samples = []
        totals = torch.tensor(values, dtype=torch.float64)
        self._pending = self._collectives.control.start_sum(totals, "review of connection classes"), totals

    def finish(self) -> None:
        """Wait for a review that is under way: a rank that leaves must not end what others still need."""
        if self._pending is not None:
            self._pending[0].wait()
            self._pending = None

    def statistics(self) -> ClassStatistics:
        """Return the classes, and what led to them."""
        verdict = self._decision.verdict
        if verdict is None:
            return super().statistics()
        return ClassStatistics(
            classes=self._collectives.classes,
            num_bytes=self._num_bytes,
            forward_s=verdict.profile.forward_s,
            arrivals_s=verdict.chosen.arrivals_s,
            predicted_s=verdict.chosen.time_s,
            one_class_s=verdict.one_class_s,
            measured_s=self._decision.measured_s,
            num_searches=self._decision.num_searches,
        )

    def _take(self, sample: StepSample) -> None:
        if not self._decision.review(sample):
            return
        verdict = self._decision.verdict
        assert verdict is not None, "a search leaves a verdict"
        self._collectives.assign_classes(verdict.chosen.classes)
        self._samples = []  # the forward pass before this step was made in other classes
        self._collectives.trace.instant("connection classes", "update", classes=verdict.chosen.classes)
        if not verdict.pays and not self._has_told and self._collectives.rank == 0:
            self._has_told = True
            _log.log(
                self._level,
                "Several connection classes do not pay for this model on this network: %s. All buckets go in one class",
                self._decision.explain(),
            )
