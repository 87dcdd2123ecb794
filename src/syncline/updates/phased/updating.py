"""The update of one stage: reduce-scatter among the ranks of this side, step the own shard, all-gather.

Every rank of a side holds the same stages, each from another pair's batch. A group's gradients are weighted by its
samples before they are summed, so the sum is the mean over the union of the batches. With one pair nothing is sent.

Clipping by global norm wants the squares of all stages of all ranks before the first stage is updated: each rank sums
those of its shards, and one number of each rank is summed over the job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from syncline.errors import UpdateError
from syncline.runtime.work import Work
from syncline.runtime.worker_thread import WorkerThread
from syncline.schedule import Collective
from syncline.tensors.memory import wide
from syncline.updates.bucket import Bucket
from syncline.updates.bucket_collectives import BucketCollectives
from syncline.updates.control import ControlStream
from syncline.updates.divided import clip_factor
from syncline.updates.inner import all_hyperparameters
from syncline.updates.phased.stage_store import ShardState
from syncline.updates.shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """How many samples this group put into a pass, and (once ``work`` is done) how many all of them did."""

    own: float
    total: torch.Tensor
    work: Work

    @property
    def weight(self) -> float:
        """This group's weight in the mean."""
        total = float(self.total[0])
        if total <= 0:
            raise UpdateError(f"A step needs at least one sample in at least one pair, but all together had {total:g}")
        return self.own / total


@dataclass(slots=True, kw_only=True)
class StageGradients:
    """What a backward pass left of one stage, until its update."""

    buckets: tuple[Bucket, ...]
    samples: Samples
    options: tuple[dict[str, Any], ...]
    """Hyper-parameters of each group, as they were when the pass began."""
    present: torch.Tensor
    """For each parameter, how many groups had a gradient for it, once ``present_work`` is done."""
    present_work: Work
    step: int
    room: torch.Tensor | None
    module_buffers: Mapping[str, torch.Tensor]
    """Copies of the stage's buffers, if they are to be stored with it."""
    state: ShardState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipping:
    """Gradients are scaled to a norm of at most ``max_norm``; ``control`` is for sums over all ranks of the job."""

    max_norm: float
    control: ControlStream


class StageUpdater:
    """Updates stages on a thread of its own; ``collectives`` and its control are those of this side's ranks."""

    def __init__(
        self,
        collectives: BucketCollectives,
        optimizer: torch.optim.Optimizer,
        *,
        whole_parameters: bool,
        clipping: Clipping | None,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.norm: float | None = None
        """That of all gradients of the last step whose norm is known."""
        self._clipping = clipping
        self._squares: dict[int, float] = {}
        self._under_way: list[Work] = []
        """What stages have begun to exchange; some may be over."""
        self._collectives = collectives
        self._optimizer = optimizer
        self._whole = whole_parameters
        self._thread = WorkerThread(f"syncline-phased-update-{collectives.rank}", on_failure=on_failure)

    @property
    def awaited_ranks(self) -> list[int]:
        """The other ranks of this side, while this one exchanges gradients or parameters of a stage with them."""
        job = self._collectives.communicator
        is_waiting = not all(work.done() for work in self._under_way)
        return [member for rank, member in enumerate(job.members) if rank != job.rank] if is_waiting else []

    def count_samples(self, number: float, step: int) -> Samples:
        """Begin to sum the samples of a step; the training thread of every rank calls this once a step."""
        total = torch.tensor([number], dtype=torch.float64)
        work = self._collectives.control.start_sum(total, "samples of a pass", step=step)
        return Samples(own=number, total=total, work=work)

    def options(self) -> tuple[dict[str, Any], ...]:
        """Return the hyper-parameters of each group as they are now."""
        return all_hyperparameters(self._optimizer)

    def count_present(self, present: Sequence[bool], step: int) -> tuple[torch.Tensor, Work]:
        """Begin to count which parameters have gradients; as :meth:`count_samples`, after each backward pass."""
        counts = torch.tensor([float(one) for one in present], dtype=torch.float64)
        return counts, self._collectives.control.start_sum(counts, "gradients of a stage", step=step)

    def reduce(self, gradients: StageGradients, urgency: int, then: Callable[[], None]) -> None:
        """Begin to reduce-scatter; ``then`` runs on the update thread when this rank's shard is complete."""
        self._thread.submit(urgency, (gradients.samples.work,), partial(self._reduce, gradients, urgency, then))

    def sum_norm(self, then: Callable[[], None]) -> None:
        """Begin to sum the norm of the gradients of all ranks; ``then`` runs on the update thread when it is known."""
        assert self._clipping is not None, "nobody else asks for norms"
        squares, self._squares = self._squares, {}
        total = torch.tensor([math.fsum(squares.values())], dtype=torch.float64)
        work = self._clipping.control.start_sum(total, "norm of all gradients")

        def finish() -> None:
            work.wait()
            self.norm = math.sqrt(float(total[0]))
            then()

        self._thread.submit(0, (work,), finish)

    def own_gradients(self, gradients: StageGradients) -> dict[str, torch.Tensor]:
        """Return this rank's shard of the gradients of a stage, range by range."""
        return {
            f"{number}.{start}": bucket.gradients[start:stop]
            for number, bucket in enumerate(gradients.buckets)
            for ranges in self._collectives.bucket_schedules[bucket.index].owned
            for start, stop in ranges
        }

    def update(self, gradients: StageGradients, urgency: int, then: Callable[[], None]) -> None:
        """Step this rank's shard and begin to all-gather; ``then`` runs when all parameters are there."""
        self._thread.submit(urgency, (gradients.present_work,), partial(self._update, gradients, urgency, then))

    def close(self) -> None:
        """End the thread after what it does now."""
        self._thread.close()

    def _reduce(self, gradients: StageGradients, urgency: int, then: Callable[[], None]) -> None:
        gradients.samples.work.wait()
        weight = gradients.samples.weight
        works = []
        for bucket in gradients.buckets:
            if weight != 1.0:
                bucket.gradients.mul_(weight)
            works.append(self._collectives.start(bucket, Collective.REDUCE_SCATTER, gradients.step))
        self._begin(works)

        def finish() -> None:
            _wait(works)
            if self._clipping is not None:
                parts = self.own_gradients(gradients).values()
                self._squares[urgency] = math.fsum(_square(part) for part in parts)
            then()

        self._thread.submit(urgency, works, finish)

    def _update(self, gradients: StageGradients, urgency: int, then: Callable[[], None]) -> None:
        gradients.present_work.wait()
        trace = self._collectives.trace
        start_ns = trace.now_ns()
        present = [count > 0 for count in gradients.present.tolist()]
        factor = 1.0 if self._clipping is None or self.norm is None else clip_factor(self.norm, self._clipping.max_norm)
        shards = []
        for number, bucket in enumerate(gradients.buckets):
            owned = self._collectives.bucket_schedules[bucket.index].owned
            shard = Shard(bucket, owned, self._optimizer, whole_parameters=self._whole)
            if gradients.state is not None:
                shard.load_views(gradients.state.buckets[number])
            shard.scale([factor] * len(present))
            shard.step(gradients.options[bucket.plan.group], present)
            shards.append(shard)
        gradients.state = ShardState.of(shards)
        trace.span(f"update of stage {urgency}", "update", start_ns, trace.now_ns(), step=gradients.step)
        works = [self._collectives.start(bucket, Collective.ALL_GATHER, gradients.step) for bucket in gradients.buckets]
        self._begin(works)

        def finish() -> None:
            _wait(works)
            then()

        self._thread.submit(urgency, works, finish)

    def _begin(self, works: Sequence[Work]) -> None:
        self._under_way = [*(work for work in self._under_way if not work.done()), *works]


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def _square(part: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(part, dtype=wide(part.dtype)).abs()) ** 2
