"""The end of a period by the planner's all-reduce, where every rank is a worker that every global gradient needs.

Through servers, an end costs a link between two halves of N workers N times the parameters, as each worker sends its
own to each server and gets the average back. On the planner's tree it costs them once. A collective has no part for a
rank that is lost: a fleet that goes on then ends its periods through the servers, this one included. Parameters are
replaced only when it is known that the mean counts. What the sums are made of, and why they have the same bits
everywhere, is in :mod:`.fixed_point`.

    1. all ranks tell each other their samples and how far their parameters have moved (this also waits for the last)
    2. each bucket's moves are summed
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from syncline.errors import UpdateError
from syncline.runtime.work import Work
from syncline.updates.bucket import Bucket
from syncline.updates.control import ControlStream
from syncline.updates.flat import shares
from syncline.updates.overlapped.fixed_point import exponent_for, from_steps, largest_move, to_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What all ranks said of the period's end, in rank order."""

    num_samples: tuple[float, ...]
    iteration: int
    """The furthest that a rank has come since the start of the training."""
    last_waits_s: tuple[float, ...]
    """How long each waited for the others when the period before this one ended: the last to come, hardly."""
    dropped: tuple[int, ...]
    """Gradients of each rank that the servers had dropped."""

    def last_to_come(self, least_s: float) -> tuple[int, ...]:
        """Return who kept others waiting for ``least_s`` or longer when the period before this one ended."""
        last = min(range(len(self.last_waits_s)), key=self.last_waits_s.__getitem__)
        return (last,) if max(self.last_waits_s) - self.last_waits_s[last] >= least_s else ()


class TreeMean:
    """Makes parameters their mean over all ranks, weighted by samples; every rank calls it at the same point."""

    def __init__(self, control: ControlStream, buckets: Sequence[Bucket]) -> None:
        self._control = control
        self._buckets = buckets
        self._starts = [torch.empty_like(bucket.parameters) for bucket in buckets]
        self._last_wait_s = 0.0
        self.means: list[torch.Tensor] = []
        """Of each bucket, after :meth:`sum`."""

    def begin(self) -> None:
        """Take note of the parameters that a period begins with, the same on all ranks."""
        for start, bucket in zip(self._starts, self._buckets, strict=True):
            start.copy_(bucket.parameters)

    def sum(self, *, num_samples: float, iteration: int, dropped: Sequence[int]) -> Ends:
        """Make the mean; ``dropped`` counts, for each rank, what the servers here dropped. Parameters stay as they are.

        Raises :class:`UpdateError` on every rank if a parameter of any rank is not finite.
        """
        moves = [largest_move(bucket.parameters, start) for bucket, start in self._pairs()]
        start_s = time.monotonic()
        rows = self._tell([num_samples, iteration, self._last_wait_s, *map(float, dropped), *moves])
        self._last_wait_s = time.monotonic() - start_s
        num_ranks = self._control.world_size
        told_moves = rows[:, 3 + num_ranks :]
        self._check_finite(told_moves)
        share = shares(rows[:, 0].tolist())[self._control.rank]
        self._sum(share, told_moves)
        return Ends(
            num_samples=tuple(rows[:, 0].tolist()),
            iteration=int(rows[:, 1].max()),
            last_waits_s=tuple(rows[:, 2].tolist()),
            dropped=tuple(int(count) for count in rows[:, 3 : 3 + num_ranks].sum(0)),
        )

    def finish(self) -> None:
        """Replace the parameters by their mean."""
        for mean, bucket in zip(self.means, self._buckets, strict=True):
            bucket.parameters.copy_(mean)
        self.means = []

    def _pairs(self) -> list[tuple[Bucket, torch.Tensor]]:
        return list(zip(self._buckets, self._starts, strict=True))

    def _tell(self, row: list[float]) -> torch.Tensor:
        rows = torch.zeros(self._control.world_size, len(row), dtype=torch.float64)
        rows[self._control.rank] = torch.tensor(row, dtype=torch.float64)
        return self._control.sum(rows, "samples and moves at the end of a period")

    def _sum(self, share: float, moves: torch.Tensor) -> None:
        under_way: list[tuple[Work, torch.Tensor, int]] = []
        for position, (bucket, start) in enumerate(self._pairs()):
            exponent = exponent_for(moves[:, position].tolist(), bucket.plan.dtype)
            steps = to_steps(bucket.parameters, start, share=share, exponent=exponent)
            label = f"mean of bucket {bucket.index} at the end of a period"
            under_way.append((self._control.start_sum(steps, label), steps, exponent))
        for work, _, _ in under_way:
            work.wait()  # all of them: what a rank saves after a loss is not half a mean
        self.means = [torch.empty_like(start) for start in self._starts]
        for (_, steps, exponent), start, mean in zip(under_way, self._starts, self.means, strict=True):
            from_steps(steps, start, exponent=exponent, out=mean)

    @staticmethod
    def _check_finite(moves: torch.Tensor) -> None:
        culprits = [rank for rank, row in enumerate(moves) if not bool(torch.isfinite(row).all())]
        if culprits:
            raise UpdateError(
                f"Parameters of rank {', '.join(map(str, culprits))} are not finite at the end of a period, so they "
                "have no mean; go on from a checkpoint with a smaller learning rate"
            )
