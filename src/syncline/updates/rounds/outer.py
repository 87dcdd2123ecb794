"""The outer optimizer: what the averaged difference of a period does to the parameters (DiLoCo's Nesterov momentum).

    difference = start of the period - average at its end
    velocity   = momentum * velocity + difference
    parameters = start - learning_rate * (difference + momentum * velocity)

Every rank computes it from the same numbers, so all end with the same bits. With learning rate 1 and momentum 0 the
parameters are the average. The velocity is kept in the optimizer's state, for checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch

from syncline.arguments import Bounds, check_fields
from syncline.updates.bucket import Bucket

VELOCITY = "outer_velocity"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nesterov:
    """SGD with Nesterov momentum on what a period has changed (DiLoCo, Douillard et al., 2023).

    With the difference d, the period's start less the average at its end, the velocity v becomes ``momentum`` v + d,
    and the next period starts from start - ``learning_rate`` (d + ``momentum`` v). With 1.0 and 0.0 that is the
    average. v has the shape and number type of each parameter, and is saved with the optimizer's state.

    Raises :class:`ConfigurationError` unless ``learning_rate`` is above 0 and ``momentum`` in [0, 1).

    >>> rule = syncline.LocalSteps(period=128, outer=syncline.Nesterov(learning_rate=0.7, momentum=0.9))
    >>> model, optimizer = syncline.distribute(model, optimizer, rule)
    """

    learning_rate: Annotated[float, Bounds(above=0, below=math.inf)] = 0.7
    momentum: Annotated[float, Bounds(0, below=1)] = 0.9

    def __post_init__(self) -> None:
        check_fields(self)


class OuterStep:
    """The outer optimizer of one bucket."""

    def __init__(self, bucket: Bucket, optimizer: torch.optim.Optimizer, rule: Nesterov) -> None:
        self._bucket = bucket
        self._optimizer = optimizer
        self._rule = rule
        self._velocity = torch.zeros_like(bucket.parameters)

    @torch.no_grad()
    def apply(self, start: torch.Tensor, average: torch.Tensor) -> None:
        """Replace ``average`` by what the outer optimizer makes of its difference from ``start``."""
        self._load_velocity()
        difference = start - average
        self._velocity.mul_(self._rule.momentum).add_(difference)
        change = difference.add_(self._velocity, alpha=self._rule.momentum)
        torch.add(start, change, alpha=-self._rule.learning_rate, out=average)
        self._show_velocity()

    def _load_velocity(self) -> None:
        """Take a velocity that a checkpoint has brought."""
        for slot, tensor in zip(self._bucket.plan.slots, self._bucket.tensors, strict=True):
            view = slot.view(self._velocity)
            stored = self._optimizer.state.get(tensor, {}).get(VELOCITY)
            if stored is not None and stored.data_ptr() != view.data_ptr():
                view.copy_(stored)

    def _show_velocity(self) -> None:
        """Keep the velocity where checkpoints find it; Adam and others take a state that is there for one they made."""
        is_stateless = isinstance(self._optimizer, torch.optim.SGD)
        for slot, tensor in zip(self._bucket.plan.slots, self._bucket.tensors, strict=True):
            if is_stateless or self._optimizer.state.get(tensor):
                self._optimizer.state[tensor][VELOCITY] = slot.view(self._velocity)
