"""From what all ranks have measured to classes: a pure state machine, which goes through the same states on all ranks.

A sample is the mean over ranks of their median samples. The first one leads to a search. At each later one the forward
pass is compared with what the model promised; if they differ by more than ``research_at``, the search is made again
with the new measurements. A model that is off for good (it leaves out much) would be searched with every sample, so the
number of measured steps between two doubles each time that a search changes nothing, up to 64 times the first.

The last word has the measurement: if several classes were chosen and the forward pass is not ``min_gain`` faster with
them than it was in one, all goes back into one class, for good. (The model knows nothing of what a connection costs:
one that was idle for a while begins slowly, and where no switch honours marks, connections share the link.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from syncline.priorities.class_search import search_classes
from syncline.priorities.forward_timing import ForwardPrediction, ForwardProfile, predict_forward
from syncline.priorities.meter import StepSample
from syncline.priorities.settings import Priorities

MAX_PATIENCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of the last search."""

    chosen: ForwardPrediction
    one_class_s: float
    """What the model says of a single class."""
    pays: bool
    """Whether several classes are ``min_gain`` better than one; else ``chosen`` is one class."""
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
    def min_gain(self) -> float:
        """By what share several classes must be better than one."""
        return self._priorities.min_gain

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
        elif sample.time_s > (1 - self.min_gain) * self.measured_one_class_s:
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
            f"{100 * self.min_gain:.3g} % of that"
        )

    def _is_off_the_model(self, seconds: float) -> bool:
        if self.verdict is None:
            return True
        promised_s = self.verdict.chosen.time_s
        return abs(seconds - promised_s) > self._priorities.research_at * promised_s

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
        pays = best.num_classes > 1 and best.time_s <= (1 - self._priorities.min_gain) * one.time_s
        return Verdict(chosen=best if pays else one, one_class_s=one.time_s, pays=pays, profile=profile)
