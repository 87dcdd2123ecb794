"""The tuner of connection classes: decides, while a model trains, which of its buckets travel on which.

All buckets begin in one class, with the sizes of one class, and no other connection is opened before a search finds
that several pay. At the end of the last step that is measured each rank starts one small sum over all ranks: its median
sample. At the following step the sum is there, equal to the bit on all ranks, so all take the same decision, and go
over to new classes, or back to one, at the same step. Connections that are missing are opened then: that is the one
time that the training thread waits here for other ranks. (Results do not depend on classes; that all change together
keeps the network as modelled.)

What is decided is a pure state machine, which goes through the same states on all ranks. A sample is the mean over
ranks of their median samples. The first one leads to a search. At each later one the forward pass is compared with what
the model promised; if they differ by more than a tenth, the search is made again with the new measurements. A
model that is off for good (it leaves out much) would be searched with every sample, so the number of measured steps
between two doubles each time that a search changes nothing, up to 64 times the first.

The last word has the measurement: if several classes were chosen and the forward pass is not 2 % faster with them
than it was in one, all goes back into one class, for good. (The model knows nothing of what a connection costs:
one that was idle for a while begins slowly, and where no switch honours marks, connections share the link.)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from syncline.priorities.forward_timing import (
    ForwardPrediction,
    ForwardProfile,
    divide_by_proportions,
    predict_forward,
    search_classes,
)
from syncline.priorities.meter import StepMeter, StepSample, median_of
from syncline.priorities.settings import Priorities
from syncline.runtime.work import Work
from syncline.updates.bucket_collectives import BucketCollectives

MAX_PATIENCE = 64
MIN_GAIN = 0.02
"""Several classes must make a forward pass faster by this part, or all buckets go in one."""
SEARCH_AGAIN_AT = 0.1
"""Forward passes differ from the model by more than this part of what it promised."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of the last search."""

    chosen: ForwardPrediction
    one_class_s: float
    """What the model says of a single class."""
    pays: bool
    """Whether several classes are better than one by :data:`MIN_GAIN`; else ``chosen`` is one class."""
    profile: ForwardProfile


class Decision:
    """Decides for one model, whose buckets have ``num_bytes``."""

    def __init__(self, priorities: Priorities, num_bytes: Sequence[int], *, backlog_bytes: int) -> None:
        self._priorities = priorities
        self._num_bytes = tuple(num_bytes)
        self._backlog_bytes = backlog_bytes
        self._patience = 1
        self.verdict: Verdict | None = None
        self.measured_s: float | None = None
        """The forward pass at the last retuning."""
        self.measured_one_class_s = 0.0
        """The forward pass when it was last measured in one class."""
        self.has_failed = False
        """Whether several classes were tried, and did not pay."""
        self.num_searches = 0

    @property
    def num_steps(self) -> int:
        """How many steps the next sample is to cover."""
        return self._priorities.measure_steps * self._patience

    def retune(self, sample: StepSample) -> bool:
        """Take a sample that is the mean over ranks; returns whether it led to a new verdict."""
        self.measured_s = sample.time_s
        if self.has_failed:
            return False
        if self.verdict is None or self.verdict.chosen.num_classes == 1:
            self.measured_one_class_s = sample.time_s
        elif sample.time_s > (1 - MIN_GAIN) * self.measured_one_class_s:
            one = predict_forward(self.verdict.profile, (0,) * len(self._num_bytes))
            self.verdict = replace(self.verdict, chosen=one, pays=False)
            self.has_failed = True
            return True
        if not self._is_off_the_model(sample.time_s):
            return False
        before = self.verdict
        self.verdict = self._search(sample)
        self.num_searches += 1
        if before is not None:
            is_new = before.chosen.classes != self.verdict.chosen.classes
            self._patience = 1 if is_new else min(MAX_PATIENCE, 2 * self._patience)
        return True

    def explain(self) -> str:
        """Say why several classes do not pay."""
        assert self.verdict is not None, "a search leaves a verdict"
        if self.has_failed:
            return (
                f"the forward pass took {self.measured_s:.4g} s with them and {self.measured_one_class_s:.4g} s in one"
            )
        return (
            f"the forward pass would take {self.verdict.one_class_s:.4g} s in one, and several would not save "
            f"{100 * MIN_GAIN:g} % of that"
        )

    def _is_off_the_model(self, seconds: float) -> bool:
        if self.verdict is None:
            return True
        promised_s = self.verdict.chosen.time_s
        return abs(seconds - promised_s) > SEARCH_AGAIN_AT * promised_s

    def _search(self, sample: StepSample) -> Verdict:
        profile = ForwardProfile(
            num_bytes=self._num_bytes,
            forward_s=tuple(max(0.0, seconds) for seconds in sample.forward_s),
            issued_s=sample.issued_s,
            bytes_per_s=sample.bytes_per_s,
            backlog_bytes=self._backlog_bytes,
        )
        one = predict_forward(profile, (0,) * profile.num_layers)
        best = search_classes(profile, self._priorities.num_classes)
        pays = best.num_classes > 1 and best.time_s <= (1 - MIN_GAIN) * one.time_s
        return Verdict(chosen=best if pays else one, one_class_s=one.time_s, pays=pays, profile=profile)


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerStatistics:
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


class ClassTuner:
    """Gives the buckets of one model, of ``num_bytes`` each, their classes: fixed ones at once, others by :meth:`tune`.

    ``is_asked_for``: the user, or the topology's file, chose these priorities: connections are opened from the start,
    and a warning says so if they do not pay.
    """

    def __init__(
        self,
        collectives: BucketCollectives,
        num_bytes: Sequence[int],
        priorities: Priorities,
        *,
        is_asked_for: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._collectives = collectives
        self._num_bytes = tuple(num_bytes)
        self._priorities = priorities
        self._is_asked_for = is_asked_for
        self._clock = clock
        self._meter: StepMeter | None = None
        self._decision = Decision(
            priorities, self._num_bytes, backlog_bytes=collectives.communicator.max_inflight_bytes
        )
        self._samples: list[StepSample] = []
        self._num_steps = 0
        self._totals = torch.empty(0, dtype=torch.float64)
        """The sum of samples over all ranks, once :attr:`_summing` is over."""
        self._summing: Work | None = None
        self._has_told = False
        if priorities.is_on and not priorities.is_searched:
            collectives.assign_classes(divide_by_proportions(self._num_bytes, priorities.proportions), priorities)

    def tune(self, watch: Callable[[StepMeter], None]) -> None:
        """Measure and search from now on, if that is wanted: ``watch`` tells a meter of each all-gather and need."""
        if not (self._priorities.is_searched and len(self._num_bytes) > 1 and self._collectives.world_size > 1):
            return
        opened = self._collectives.communicator.connection_classes
        opened.open(self._priorities, only_check=not self._is_asked_for)
        self._meter = StepMeter(self._num_bytes, self._clock)
        watch(self._meter)

    def begin_forward(self) -> None:
        """Begin to measure a forward pass that a step may follow."""
        if self._meter is not None:
            self._meter.begin_forward()

    def end_forward(self) -> None:
        """Keep what was measured."""
        sample = None if self._meter is None else self._meter.end_forward()
        if sample is not None:
            self._samples.append(sample)

    def begin_step(self) -> None:
        """Retune, if the sum of samples is there; every rank calls this before each step."""
        if self._meter is None:
            return
        self._meter.begin_step()
        if self._summing is None:
            return
        self.finish()
        *values, num_ranks = self._totals.tolist()
        if num_ranks:
            self._take(StepSample.of_values([value / num_ranks for value in values], len(self._num_bytes)))

    def end_step(self) -> None:
        """Begin the sum of samples if it is time; every rank calls this after each step."""
        self._num_steps += 1
        if self._meter is None or self._num_steps < self._decision.num_steps:
            return
        self._num_steps = 0
        width = 2 * len(self._num_bytes) + 2
        values = [*median_of(self._samples).values(), 1.0] if self._samples else [0.0] * (width + 1)
        self._samples = []
        self._totals = torch.tensor(values, dtype=torch.float64)
        self._summing = self._collectives.control.start_sum(self._totals, "retuning of connection classes")

    def finish(self) -> None:
        """Wait for a sum that is under way: a rank that leaves must not end what others still need."""
        if self._summing is not None:
            self._summing.wait()
            self._summing = None

    def statistics(self) -> TunerStatistics:
        """Return the classes, and what led to them."""
        verdict = self._decision.verdict
        if verdict is None:
            return TunerStatistics(classes=self._collectives.classes, num_bytes=self._num_bytes)
        return TunerStatistics(
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
        if not self._decision.retune(sample):
            return
        verdict = self._decision.verdict
        assert verdict is not None, "a search leaves a verdict"
        self._collectives.assign_classes(verdict.chosen.classes, self._priorities)
        self._samples = []  # the forward pass before this step was made in other classes
        self._collectives.trace.instant("connection classes", "update", classes=verdict.chosen.classes)
        if not verdict.pays and not self._has_told and self._collectives.rank == 0:
            self._has_told = True
            _log.log(
                logging.WARNING if self._is_asked_for else logging.INFO,
                "Several connection classes do not pay for this model on this network: %s. All buckets go in one class",
                self._decision.explain(),
            )
