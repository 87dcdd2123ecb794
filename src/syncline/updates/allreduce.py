"""The all-reduce update: every rank gets the mean gradient and steps the whole model, as in DistributedDataParallel.

The all-reduce of a bucket runs under the rest of the backward pass; ``backward()`` returns when all are over, and then
``p.grad`` is the mean over all samples of all ranks, so whatever looks at gradients works unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from syncline.errors import ConfigurationError, UpdateError
from syncline.runtime.work import Work
from syncline.updates.bucket import DEFAULT_BUCKET_BYTES, Bucket
from syncline.updates.lane import LaneOptions
from syncline.updates.report import PendingReport
from syncline.updates.rule import Setting, Updater
from syncline.updates.state import StateEntry, StateSource, load_parameter_state, parameter_entries


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """Every rank steps the whole model with the user's own optimizer, from the mean gradient.

    ``bucket_bytes``: how much moves together, about. ``slice_bytes``: size of the slices that a bucket is cut into on
    its way; None leaves it to the runtime.
    """

    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    slice_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.bucket_bytes <= 0 or (self.slice_bytes is not None and self.slice_bytes <= 0):
            raise ConfigurationError(
                f"bucket_bytes and slice_bytes must be positive, not {self.bucket_bytes} and {self.slice_bytes}"
            )

    @property
    def lane_options(self) -> LaneOptions:
        """By all-reduce."""
        return LaneOptions(is_divided=False, slice_bytes=self.slice_bytes)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise :class:`UpdateError` if the optimizer wants a closure, which would run a backward pass in its step."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UpdateError("LBFGS evaluates the model inside step(), where ranks may differ; use another optimizer")

    def start(self, setting: Setting) -> AllReduceUpdater:
        """Begin to work on a model."""
        return AllReduceUpdater(setting)


class AllReduceUpdater(Updater):
    """The all-reduce update at work on one model."""

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
        self._reductions[bucket.index] = self.channel.all_reduce(bucket, self.step_number)

    def finish_backward(self, report: PendingReport) -> Sequence[bool]:
        """Wait for the mean gradients."""
        for index, work in self._reductions.items():
            self.channel.wait(work, "backward")
            self.buckets[index].unstage_gradients()
        combined = report.result()
        if combined.correction != 1.0:
            for bucket in self.buckets:
                bucket.gradients.mul_(combined.correction)
        self._reductions = {}
        return combined.present

    def step(self) -> None:
        """Step the user's optimizer."""
        self.optimizer.step()
        self.step_number += 1

    def discard(self) -> None:
        """Nothing is kept between a backward pass and the step."""

    def wait_parameters(self, buckets: Iterable[int]) -> None:
        """Parameters are final when ``step()`` returns."""

    def synchronize(self) -> None:
        """Parameters are final when ``step()`` returns."""

    def clip_grad_norm(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> torch.Tensor:
        """Clip the mean gradients, which every rank has whole."""
        tensors = [tensor for group in self.optimizer.param_groups for tensor in group["params"]]
        return torch.nn.utils.clip_grad_norm_(tensors, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def state_entries(self) -> list[StateEntry]:
        """Return the whole state on rank 0 and nothing elsewhere: all ranks have the same."""
        if self.channel.rank != 0:
            return []
        return [
            entry
            for bucket in self.buckets
            for slot, tensor in zip(bucket.plan.slots, bucket.tensors, strict=True)
            for entry in parameter_entries(slot, self.optimizer.state.get(tensor, {}))
        ]

    def load_state(self, source: StateSource) -> None:
        """Take the whole state."""
        self.optimizer.state.clear()
        for bucket in self.buckets:
            for slot, tensor in zip(bucket.plan.slots, bucket.tensors, strict=True):
                state = load_parameter_state(source, slot, tensor)
                if state:
                    self.optimizer.state[tensor] = state

    def close(self) -> None:
        """Nothing is kept."""
