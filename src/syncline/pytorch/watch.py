"""Silent trouble of a step, told once: where NaN or infinity begins, and batches that are equal, or of other sizes.

Nothing here changes what is computed: NaN goes its way through the sums, and arrives on every rank. But each rank looks
at its own gradients before they are summed, and tells with the step's report in which parameter the first one is that
is not finite; afterwards nobody could say whence it came. The look is one sum over each bucket, whose memory was
written just before: a sum is finite unless one of its terms is not, or it overflows, which a second look tells.

A warning needs a step. ``GradScaler``, ``error_if_nonfinite`` and the like make none from such gradients, and for them
these are ordinary. An overflow in the sum over ranks, of gradients that are each finite, began on no rank and is not
told.

Batches are compared by their checksums in the first two steps. Two ranks that have both in common, while the second is
not the first again (as tests and benchmarks have it), read the same data.
"""

from __future__ import annotations

import cmath
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from syncline.errors import SynclineWarning, name_ranks
from syncline.pytorch.notices import Notice
from syncline.updates.bucket import Bucket
from syncline.updates.phased.batch_check import describe_batch
from syncline.updates.private_torch import tree_leaves
from syncline.updates.report import PendingReport
from syncline.updates.rule import NonfiniteOrigin

_NUM_BATCHES = 2
"""Steps in which batches are compared; ranks that have one batch in common may have met by chance, as in a pair of
epochs."""


class StepWatch:
    """What one rank tells of its steps (``notes``), and the warnings that follow from what all have told.

    Notes of a report are the size of the batch (negative if it does not matter), and then those of :meth:`notes`.

    ``ranks`` are those that tell: all, or this one alone where steps are not common; then ``heard`` returns what others
    have told otherwise of where NaN began. ``notice`` returns what this rank was told of its end.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        rank: int,
        ranks: Sequence[int],
        notice: Callable[[], Notice] = lambda: Notice.NONE,
        heard: Callable[[], NonfiniteOrigin | None] = lambda: None,
    ) -> None:
        self._heard = heard
        self._names = {slot.position: slot.name for bucket in buckets for slot in bucket.plan.slots}
        self._rank = rank
        self._ranks = tuple(ranks)
        self._notice = notice
        self._nonfinite = 0
        self._digest: int | None = None
        self._num_told = 0
        self._told_batches: list[tuple[int, ...]] = []
        self._pending: tuple[PendingReport, int] | None = None
        self._has_warned = False
        self._has_told_sizes = False
        self._has_told_empty = False

    def see_batch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take note of what the first forward pass of a step was given."""
        if self._compares_batches and self._digest is None:
            self._digest = _digest_of([*tree_leaves(args), *tree_leaves(dict(kwargs))])

    def look(self, bucket: Bucket) -> None:
        """Find gradients that are not finite in a bucket that is complete, and not summed over ranks yet."""
        if cmath.isfinite(bucket.gradients.sum().item()):
            return
        for slot in bucket.plan.slots:
            if not bool(torch.isfinite(bucket.gradient(slot)).all()):
                self._nonfinite = max(self._nonfinite, slot.position + 1)  # the last one forward is the first backward

    def notes(self) -> list[float]:
        """Return what this rank tells of a pass, and of those before it since the last step.

        Every rank tells as many numbers.
        """
        own: list[float] = [self._nonfinite, self._notice()]
        if self._compares_batches:
            own.append(self._digest or 0)
        self._digest = None
        self._num_told += 1
        return own

    def forget(self) -> None:
        """Forget gradients that were not finite: they were dropped, or a step was made with them and told."""
        self._nonfinite = 0

    def begin_step(self, report: PendingReport | None, number: int) -> None:
        """Take note that a step is made from what ``report`` tells; warn as soon as that is known."""
        if report is not None:
            self._pending = report, number
            if report.is_done:
                self.read()

    def read(self) -> None:
        """Warn of what was found in the last step, on the ranks that it concerns and on the first; waits for it."""
        if self._pending is None:
            return
        (report, number), self._pending = self._pending, None
        self._wait(report)
        self._warn_of_an_empty_step(report, number)
        sizes, places, _, *digests = zip(*report.notes, strict=True)
        self._warn_of_unequal_batches(sizes)
        self._warn_of_nonfinite([int(place) for place in places], number)
        if digests:
            self._told_batches.append(tuple(int(digest) for digest in digests[0]))
            self._warn_of_equal_batches()

    def origin(self, report: PendingReport | None, number: int) -> str:
        """Say where NaN or infinity began in the gradients that ``report`` tells of; empty if on no rank."""
        if report is None:
            return ""
        self._wait(report)
        return self._origin([int(place) for _, place, *_ in report.notes], number)

    def notices(self, report: PendingReport) -> dict[int, Notice]:
        """Return what each rank was told of its end, by rank, if any was; waits for the report."""
        self._wait(report)
        notices = {rank: Notice(int(row[2])) for rank, row in zip(self._ranks, report.notes, strict=True)}
        return notices if any(notices.values()) else {}

    def _wait(self, report: PendingReport) -> None:
        """Wait for a report; of an elastic job, it may be that of fewer ranks."""
        if not report.is_done:
            report.wait()
        if report.ranks is not None and report.ranks != self._ranks:
            self._ranks, self._told_batches = report.ranks, []

    @property
    def _compares_batches(self) -> bool:
        return self._num_told < _NUM_BATCHES and len(self._ranks) > 1

    def _warn_of_an_empty_step(self, report: PendingReport, number: int) -> None:
        """Say that a step has changed nothing, as no rank had gradients."""
        if self._has_told_empty or not report.is_empty or self._rank != self._ranks[0]:
            return
        self._has_told_empty = True
        _warn(
            f"Step {number} changed nothing, as no rank had run a backward pass of some weight before it: no gradient "
            "reached a parameter that was given to distribute() (was the module called that was given? was backward() "
            "called on what it returned?), or batch_size() said 0 everywhere",
        )

    def _warn_of_unequal_batches(self, sizes: Sequence[float]) -> None:
        """Say how ranks with batches of different sizes can be weighted, if nobody said how they are."""
        known = {size for size in sizes if size >= 0}
        if self._has_told_sizes or len(known) < 2 or self._rank != self._ranks[0]:
            return
        self._has_told_sizes = True
        _warn(
            f"The ranks' batches differ ({min(known):g} to {max(known):g} samples), and each rank counts alike, as "
            'in DistributedDataParallel; distribute(..., samples="batch") or syncline.batch_size(n) weighs by '
            "samples, samples=lambda *_, **__: 1 says that it is meant so",
        )

    def _warn_of_nonfinite(self, places: Sequence[int], number: int) -> None:
        began = [rank for rank, place in zip(self._ranks, places, strict=True) if place]
        has_heard = self._rank == 0 and self._heard_by(number) is not None
        if not (began or has_heard) or self._has_warned:
            return
        self._has_warned = True
        if self._rank in {*began, self._ranks[0]}:
            _warn(
                f"{self._origin(places, number)}; the step was made with it, as in DDP. Look at that rank's batch and "
                "loss; torch.autograd.set_detect_anomaly(True) finds the operation",
            )

    def _heard_by(self, number: int) -> NonfiniteOrigin | None:
        """Return where another rank has told that NaN began, in this step or before."""
        heard = self._heard()
        return heard if heard is not None and heard.step <= number else None

    def _origin(self, places: Sequence[int], number: int) -> str:
        began = {rank: place for rank, place in zip(self._ranks, places, strict=True) if place}
        heard = self._heard_by(number)
        if heard is not None:
            place = f"rank {heard.rank} at step {heard.step}, first in parameter {self._names[heard.position]!r}"
            reached = f", and reached those of rank {self._rank} by step {number}" if began else ""
            return f"NaN or infinity began in the gradients of {place}{reached}"
        if not began:
            return ""
        first = min(began)
        others = f" ({name_ranks(began)} have some)" if len(began) > 1 else ""
        name = self._names[began[first] - 1]
        place = f"rank {first} at step {number}, first in parameter {name!r}{others}"
        return f"NaN or infinity began in the gradients of {place}"

    def _warn_of_equal_batches(self) -> None:
        if len(self._told_batches) < _NUM_BATCHES or self._rank != self._ranks[0]:
            return
        having: dict[tuple[int, ...], list[int]] = {}
        for rank, batches in zip(self._ranks, zip(*self._told_batches, strict=True), strict=True):
            if all(batches) and len(set(batches)) == _NUM_BATCHES:
                having.setdefault(batches, []).append(rank)
        for equal in having.values():
            if len(equal) > 1:
                _warn(
                    f"{name_ranks(equal).capitalize()} were given the same first batches, bit for bit, so they compute "
                    "the same gradients; give each rank a part of the data of its own: "
                    "DataLoader(dataset, sampler=syncline.data.sampler(dataset)), or another seed on each rank",
                )


def _warn(text: str) -> None:
    warnings.warn(text, SynclineWarning, stacklevel=3)


def _digest_of(leaves: Sequence[Any]) -> int:
    """Return a checksum of ``leaves``; 0 if none is a tensor that has one."""
    if not any(isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided for leaf in leaves):
        return 0
    try:
        return describe_batch(leaves)[1]
    except RuntimeError:  # tensors without memory, as in a function that torch.func transforms
        return 0
