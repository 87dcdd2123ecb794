"""Own steps redone on top of the global ones: the rule "rebase".

The rule "swap" replaces an own gradient by a global one in the *sum* that the optimizer is fed. For plain SGD that sum
is all that counts. Adam divides by the size of what it is fed: g + (G - g_own) has the noise of two batches of one
worker, where synchronous training feeds the mean over all; so its steps become shorter.

This rule keeps parameters and optimizer state as of the last global gradient (the *base*). When another one comes, the
base is put back and makes the global steps; then the own gradients that are still out are stepped on again. The base
is the trajectory of synchronous training with the same optimizer, late by some iterations, and the same on every worker
that pulled the same; own steps reach ahead of it, and what they did to the optimizer's state is taken back with them. A
step in which nothing has come is an own step, as ever. With everything settled at once it is synchronous training.

Since own steps are taken back, they may be made with whatever leads to where the global steps will: not with the own
gradient, but with a forecast of the global one, made of the own one and of the newest global one (:class:`Forecast`).

A global gradient that stands for r iterations of the fleet makes r steps with an r-th of it; so does a run of own ones.
What a user writes to parameters between two steps is written to the base too, and so is optimizer state that is loaded.
Costs: two copies of the parameters and one of the optimizer's state, and for each iteration about one more step of the
optimizer and one for each that is still out (in one kernel for all parameters, where torch has it:
:func:`stepping_at_once`). An own gradient that was late is taken back too: nothing remains of it.

Simulated on digits (4 workers, Adam, 384 iterations, delay 1; synchronous, rebase, swap): mixed .232, .231, .441; split
by label .220, .221, .384.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from syncline.updates.bucket import Bucket
from syncline.updates.overlapped.worker import Use
from syncline.updates.state import copied

# What the global gradient of an iteration will be, while it is still on its way: for the rule "rebase".
#
# An own step reaches ahead of the base, and the next gradient is made where it leads; so it should lead to where the
# global steps will. What is known: the own gradient g of that iteration, and the newest global gradient G, per
# iteration. The forecast is
#
#     weight * g + (1 - weight) * G        weight = sum of <G' - G, g' - G> / sum of |g' - G|^2,   between 0 and 1
#
# the least squares fit to the global gradients G' that have come so far, each with the own gradient g' in it and the
# one before, G; older ones count less. Where workers see alike data and much of it, g is near G' and the weight near 1;
# where they see different data, or noise, the last global gradient tells more, and the weight is near 0. Before any
# global gradient has come, it is 1.
#
# Simulated, 8 workers, Adam, 64 iterations in two periods, of which a global gradient takes 2 to come (synchronous, own
# gradients alone, this forecast): digits sorted by label .117, .535, .219; byte GPT on the same text 3.495, 3.492,
# 3.483.

MEMORY = 0.9
"""What a sum keeps when one more global gradient has come."""
NUM_WEIGHTS = 256
"""Weights are multiples of one over this, so that rounding in a sum does not show in a replay."""


class Forecast:
    """The forecast for one bucket of one worker."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.newest: torch.Tensor | None = None
        """The newest global gradient, per iteration."""
        self._product = self._square = 0.0

    def learn(self, newest: torch.Tensor, own: torch.Tensor | None) -> None:
        """Take note of a global gradient and of the own one in it, if there is one; both per iteration."""
        if own is not None:
            surprise = (newest if self.newest is None else newest - self.newest).to(torch.float64)
            difference = (own if self.newest is None else own - self.newest).to(torch.float64)
            self._product = MEMORY * self._product + float((surprise * difference).sum())
            self._square = MEMORY * self._square + float(difference.square().sum())
            if self._square > 0.0:
                best = min(1.0, max(0.0, self._product / self._square))
                self.weight = round(best * NUM_WEIGHTS) / NUM_WEIGHTS
        self.newest = newest

    def of(self, own: torch.Tensor) -> torch.Tensor:
        """Return what the global gradient of an iteration may be, in which the own one was ``own``."""
        if self.newest is None or self.weight == 1.0:
            return own
        return torch.lerp(self.newest.to(own), own, self.weight)


# Many steps of an optimizer in a row, each in one kernel for all parameters instead of a dozen for each of them.


_RIGHT = (torch.float32, torch.float64)
_WITH_KERNELS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


@contextlib.contextmanager
def stepping_at_once(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within this context ``optimizer`` takes torch's fused kernels, in groups where the user left the choice to torch.

    They round otherwise than one operation after another does, in the last bit.
    """
    chosen = [group for group in optimizer.param_groups if _is_served(optimizer, group)]
    for group in chosen:
        group["fused"] = True
    try:
        yield
    finally:
        for group in chosen:
            group["fused"] = None


def _is_served(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> bool:
    """Whether there is a kernel for a group: of torch's own classes (not of who inherits from them), on the CPU.

    The kernels count steps in float32, other steps in float64 where that is the default type. That of SGD with momentum
    takes parameters that all have a momentum, or none of them; and a parameter gets one with its first gradient. With
    half precision it goes elsewhere than other steps do (PyTorch 2.13).
    """
    is_open = "fused" in group and group["fused"] is None and group.get("foreach") is None
    tensors = group["params"]
    assert isinstance(tensors, list)
    has_begun = all(optimizer.state.get(tensor, {}).get("momentum_buffer") is not None for tensor in tensors)
    return (
        type(optimizer) in _WITH_KERNELS
        and is_open
        and (has_begun or not group.get("momentum"))
        and torch.get_default_dtype() != torch.float64
        and not group.get("differentiable")
        and not isinstance(group["lr"], torch.Tensor)
        and all(tensor.device.type == "cpu" and tensor.dtype in _RIGHT for tensor in tensors)
    )


@dataclass(slots=True)
class Pulled:
    """What global gradients of one bucket have come since the last step."""

    change: torch.Tensor
    num_steps: int
    """Iterations of the fleet that it stands for."""
    own: torch.Tensor | None
    """The sum of the own gradients in it, if there are any."""
    num_own: int

    def join(self, later: Pulled) -> None:
        """Add what came later."""
        self.change.add_(later.change)
        self.num_steps += later.num_steps
        self.num_own += later.num_own
        if later.own is not None:
            self.own = later.own if self.own is None else self.own.add_(later.own)


class Collect:
    """Takes corrections as :class:`.link.Feed` does, but keeps them for :class:`Rebase`."""

    replaces = False

    def __init__(self) -> None:
        self._pulled: Pulled | None = None

    def take(
        self,
        gradient: torch.Tensor,  # noqa: ARG002 - Feed's signature
        change: torch.Tensor,
        use: Use,
        own: torch.Tensor | None,
    ) -> None:
        """Keep what has come."""
        pulled = Pulled(change, use.num_steps, None if own is None else own.to(change, copy=True), use.num_own)
        if self._pulled is None:
            self._pulled = pulled
        else:
            self._pulled.join(pulled)

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
"""Sums (or means) of gradients, and over how many iterations each is."""


class Rebase:
    """The base of one model, and how it moves."""

    def __init__(self, buckets: Sequence[Bucket], optimizer: torch.optim.Optimizer) -> None:
        self._buckets = buckets
        self._optimizer = optimizer
        self._parameters = [bucket.parameters.clone() for bucket in buckets]
        self._left = [bucket.parameters.clone() for bucket in buckets]
        """The parameters as the last step left them: what they are not any more, the user has written."""
        self._state: dict[torch.nn.Parameter, dict[str, Any]] = {}
        self._seen = optimizer.state
        """Where the optimizer had its state; torch puts another one in its place when one is loaded."""
        self._forecasts = [Forecast() for _ in buckets]
        self._has_moved = False
        self._has_guessed = False

    def begin(self) -> None:
        """Let the base be what is there now."""
        self._has_guessed = False
        for base, bucket in zip(self._parameters, self._buckets, strict=True):
            base.copy_(bucket.parameters)
        self._keep_left()
        self.take_state()

    def take_state(self) -> None:
        """Let the base have the optimizer's state as it is now."""
        self._seen = self._optimizer.state
        self._state = {
            tensor: {key: copied(value) for key, value in self._optimizer.state[tensor].items()}
            for bucket in self._buckets
            for tensor in bucket.tensors
            if tensor in self._optimizer.state
        }

    def finish(self, own: Sequence[Runs]) -> None:
        """Make ready for a period's end: every gradient once, and of the optimizer's state what the base left.

        The own gradients that are still out are stepped on as they are, in place of forecasts: the average makes
        global ones of them.
        """
        if self._has_guessed:
            with torch.no_grad():
                self._take_writes()
                self._put_back(keeps_state=True)
                self._make_steps(_means(own))
        if self._has_moved or self._has_guessed:
            self._put_back_state()
        self._has_moved = self._has_guessed = False

    def step(self, pulled: Sequence[Pulled | None], own: Sequence[Runs]) -> None:
        """Make the step of an iteration, for each bucket with what was pulled and the own gradients that are out."""
        with torch.no_grad():
            self._take_writes()
            if any(one is not None for one in pulled):
                self._put_back()
                self._has_moved = True
                self._learn(pulled)
                self._make_steps(_means([[] if one is None else [(one.change, one.num_steps)] for one in pulled]))
                self.begin()
                self._make_steps(self._guessed(own))
            elif any(forecast.newest is not None for forecast in self._forecasts):
                for bucket, forecast in zip(self._buckets, self._forecasts, strict=True):
                    _Part(bucket, forecast.of(bucket.gradients)).show()
                self._has_guessed = True
                self._optimizer.step()
            else:
                self._optimizer.step()
            self._keep_left()

    def _take_writes(self) -> None:
        """Let the base have what the user has written, or loaded, since the last step, as own steps do not stay."""
        if self._optimizer.state is not self._seen:
            self.take_state()
        for base, left, bucket in zip(self._parameters, self._left, self._buckets, strict=True):
            if not torch.equal(left, bucket.parameters):
                base.add_(bucket.parameters - left)

    def _keep_left(self) -> None:
        for left, bucket in zip(self._left, self._buckets, strict=True):
            left.copy_(bucket.parameters)

    def _learn(self, pulled: Sequence[Pulled | None]) -> None:
        for forecast, one in zip(self._forecasts, pulled, strict=True):
            if one is not None:
                own = None if one.own is None else one.own / one.num_own
                forecast.learn(one.change / one.num_steps, own)

    def _guessed(self, own: Sequence[Runs]) -> list[Runs]:
        """Return the means of own gradients over their runs, with forecasts in their place."""
        self._has_guessed = True
        return [
            [(forecast.of(mean), count) for mean, count in runs]
            for forecast, runs in zip(self._forecasts, _means(own), strict=True)
        ]

    def _put_back(self, *, keeps_state: bool = False) -> None:
        for base, bucket in zip(self._parameters, self._buckets, strict=True):
            bucket.parameters.copy_(base)
        self._put_back_state(keeps=keeps_state)

    def _put_back_state(self, *, keeps: bool = False) -> None:
        """Give the optimizer the base's state: the very tensors, or with ``keeps`` copies, so that they stay as is."""
        for bucket in self._buckets:
            for tensor in bucket.tensors:
                if tensor in self._state:
                    state = self._state[tensor]
                    self._optimizer.state[tensor] = (
                        {key: copied(value) for key, value in state.items()} if keeps else state
                    )
                else:
                    self._optimizer.state.pop(tensor, None)

    def _make_steps(self, means_of_buckets: Sequence[Runs]) -> None:
        """Step on the mean of each run as many times as it has iterations; buckets move side by side."""
        parts = [
            [part for mean, count in means for part in [_Part(bucket, mean)] * count]
            for bucket, means in zip(self._buckets, means_of_buckets, strict=True)
        ]
        nothings = [_Part(bucket, None) for bucket in self._buckets]
        with stepping_at_once(self._optimizer):
            for number in range(max(map(len, parts), default=0)):
                for gradients, nothing in zip(parts, nothings, strict=True):
                    (gradients[number] if number < len(gradients) else nothing).show()
                self._optimizer.step()


class _Part:
    """The gradient of one iteration for one bucket, or none; nor has a parameter one for which all of it is zero."""

    def __init__(self, bucket: Bucket, gradient: torch.Tensor | None) -> None:
        self._bucket = bucket
        self._gradient = gradient
        self._exist = [gradient is not None and bool(slot.view(gradient).any()) for slot in bucket.plan.slots]

    def show(self) -> None:
        """Let the optimizer find it; a parameter that has none is not stepped."""
        bucket = self._bucket
        if self._gradient is not None:
            bucket.gradients.copy_(self._gradient)
        for slot, tensor, exists in zip(bucket.plan.slots, bucket.tensors, self._exist, strict=True):
            tensor.grad = bucket.shown_gradient(slot) if exists else None


def _means(runs_of_buckets: Sequence[Runs]) -> list[Runs]:
    """Return the mean over each run in place of its sum."""
    return [[(values / count, count) for values, count in runs] for runs in runs_of_buckets]
