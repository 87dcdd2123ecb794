"""The sharded update within the backward pass: a bucket's update begins as soon as its reduce-scatter is over.

Its all-gather then goes on while gradients of other buckets still go the other way. New parameters wait beside the old
ones, which the rest of the backward pass reads, and a copy of the state waits too: ``step()`` makes both count, and a
pass that is given up leaves nothing behind. So nothing may ask for the gradients in between, nor change them.

A bucket that is full before the pass ends has a gradient for each of its parameters, on this rank at least: they are
stepped. For the others the report at the end of the pass says which are, as in :mod:`syncline.updates.sharded`. What
all ranks weigh together is summed at the beginning of the pass, not at its end.

Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (2023) step within the backward
pass to save the memory of gradients; here it hides the all-gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch

from syncline.errors import UpdateError
from syncline.runtime.work import Work
from syncline.schedule import Collective
from syncline.updates.bucket import Bucket
from syncline.updates.divided import DividedGradients
from syncline.updates.inner import all_hyperparameters
from syncline.updates.ownership import Portions
from syncline.updates.report import PendingReport
from syncline.updates.rule import Setting
from syncline.updates.sharded_updater import Readiness, ShardedUpdater
from syncline.updates.state import StateEntry, StateSource


@dataclass(slots=True, kw_only=True)
class _PendingUpdate:
    """The update that one backward pass makes, until ``step()`` or its end."""

    number: int
    options: tuple[dict[str, Any], ...]
    """Hyper-parameters of each group, as the pass began."""
    expected: float = 1.0
    weights: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    weighed: Work | None = None
    """The sum of ``weights`` over all ranks, once the first bucket has left."""
    late: list[tuple[Bucket, Work]] = field(default_factory=list)
    """What waits for the report."""
    is_complete: bool = False
    """Whether all buckets have left."""


class InBackwardUpdater(ShardedUpdater):
    """The sharded update, made within the backward pass, at work on one model."""

    steps_in_backward = True
    rule_name = "Sharded"  # not a variant whose name ends with that

    def __init__(self, setting: Setting, *, whole_parameters: bool, overlap_forward: bool, portions: Portions) -> None:
        for bucket in setting.buckets:
            bucket.step_beside()
        self._gathered = Readiness(len(setting.buckets))
        self._is_asked = [False] * len(setting.buckets)  # the update thread's alone
        self._pending: _PendingUpdate | None = None
        super().__init__(
            setting,
            whole_parameters=whole_parameters,
            overlap_forward=overlap_forward,
            portions=portions,
        )

    @property
    def divided_gradients(self) -> DividedGradients:
        """Refuse: the update has begun."""
        _refuse("a norm, scaling, clipping or GradScaler, or zero_grad(set_to_none=False),")

    def clip_grad_norm(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> torch.Tensor:  # noqa: ARG002
        """Refuse: the update has begun."""
        _refuse("clip_grad_norm_()")

    def drop(self, positions: Sequence[int]) -> None:
        """Refuse to leave out what may have been stepped already."""
        if positions:
            _refuse("setting the gradients of some parameters to None")

    def carry(self, kept: Sequence[bool]) -> None:
        """Refuse to add to gradients that may have been stepped on already; else give up what was not stepped."""
        if any(kept):
            _refuse("adding up several backward passes (gradient accumulation, or no zero_grad() after step())")
        self.discard()

    def begin_backward(self) -> None:
        """Make ready for new gradients, with the hyper-parameters as they are now."""
        self.synchronize()
        super().begin_backward()
        self._gathered.begin()
        self._pending = _PendingUpdate(number=self.step_number, options=all_hyperparameters(self.optimizer))

    def weigh(self, weight: float, expected: float) -> None:
        """Keep what turns sums into means."""
        pending = self._under_way
        pending.expected = expected
        pending.weights[0] = weight

    def reduce(self, bucket: Bucket) -> None:
        """Start the reduce-scatter of a bucket, and let its update follow: now, or after the report."""
        reduction = self._reduce(bucket)
        if bucket.has_left_early:
            self._prepare_after(bucket, reduction, None)
        else:
            self._under_way.late.append((bucket, reduction))

    def finish_backward(self, report: PendingReport) -> None:
        """Let the updates follow that wait for the report; nothing is waited for."""
        super().finish_backward(report)
        pending = self._under_way
        for bucket, reduction in pending.late:
            self._prepare_after(bucket, reduction, report)
        pending.is_complete = True

    def step(self) -> None:
        """Let the new parameters and state take the place of the old ones, each bucket as soon as it is gathered."""
        self._ready.raise_failure()
        if self._pending is None:
            _refuse("a second step() on the gradients of one backward pass")
        self._check_hyperparameters(self._pending)
        self._pending = None
        self._gradients.hand_over()
        self._ready.begin()
        for bucket in self.buckets:
            if self._checks_stale:
                bucket.poison(())  # they are stepped on beside it
            bucket.allow_step()
            self._thread.submit(bucket.index, (), partial(self._ask, bucket))
        self.step_number += 1

    def discard(self) -> None:
        """Give up the update that waits for ``step()``: parameters and state are what they were before the pass."""
        if self._pending is not None and self._pending.is_complete:
            self._gathered.wait(range(len(self.buckets)), self.collectives.timeout_s)
            for shard in self.shards:
                shard.undo()
            self._pending = None
        super().discard()

    def state_entries(self) -> list[StateEntry]:
        """Return the state of the owned elements; refused while an update waits, which has changed it already."""
        self._check_settled("The optimizer's state cannot be read")
        return super().state_entries()

    def load_state(self, source: StateSource) -> None:
        """Take the owned part of the state; refused while an update waits, which would replace it."""
        self._check_settled("The optimizer's state cannot be loaded")
        super().load_state(source)

    @property
    def _under_way(self) -> _PendingUpdate:
        assert self._pending is not None, "a pass has begun"
        return self._pending

    def _reduce(self, bucket: Bucket) -> Work:
        pending = self._under_way
        if pending.weighed is None:
            label = "weights of a backward pass"
            pending.weighed = self.collectives.control.start_sum(pending.weights, label, step=pending.number)
        bucket.stage_gradients()
        work = self.collectives.start(bucket, Collective.REDUCE_SCATTER, pending.number)
        self._gradients.add(bucket, work)
        return work

    def _prepare_after(self, bucket: Bucket, reduction: Work, report: PendingReport | None) -> None:
        pending = self._under_way
        assert pending.weighed is not None, "it began with the first bucket"
        needed = (reduction, pending.weighed, *([report.work] if report else []))
        self._thread.submit(bucket.index, needed, partial(self._prepare, pending, bucket, needed, report))

    def _prepare(
        self, pending: _PendingUpdate, bucket: Bucket, needed: Sequence[Work], report: PendingReport | None
    ) -> None:
        """Step the shard of one bucket beside the parameters, and start its all-gather; on the update thread."""
        for work in needed:
            work.wait()
        if report is None:
            num_parameters = sum(len(one.plan.slots) for one in self.buckets)
            present: Sequence[bool] = [True] * num_parameters
            correction = pending.expected / float(pending.weights[0])
        else:
            present, correction = report.present, report.correction
        bucket.unstage_gradients()
        factors = [correction] * len(present)
        self._step_shard(bucket, pending.number, pending.options, present=present, factors=factors, may_undo=True)
        gather = self.collectives.start(bucket, Collective.ALL_GATHER, pending.number)
        self._thread.submit(bucket.index, (gather,), partial(self._hold, bucket, gather))

    def _hold(self, bucket: Bucket, gather: Work) -> None:
        gather.wait()
        self._gathered.finish(bucket.index)
        self._commit_if_asked(bucket)

    def _ask(self, bucket: Bucket) -> None:
        self._is_asked[bucket.index] = True
        self._commit_if_asked(bucket)

    def _commit_if_asked(self, bucket: Bucket) -> None:
        if not (self._is_asked[bucket.index] and self._gathered.is_final((bucket.index,))):
            return
        self._is_asked[bucket.index] = False
        self.shards[bucket.index].commit()
        bucket.unstage_parameters()
        self._ready.finish(bucket.index)

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        self._gathered.fail(error)

    def _check_hyperparameters(self, pending: _PendingUpdate) -> None:
        for group, (before, now) in enumerate(zip(pending.options, all_hyperparameters(self.optimizer), strict=True)):
            changed = sorted(name for name in before.keys() | now.keys() if not _same(before.get(name), now.get(name)))
            if changed:
                name = changed[0]
                raise UpdateError(
                    f"{name} of parameter group {group} was {before.get(name)!r} when backward() began and is "
                    f"{now.get(name)!r} at step(), but Sharded(step_in_backward=True) has updated with the former; set "
                    "hyper-parameters, and step schedulers, after step() or before backward(). To go on without this "
                    "update, call optimizer.zero_grad()"
                )

    def _check_settled(self, what: str) -> None:
        if self._pending is not None and self._pending.is_complete:
            raise UpdateError(
                f"{what} between backward() and step() with Sharded(step_in_backward=True), where the update has been "
                "made in part; do so after step()"
            )


def _refuse(what: str) -> NoReturn:
    raise UpdateError(
        f"Sharded(step_in_backward=True) steps on gradients while backward() runs, so {what} cannot be served between "
        "backward() and step(); use Sharded() without step_in_backward. What backward() has prepared is dropped by "
        "optimizer.zero_grad()"
    )


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and bool((left == right).all())
    return bool(left == right)
