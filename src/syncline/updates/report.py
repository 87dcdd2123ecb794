"""Step reports: what all ranks together put into a step, told by one small sum at the end of the backward pass.

A mean over samples needs the number of samples of all ranks, which nobody knows while gradients are being made. So each
rank weights its gradients by its own samples over the total that was *expected*, which is the total of the step before,
and known to all. The sum is then right up to expected / total, a factor of exactly 1 unless batch sizes changed; the
owners apply it. Thus no one waits, and half precision neither overflows nor vanishes.

The report also says which parameters got a gradient on any rank: a parameter that no rank used is not stepped, as in
one process that has all batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from syncline.errors import UpdateError
from syncline.runtime.work import Work
from syncline.updates.control import ControlStream


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What all ranks together contributed to one step."""

    correction: float
    """Factor that turns the combined gradients into the mean over all samples."""
    present: tuple[bool, ...]
    """For each parameter in buckets (by position), whether any rank had a gradient for it."""


class PendingReport:
    """A report under way."""

    def __init__(self, work: Work, totals: torch.Tensor, expected: float) -> None:
        self.work = work
        self._totals = totals
        self._expected = expected
        self._result: StepReport | None = None

    @property
    def total(self) -> float:
        """Number of samples of all ranks, once the report is there."""
        return float(self._totals[0])

    def result(self) -> StepReport:
        """Wait for the report."""
        if self._result is not None:
            return self._result
        self.work.wait()
        total, *counts = self._totals.tolist()
        if total <= 0:
            raise UpdateError(
                "A step needs at least one sample on at least one rank, but all ranks together had "
                f"{total:g}; give each step some data, or tell the weights with batch_size()"
            )
        self._result = StepReport(correction=self._expected / total, present=tuple(count > 0 for count in counts))
        return self._result


class LocalReport(PendingReport):
    """What this rank alone contributed, for rules in which no step may wait for another rank."""

    def __init__(self, num_samples: float, present: Sequence[bool]) -> None:
        self._num_samples = num_samples
        self._present = tuple(present)

    @property
    def total(self) -> float:
        """Number of samples of this rank."""
        return self._num_samples

    def result(self) -> StepReport:
        """Return it; nothing is waited for."""
        return StepReport(correction=1.0, present=self._present)


class LocalReports:
    """The reports of a model's steps where each rank steps by itself; gradients are means over its own samples."""

    def expected_total(self, num_samples: float) -> float:
        """Return the number of samples to weight this step by: its own."""
        return num_samples or 1.0

    def start(self, num_samples: float, _: float, present: Sequence[bool]) -> LocalReport:
        """Make the report of a step."""
        return LocalReport(num_samples, present)


class StepReports:
    """The reports of a model's steps, one after another."""

    def __init__(self, control: ControlStream) -> None:
        self._control = control
        self._last: PendingReport | None = None

    def expected_total(self, num_samples: float) -> float:
        """Return the number of samples to weight this step by; the same on all ranks."""
        if self._last is None:
            numbers = self._control.gather_numbers(num_samples, "samples of the first step")
            return sum(numbers) or 1.0
        self._last.work.wait()
        return self._last.total or 1.0

    def start(self, num_samples: float, expected: float, present: Sequence[bool]) -> PendingReport:
        """Begin the report of a step."""
        totals = torch.tensor([num_samples, *present], dtype=torch.float64)
        self._last = PendingReport(self._control.start_sum(totals, "report of a step"), totals, expected)
        return self._last
