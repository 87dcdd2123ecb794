"""Rounds: what parties have changed by themselves becomes what all have, once every so many steps.

A *party* is a rank, or ranks that average their gradients in every step. In a round each brings how far its parameters
have moved since the last one, weighted by its samples. All moves are summed on the planner's tree, so that a link
between sites carries them once in each direction, and each party gets the sum, without holding up who computes
meanwhile:

    1. all ranks tell each other their weights and how far their parameters have moved at most; NaN shows here
    2. each bucket's moves are summed, in steps that follow from the largest

The sums begin when all have told, on a thread that is there for it or, without one, when the round is waited for. Where
nobody has moved there is nothing to sum.
:mod:`.local_steps` is a rule that is made of rounds; the period's end of the overlapped update is one, too.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from syncline.errors import UpdateError, name_ranks
from syncline.runtime.work import Work
from syncline.runtime.worker_thread import WorkerThread
from syncline.updates.bucket import Bucket, BucketPlan
from syncline.updates.control import ControlStream
from syncline.updates.flat import shares

# Sums of parameters in fixed point: whole numbers, so that their order does not matter.
#
# What each rank has moved since the period's start, times its share, is rounded to a multiple of one small step that
# all ranks agree on. Whole numbers add up to the same bits in any order and on any tree, and in a replay too. An
# element takes 4 bytes on the wire (8 for float64). The step is 2**-30 of the largest move of any rank in the bucket
# (2**-62 for float64): about what float32 itself can tell apart near a number as large as that move, and the start is
# added afterwards in float64, so what has not moved stays as it was, to the bit.


MAX_EXPONENT = 1000
"""No step is finer than 2**-1000, so that it is a float64 of full precision."""


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the whole numbers in which elements of ``dtype`` are summed."""
    return torch.int64 if dtype == torch.float64 else torch.int32


def largest_move(values: torch.Tensor, start: torch.Tensor) -> float:
    """Return the largest difference of an element; not finite if one of ``values`` is not."""
    return (
        float((values.to(torch.float64) - start.to(values.device, torch.float64)).abs().max()) if len(values) else 0.0
    )


def exponent_for(largest: Sequence[float], dtype: torch.dtype) -> int:
    """Return e for steps of 2**-e: the weighted sum of moves no larger than ``largest`` fits, with room to round up."""
    num_bits = torch.iinfo(wire_dtype(dtype)).bits - 2
    return min(MAX_EXPONENT, num_bits - math.frexp(max(largest))[1])


def to_steps(values: torch.Tensor, start: torch.Tensor, *, share: float, exponent: int) -> torch.Tensor:
    """Return ``share * (values - start)`` in steps of ``2**-exponent``, in host memory."""
    moved = values.to("cpu", torch.float64) - start.to("cpu", torch.float64)
    return moved.mul_(share).mul_(math.ldexp(1.0, exponent)).round_().to(wire_dtype(values.dtype))


def from_steps(total: torch.Tensor, start: torch.Tensor, *, exponent: int, out: torch.Tensor) -> None:
    """Write ``start`` plus the sum of all ranks' steps to ``out``, rounded once."""
    moved = total.to(torch.float64).mul_(math.ldexp(1.0, -exponent))
    out.copy_(start.to("cpu", torch.float64) + moved)


@dataclass(frozen=True, slots=True)
class Move:
    """Where parameters were when all ranks had the same, and where this rank's are now: those of a bucket or a plan."""

    bucket: Bucket | BucketPlan
    start: torch.Tensor
    values: torch.Tensor


class _Sum(NamedTuple):
    """The moves of one bucket, on their way; or, without a work, the sum that another rank had."""

    work: Work | None
    steps: torch.Tensor
    exponent: int | None
    """None: they are the moves themselves."""


class Round:
    """A round that this rank has begun; every rank begins the same one.

    ``told``: numbers of this rank that all are to see; ``start_sum`` begins to sum whole numbers of a bucket. With
    ``is_coded`` it codes float32, and is given the moves themselves. ``thread`` begins the sums as soon as all have
    told, and runs ``on_over`` when nothing is under way any more; what goes wrong there does so again for who waits.

    Where a rank is lost some may have the result and others not. Those then get it (:meth:`share`), in a job that goes
    on; what nobody has the result of is begun again among those that are left, with the same moves and weight.
    """

    def __init__(
        self,
        moves: Sequence[Move],
        *,
        weight: float,
        told: Sequence[float],
        control: ControlStream,
        start_sum: Callable[[Bucket | BucketPlan, torch.Tensor], Work],
        label: str,
        is_coded: bool = False,
        thread: WorkerThread | None = None,
        on_over: Callable[[], None] | None = None,
    ) -> None:
        self.moves = moves
        self.weight = weight
        self.told = tuple(told)
        self.control = control
        """What it was told by."""
        self._label = label
        self._is_coded = is_coded
        self._rank = control.rank
        self._start_sum = start_sum
        self._num_told = len(told)
        row = [weight, *told, *(largest_move(one.values, one.start) for one in moves)]
        self._rows = torch.zeros(control.world_size, len(row), dtype=torch.float64)
        self._rows[self._rank] = torch.tensor(row, dtype=torch.float64)
        self._telling = control.start_sum(self._rows, f"samples and moves in {label}")
        self._sums: list[_Sum] | None = None
        self._lock = threading.Lock()
        """Of whoever begins the sums."""
        if thread is not None:
            thread.submit(0, (self._telling,), partial(self._begin_early, thread, on_over))

    @property
    def weights(self) -> list[float]:
        """The weight of each rank, when all have told."""
        return self._rows[:, 0].tolist()

    @property
    def is_over(self) -> bool:
        """Whether nothing needs to be waited for."""
        return self._sums is not None and all(one.work is None or one.work.done() for one in self._sums)

    @property
    def has_result(self) -> bool:
        """Whether it is over, and nothing went wrong."""
        return self.is_over and not any(one.work is not None and one.work.exception() for one in self._sums or ())

    def wait_told(self) -> torch.Tensor:
        """Return what each rank has told, a row for each, when all have."""
        if self._sums is None:
            self._telling.wait()
        return self._rows[:, 1 : 1 + self._num_told]

    def share(self, control: ControlStream, holder: int) -> None:
        """Let all ranks of ``control`` have the result that ``holder`` has; each calls it for the same round.

        What is under way of it on this rank must have failed, or be over.
        """
        rows = self._rows.clone()
        control.start_broadcast(rows, f"what was told in {self._label}", root=holder).wait()
        sums = self._sums if self.has_result and self._sums is not None else self._empty_sums(rows)
        for one in sums:  # who has them gets the same bits
            control.start_broadcast(one.steps, f"a sum of {self._label}", root=holder).wait()
        with self._lock:
            self._rows, self._sums = rows, sums

    def wait(self) -> list[torch.Tensor]:
        """Return the mean of all ranks' parameters of each bucket; they themselves stay as they are.

        Raises :class:`UpdateError` on every rank if a parameter of any rank is not finite.
        """
        self.wait_over()
        return self.means([move.start for move in self.moves])

    def wait_over(self) -> None:
        """Wait until nothing is under way; raises as :meth:`wait` does."""
        for one in self._begin():
            if one.work is not None:
                one.work.wait()  # all of them: what a rank saves after a loss is not half a mean

    def means(self, starts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sums on top of where the parameters of each bucket began, once it is over."""
        means = [start.clone() for start in starts]
        for mean, one, start in zip(means, self._begin(), starts, strict=False):
            if one.exponent is None:
                mean.add_(one.steps.to(mean.device))
            else:
                from_steps(one.steps, start, exponent=one.exponent, out=mean)
        return means

    def _begin_early(self, thread: WorkerThread, on_over: Callable[[], None] | None) -> None:
        sums: list[_Sum] = []
        with contextlib.suppress(Exception):  # it is the same for who waits
            sums = self._begin()
        if on_over is not None:
            thread.submit(0, [one.work for one in sums if one.work is not None], on_over)

    def _begin(self) -> list[_Sum]:
        """Begin to sum when all have told, unless another thread has."""
        if self._sums is None:
            self._telling.wait()
        with self._lock:
            if self._sums is None:
                self._sums = self._start_sums()
            return self._sums

    def _start_sums(self) -> list[_Sum]:
        share, sums = shares(self.weights)[self._rank], []
        for move, exponent in zip(self.moves, self._exponents(self._rows), strict=False):
            if exponent is None:
                steps = (move.values - move.start).mul_(share).cpu()
            else:
                steps = to_steps(move.values, move.start, share=share, exponent=exponent)
            sums.append(_Sum(self._start_sum(move.bucket, steps), steps, exponent))
        return sums

    def _empty_sums(self, rows: torch.Tensor) -> list[_Sum]:
        """Return where the sums are to land that follow from what all have told."""
        sums = []
        for move, exponent in zip(self.moves, self._exponents(rows), strict=False):
            dtype = move.start.dtype if exponent is None else wire_dtype(move.start.dtype)
            sums.append(_Sum(None, torch.empty(len(move.start), dtype=dtype), exponent))
        return sums

    def _exponents(self, rows: torch.Tensor) -> list[int | None]:
        """Return in what steps each bucket's moves are summed, None for themselves; nothing if nobody has moved."""
        largest = rows[:, 1 + self._num_told :]
        _check_finite(largest)
        if not bool(largest.any()):
            return []
        dtypes = [move.start.dtype for move in self.moves]
        return [
            None if self._is_coded and dtype == torch.float32 else exponent_for(furthest, dtype)
            for dtype, furthest in zip(dtypes, largest.T.tolist(), strict=True)
        ]


def _check_finite(largest: torch.Tensor) -> None:
    culprits = [rank for rank, row in enumerate(largest) if not bool(torch.isfinite(row).all())]
    if culprits:
        raise UpdateError(
            f"Parameters of {name_ranks(culprits)} are not finite at the end of a period, so they have no mean; go on "
            "from a checkpoint with a smaller learning rate"
        )
