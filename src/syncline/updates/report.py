"""Step reports: what all ranks together put into a backward pass, told by one small sum at its end.

A weighted mean over ranks needs the total of the weights, which nobody knows while gradients are being made. So each
rank weights its gradients by its own weight over the total that was *expected*, which is the total of the pass before,
and known to all. The sum is then right up to expected / total, a factor of exactly 1 unless weights changed; the
owners apply it. Thus no one waits, and half precision neither overflows nor vanishes.

The report also says which parameters got a gradient on any rank: a parameter that no rank used is not stepped, as in
one process that has all batches; where no rank had any weight, none is. And it carries notes: a few numbers of each
rank for the eyes of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from syncline.runtime.work import Work
from syncline.updates.control import ControlStream

Notes = tuple[tuple[float, ...], ...]
"""By rank, the numbers that it wanted all to see."""


class PendingReport:
    """A report under way: ``totals`` become the total weight, a count for each parameter, and a table of notes."""

    ranks: tuple[int, ...] | None = None
    """The job's numbers of the ranks that tell it, where these may change; each has a row of the notes."""

    def __init__(self, work: Work, totals: torch.Tensor, expected: float, *, num_notes: int, world_size: int) -> None:
        self.work = work
        self._totals = totals
        self._expected = expected
        self._num_noted = num_notes * world_size
        self._num_notes = num_notes

    @property
    def total(self) -> float:
        """Weight of all ranks together, once the report is there."""
        return float(self._totals[0])

    @property
    def is_empty(self) -> bool:
        """Whether no rank had a backward pass of some weight, once the report is there."""
        return self.total <= 0

    @property
    def is_done(self) -> bool:
        """Whether it is there, and nothing went wrong."""
        return self.work.done() and self.work.exception() is None

    @property
    def notes(self) -> Notes:
        """The notes of each rank, once the report is there."""
        if not self._num_notes:
            return ()
        return tuple(tuple(row) for row in self._totals[-self._num_noted :].view(-1, self._num_notes).tolist())

    def wait(self) -> None:
        """Wait until it is there."""
        self.work.wait()

    def commit(self) -> None:
        """In an elastic job: tell it, now that all reductions of the pass are over here, and wait for the others'.

        Raises what a collective does if a rank is lost; if the others have it nevertheless, it :attr:`is_done` after
        the recovery, and else this is called again. Once it is done every member has all reductions of the pass.
        """
        raise NotImplementedError

    @property
    def correction(self) -> float:
        """Factor that turns the combined gradients into the weighted mean over ranks; waits for the report."""
        self.wait()
        return 1.0 if self.is_empty else self._expected / self.total

    @cached_property
    def present(self) -> tuple[bool, ...]:
        """For each parameter in buckets (by position), whether any rank had a gradient for it; waits for the report."""
        self.wait()
        total, *counts = self._totals[: len(self._totals) - self._num_noted].tolist()
        return tuple(total > 0 < count for count in counts)


class LocalReport(PendingReport):
    """What this rank alone contributed, for rules in which no step may wait for another rank."""

    notes: Notes = ()
    is_done = True
    is_empty = False
    """Others may have one."""
    correction = 1.0

    def __init__(self, weight: float, present: Sequence[bool], notes: Sequence[float]) -> None:
        self.notes = (tuple(notes),)
        self._weight = weight
        self.present = tuple(present)

    @property
    def total(self) -> float:
        """Weight of this rank."""
        return self._weight


class LocalReports:
    """The reports of a model's passes where each rank steps by itself; gradients are its own."""

    def expected_total(self, weight: float) -> float:
        """Return the weight to divide this pass's by: its own."""
        return weight or 1.0

    def start(
        self,
        weight: float,
        _: float,
        present: Sequence[bool],
        notes: Sequence[float],
        *,
        step: int,  # noqa: ARG002 - no call is made that could be named by it
    ) -> LocalReport:
        """Make the report of a pass; nobody else sees the notes."""
        return LocalReport(weight, present, notes)


class StepReports:
    """The reports of a model's passes, one after another."""

    def __init__(self, control: ControlStream) -> None:
        self._control = control
        self._last: PendingReport | None = None

    def expected_total(self, weight: float) -> float:
        """Return the total to weight this pass by; the same on all ranks."""
        if self._last is None:
            return sum(self._control.gather_numbers(weight, "weights of the first backward pass")) or 1.0
        self._last.wait()
        return self._last.total or 1.0

    def start(
        self, weight: float, expected: float, present: Sequence[bool], notes: Sequence[float], *, step: int
    ) -> PendingReport:
        """Begin the report of a pass for ``step``; every rank gives as many notes."""
        world_size, num_notes = self._control.world_size, len(notes)
        totals = encode(self._control, weight, present, notes)
        work = self._control.start_sum(totals, "report of a backward pass", step=step)
        self._last = PendingReport(work, totals, expected, num_notes=num_notes, world_size=world_size)
        return self._last


def encode(control: ControlStream, weight: float, present: Sequence[bool], notes: Sequence[float]) -> torch.Tensor:
    """Return one rank's part of the sum that a report is: weight, which parameters have a gradient, table of notes."""
    num_notes = len(notes)
    first = 1 + len(present) + control.rank * num_notes
    totals = torch.zeros(1 + len(present) + control.world_size * num_notes, dtype=torch.float64)
    totals[: 1 + len(present)] = torch.tensor([weight, *present], dtype=torch.float64)
    totals[first : first + num_notes] = torch.tensor(notes, dtype=torch.float64)
    return totals
