"""Reports of passes in an elastic job: each is told when the reductions of its pass are over, and commits it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from syncline.elastic.calls import ElasticCall, ElasticControlStream
from syncline.updates.report import Notes, PendingReport, StepReports, encode

Flags = tuple[int, int]
"""What the first member tells of newcomers: the attempt that is under way, and the one to which all switch now."""
NUM_FLAGS = 2
NO_FLAGS: Flags = (0, 0)


class CommitReport(PendingReport):
    """A report that is not under way until :meth:`commit`."""

    def __init__(
        self,
        control: ElasticControlStream,
        own: tuple[float, tuple[bool, ...], tuple[float, ...]],
        expected: float,
        *,
        on_commit: Callable[[ElasticCall], None],
        flags: Callable[[], Flags],
    ) -> None:
        self._control = control
        self._own = own
        self._on_commit = on_commit
        self._own_flags = flags
        self._call: ElasticCall | None = None
        self._stream: int | None = None
        """That of the epoch in which it was told."""
        self._expected = expected
        self._num_notes = len(own[2]) + NUM_FLAGS
        self._num_noted = 0
        self._totals = torch.empty(0)
        self._result = None

    @property
    def is_done(self) -> bool:
        """Whether the pass is committed."""
        if self._call is None or not self._call.is_complete:
            return False
        self._totals = self._call.tensor
        return True

    def wait(self) -> None:
        """Return when the pass is committed: who asks comes after that."""
        assert self.is_done, "a pass is committed before anybody reads its report"

    @property
    def notes(self) -> Notes:
        """The notes of each rank, without the flags."""
        return tuple(row[:-NUM_FLAGS] for row in super().notes)

    @property
    def flags(self) -> Flags:
        """What the first member has told beside its notes; zeros while the pass is not committed.

        Zeros too once members are lost: an attempt that was theirs is over.
        """
        if not self.is_done or self._stream != self._control.number:
            return NO_FLAGS
        begun, decided = super().notes[0][-NUM_FLAGS:]
        return int(begun), int(decided)

    def commit(self) -> None:
        """Tell it, and wait until all members have."""
        if self._call is None or self._call.is_abandoned:
            self._call = self._control.start_commit(self._make, "report of a backward pass")
        self._call.wait_in_epoch()
        self._on_commit(self._call)

    def _make(self) -> torch.Tensor:
        self.ranks, self._stream = self._control.members, self._control.number
        self._num_noted = self._num_notes * len(self.ranks)
        weight, present, notes = self._own
        return encode(self._control, weight, present, (*notes, *self._own_flags()))


class ElasticReports(StepReports):
    """The reports of a model's passes in an elastic job; ``on_commit`` is told of each that is committed."""

    def __init__(
        self, control: ElasticControlStream, on_commit: Callable[[ElasticCall], None], flags: Callable[[], Flags]
    ) -> None:
        super().__init__(control)
        self._elastic = control
        self._on_commit = on_commit
        self._own_flags = flags

    @property
    def flags(self) -> Flags:
        """What the first member has told with the last pass."""
        return self._last.flags if isinstance(self._last, CommitReport) else NO_FLAGS

    def start(
        self,
        weight: float,
        expected: float,
        present: Sequence[bool],
        notes: Sequence[float],
        *,
        step: int,  # noqa: ARG002 - a call that outlives an epoch may be of a later step's
    ) -> PendingReport:
        """Make the report of a pass; :meth:`CommitReport.commit` tells it."""
        own = weight, tuple(present), tuple(notes)
        self._last = CommitReport(self._elastic, own, expected, on_commit=self._on_commit, flags=self._own_flags)
        return self._last
