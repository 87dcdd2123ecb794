"""Own steps redone on top of the global ones: the rule "rebase".

The rule "swap" replaces an own gradient by a global one in the *sum* that the optimizer is fed. For plain SGD that sum
is all that counts. Adam divides by the size of what it is fed: g + (G - g_own) has the noise of two batches of one
worker, where synchronous training feeds the mean over all; so its steps become shorter.

This rule keeps parameters and optimizer state as of the last global gradient (the *base*). When another one comes, the
base is put back and makes the global steps; then the own gradients that are still out are stepped on again. The base
is the trajectory of synchronous training with the same optimizer, late by some iterations, and the same on every worker
that pulled the same; own steps reach ahead of it, and what they did to the optimizer's state is taken back with them. A
step in which nothing has come is an own step, as ever. With everything settled at once it is synchronous training.

A global gradient that stands for r iterations of the fleet makes r steps with an r-th of it; so does a run of own ones.
Costs: a copy of parameters and optimizer state, and for each iteration about one more step of the optimizer and one for
each that is still out. An own gradient that was late is taken back too: nothing remains of it.

Simulated on digits (4 workers, Adam, 384 iterations, delay 1; synchronous, rebase, swap): mixed .232, .231, .441; split
by label .220, .221, .384.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from syncline.updates.bucket import Bucket
from syncline.updates.overlapped.events import Use


@dataclass(slots=True)
class Pulled:
    """What global gradients of one bucket have come since the last step."""

    change: torch.Tensor
    num_steps: int
    """Iterations of the fleet that it stands for."""


class Collect:
    """Takes corrections as :class:`.arithmetic.Feed` does, but keeps them for :class:`Rebase`."""

    def __init__(self) -> None:
        self._pulled: Pulled | None = None

    def take(self, gradient: torch.Tensor, change: torch.Tensor, use: Use) -> None:  # noqa: ARG002 - Feed's signature
        """Keep what has come."""
        if self._pulled is None:
            self._pulled = Pulled(change, use.num_steps)
        else:
            self._pulled.change.add_(change)
            self._pulled.num_steps += use.num_steps

    def finish(self, gradient: torch.Tensor) -> None:
        """Nothing is added to the gradient."""

    def collected(self) -> Pulled | None:
        """Return what has come, once."""
        pulled, self._pulled = self._pulled, None
        return pulled

    def clear(self) -> None:
        """Forget what has come: a period begins."""
        self._pulled = None


Runs = Sequence[tuple[torch.Tensor, int]]
"""Sums of gradients, and of how many iterations each is."""


class Rebase:
    """The base of one model, and how it moves."""

    def __init__(self, buckets: Sequence[Bucket], optimizer: torch.optim.Optimizer) -> None:
        self._buckets = buckets
        self._optimizer = optimizer
        self._parameters = [bucket.parameters.clone() for bucket in buckets]
        self._state: dict[torch.nn.Parameter, dict[str, Any]] = {}
        self._has_moved = False

    def begin(self) -> None:
        """Let the base be what is there now."""
        for base, bucket in zip(self._parameters, self._buckets, strict=True):
            base.copy_(bucket.parameters)
        self._state = {
            tensor: {key: _copied(value) for key, value in self._optimizer.state[tensor].items()}
            for bucket in self._buckets
            for tensor in bucket.tensors
            if tensor in self._optimizer.state
        }

    def take_back_state(self) -> None:
        """Let the optimizer's state be the base's before a period ends: own steps have left their mark on the other."""
        if self._has_moved:
            self._put_back_state()
        self._has_moved = False

    def step(self, pulled: Sequence[Pulled | None], own: Sequence[Runs]) -> None:
        """Make the step of an iteration, for each bucket with what was pulled and the own gradients that are out."""
        if not any(one is not None for one in pulled):
            self._optimizer.step()
            return
        with torch.no_grad():
            self._put_back()
            self._has_moved = True
            self._make_steps([[] if one is None else [(one.change, one.num_steps)] for one in pulled])
            self.begin()
            self._make_steps(own)

    def _put_back(self) -> None:
        for base, bucket in zip(self._parameters, self._buckets, strict=True):
            bucket.parameters.copy_(base)
        self._put_back_state()

    def _put_back_state(self) -> None:
        for bucket in self._buckets:
            for tensor in bucket.tensors:
                if tensor in self._state:
                    self._optimizer.state[tensor] = self._state[tensor]
                else:
                    self._optimizer.state.pop(tensor, None)

    def _make_steps(self, runs_of_buckets: Sequence[Runs]) -> None:
        """Step on all runs, each as many times as it has iterations; buckets move side by side."""
        parts = [[values / count for values, count in runs for _ in range(count)] for runs in runs_of_buckets]
        for number in range(max(map(len, parts), default=0)):
            for bucket, gradients in zip(self._buckets, parts, strict=True):
                self._show(bucket, gradients[number] if number < len(gradients) else None)
            self._optimizer.step()

    @staticmethod
    def _show(bucket: Bucket, gradient: torch.Tensor | None) -> None:
        """Let the optimizer find this gradient; a parameter that has none is not stepped."""
        if gradient is not None:
            bucket.gradients.copy_(gradient)
        for slot, tensor in zip(bucket.plan.slots, bucket.tensors, strict=True):
            view = bucket.gradient(slot)
            tensor.grad = view if gradient is not None and bool(view.any()) else None


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
