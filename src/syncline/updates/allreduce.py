"""The all-reduce update: every rank gets the mean gradient and steps the whole model, as in DistributedDataParallel.

The all-reduce of a bucket runs under the rest of the backward pass; ``backward()`` returns when all are over, and then
``p.grad`` is the mean over all samples of all ranks, so whatever looks at gradients works unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from syncline.arguments import Count, check_fields
from syncline.errors import UpdateError
from syncline.runtime.work import Work
from syncline.schedule import Collective
from syncline.updates.bucket import DEFAULT_BUCKET_BYTES, Bucket
from syncline.updates.combinations import (
    COMPRESSED,
    ELASTIC_WITH_HELPERS,
    LEAVING,
    NOBODY_WAITS,
    WHOLE_STATE,
    Combination,
)
from syncline.updates.compression import Compress, compress
from syncline.updates.elastic_calls import recovering
from syncline.updates.report import PendingReport
from syncline.updates.rule import Setting, WholeRule, WholeUpdater


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce(WholeRule):
    """Every rank steps the whole model with the user's own optimizer, from the mean gradient.

    When ``backward()`` has returned, each ``p.grad`` is the weighted mean over all ranks, in the parameter's shape,
    number type and device, on every rank the same bits. ``bucket_bytes``: how much moves together, about.
    ``compress``: how float32 crosses slow links. ``"int8"`` and ``"int4"`` send a quarter and an eighth of the bytes,
    ``"bf16"`` half; ``"auto"`` is ``"int8"`` where the topology's rates and the measured speed of coding predict that
    it saves a third, else ``"off"``, the default. Sums are made in full precision inside of each site (the level of
    the tree for which the predicted time is least), coded once to their owner, and once from there. What codes lack is
    added to the next gradients, and saved with the optimizer's state. The mean is then not that of one process, but the
    same bits on all ranks. `docs/mechanisms.md`, Fewer bytes.

    Raises :class:`ConfigurationError` for sizes of 0 or less; ``backward()`` raises what a collective does
    (:class:`PeerLostError`, :class:`DeadlineError`).

    >>> model, optimizer = syncline.distribute(model, optimizer, syncline.AllReduce())
    >>> model(x).sum().backward()
    >>> model.bias.grad  # the mean over all ranks
    tensor([8., 8.])
    """

    bucket_bytes: Count = DEFAULT_BUCKET_BYTES
    compress: Compress = "off"
    combinations: ClassVar[tuple[Combination, ...]] = (
        ELASTIC_WITH_HELPERS,
        LEAVING,
        NOBODY_WAITS,
        WHOLE_STATE,
        *COMPRESSED,
    )

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Every optimizer is served, also those that want a closure or sparse gradients."""

    def start(self, setting: Setting) -> AllReduceUpdater:
        """Begin to work on a model; every rank calls it, on the training thread."""
        compress(setting, self.compress)
        return AllReduceUpdater(setting) if setting.recover is None else ElasticAllReduceUpdater(setting)


class AllReduceUpdater(WholeUpdater):
    """The all-reduce update at work on one model."""

    takes_closures = True
    takes_sparse_gradients = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._reductions: dict[int, Work] = {}

    def begin_backward(self) -> None:
        """Check that the last backward pass came to its end."""
        if self._reductions:
            raise UpdateError("The last backward pass did not come to its end, so this rank cannot go on; restart it")

    def reduce(self, bucket: Bucket) -> None:
        """Start the all-reduce of a bucket."""
        bucket.stage_gradients()
        self._reductions[bucket.index] = self.collectives.start(bucket, Collective.ALL_REDUCE, self.step_number)

    def finish_backward(self, report: PendingReport) -> Sequence[bool]:
        """Wait for the mean gradients."""
        self._wait()
        return self._combine(report)

    def _wait(self) -> None:
        for work in self._reductions.values():
            work.wait()

    def _combine(self, report: PendingReport) -> Sequence[bool]:
        for index in self._reductions:
            self.buckets[index].unstage_gradients()
        if (correction := report.correction) != 1.0:
            for bucket in self.buckets:
                bucket.gradients.mul_(correction)
        self._reductions = {}
        return report.present

    def step(self) -> None:
        """Step the user's optimizer, which skips what has no gradient."""
        self.optimizer.step()
        self.step_number += 1

    def step_with_closure(self, closure: Callable[[], Any]) -> Any:
        """Let the user's optimizer evaluate the model as often as it likes; return what it returns."""
        self.is_mid_step = True
        loss = self.optimizer.step(closure)
        self.is_mid_step = False
        self.step_number += 1
        return loss

    def close(self) -> None:
        """Give up what crosses slow links."""
        self.collectives.close()


class ElasticAllReduceUpdater(AllReduceUpdater):
    """The all-reduce update in a job that outlives the loss of ranks.

    It keeps a copy of this rank's gradients of a pass until the pass is committed; from it reductions that were cut off
    begin again, among those that are left. Nothing is shown, and so nothing stepped, that is not committed.
    """

    takes_sparse_gradients = False
    """Which rows the ranks have is told after the pass is committed, and would be that of other ranks then."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        assert setting.recover is not None, "the job is elastic"
        self._recover = setting.recover
        self._kept = [torch.empty_like(bucket.wire_gradients) for bucket in self.buckets]
        self._report: PendingReport | None = None

    def release(self) -> None:
        """Let go of the memory."""
        super().release()
        self._kept.clear()

    def reduce(self, bucket: Bucket) -> None:
        """Start the all-reduce of a bucket, and keep its gradients."""
        bucket.stage_gradients()
        bucket.wait_staged()
        self._kept[bucket.index].copy_(bucket.wire_gradients)
        self._reductions[bucket.index] = self.collectives.start(bucket, Collective.ALL_REDUCE, self.step_number)

    def finish_backward(self, report: PendingReport) -> Sequence[bool]:
        """Wait for the mean gradients, and until all members have them; go on without those that are lost meanwhile."""
        self._report = report
        while not report.is_done:
            with recovering(self._recover):
                self._wait()
                report.commit()
        self._report = None
        return self._combine(report)

    def resume(self) -> None:
        """Begin the reductions of the pass again, unless it is committed."""
        if self._report is not None and self._report.is_done:
            return
        for index in self._reductions:
            bucket = self.buckets[index]
            bucket.wire_gradients.copy_(self._kept[index])
            self._reductions[index] = self.collectives.start(bucket, Collective.ALL_REDUCE, self.step_number)
