"""A period's end with a collective, and what becomes of it where a rank is lost meanwhile and the others go on.

The collective may be over on some ranks when it fails on others. So on each rank it counts once the loop's thread has
taken note of it (:meth:`.ServerClient.end_together`), before or after it took note of the loss: either the mean is the
start of the next period, which this rank then tells the new servers, or the parameters are sent to them as they were. A
server that hears of both goes on from the later start, and gives it to those who lack it (see :mod:`.server`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from syncline.runtime.work import Work
from syncline.updates.bucket import Bucket
from syncline.updates.control import ControlStream
from syncline.updates.rounds.moves import Move, Round

# The end of a period by the planner's all-reduce, where every rank is a worker that every global gradient needs.
#
# Through servers, an end costs a link between two halves of N workers N times the parameters, as each worker sends its
# own to each server and gets the average back. On the planner's tree it costs them once. A collective has no part for a
# rank that is lost: a fleet that goes on then ends its periods through the servers, this one included. Parameters are
# replaced only when it is known that the mean counts. It is a round as :mod:`syncline.updates.rounds` has them.


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
        start_s = time.monotonic()
        under_way = Round(
            [Move(bucket, start, bucket.parameters) for bucket, start in zip(self._buckets, self._starts, strict=True)],
            weight=num_samples,
            told=[iteration, self._last_wait_s, *map(float, dropped)],
            control=self._control,
            start_sum=self._start_sum,
            label="the end of a period",
        )
        told = under_way.wait_told()
        self._last_wait_s = time.monotonic() - start_s
        self.means = under_way.wait()
        return Ends(
            num_samples=tuple(under_way.weights),
            iteration=int(told[:, 0].max()),
            last_waits_s=tuple(told[:, 1].tolist()),
            dropped=tuple(int(count) for count in told[:, 2:].sum(0)),
        )

    def finish(self) -> None:
        """Replace the parameters by their mean."""
        for mean, bucket in zip(self.means, self._buckets, strict=True):
            bucket.parameters.copy_(mean)
        self.means = []

    def _start_sum(self, bucket: Bucket, steps: torch.Tensor) -> Work:
        return self._control.start_sum(steps, f"mean of bucket {bucket.index} at the end of a period")
