"""The weight of this rank's gradient in the mean over all ranks.

By default every rank that ran a backward pass counts the same, as in DistributedDataParallel. On request it counts the
samples of the forward passes that led to its gradients: a forward pass counts when a backward pass reaches what it
returned, so one whose output is thrown away counts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from syncline.arguments import is_number
from syncline.errors import UpdateError
from syncline.updates.private_torch import tree_leaves

CountSamples = Callable[..., float]
"""Gets what the model's forward gets, and returns the number of samples in it."""


class ForwardPass:
    """One call of the model with gradients, of which it is not known yet whether a backward pass will follow."""

    __slots__ = ("num_samples", "task")

    def __init__(self, num_samples: float) -> None:
        self.num_samples = num_samples
        self.task = -1
        """The backward pass that has reached it last."""


class SampleCount:
    """Counts the weight of one step after another. ``how``: None (each rank counts 1), ``"batch"``, or a function."""

    def __init__(self, how: CountSamples | Literal["batch"] | None) -> None:
        self._count = how if callable(how) else first_dimension
        self.is_counting = how is not None
        self._reached = 0.0
        self._was_reached = False
        self._taken = 0.0
        self._told: float | None = None
        self._has_left = self._is_told_late = False
        """Whether gradients have left in this step, and whether the number was told after they had."""

    @property
    def batch(self) -> float:
        """First dimensions of the forward passes that backward passes have reached since the last pass that was taken.

        Only for comparing ranks where nobody said how they weigh; -1 where that is known, or nothing was reached.
        """
        is_unknown = not self.is_counting and self._told is None and self._was_reached
        return self._reached if is_unknown else -1.0

    def see(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ForwardPass:
        """Count the samples of a forward pass that has come to its end."""
        return ForwardPass(checked_number(self._count(*args, **kwargs)))

    def reach(self, forward: ForwardPass, task: int) -> None:
        """Note that a backward pass (by its number) has come to what a forward pass returned."""
        if forward.task != task:
            forward.task = task
            self._reached += forward.num_samples
            self._was_reached = True

    def forget_pass(self) -> None:
        """Leave out what was reached: the backward pass broke before any gradient came of it."""
        self._reached, self._was_reached = 0.0, False

    def tell(self, num_samples: float) -> None:
        """Let the user's number stand for the whole step."""
        self._told, self._is_told_late = checked_number(num_samples), self._has_left

    def check_told_early(self) -> None:
        """Raise :class:`UpdateError` if the number for this step came when its gradients had left with another."""
        if self._is_told_late:
            raise UpdateError(
                f"batch_size({self._told:g}) came after backward(), whose gradients had left with a weight of "
                f"{self._taken:g}; call it before backward()"
            )

    @property
    def so_far(self) -> float:
        """The weight of the pass that is under way, as far as it is known; nothing is begun."""
        if self._told is not None:
            return self._told
        return self._reached if self.is_counting else 1.0

    def weight(self) -> float:
        """Return the weight of a pass whose first gradient has come."""
        if self._told is None and self.is_counting and not self._was_reached:
            raise UpdateError(
                "samples= counts the samples of what the model is called with, but gradients came without a call of "
                "the model that distribute() was given (a method other than forward was used, or a part of it); say "
                "their number with syncline.batch_size(n) before backward()"
            )
        self._taken = self.so_far
        self._has_left, self._is_told_late = True, False
        return self._taken

    def end_pass(self) -> None:
        """Begin to count for the next pass; raises if gradients have left with another weight than that of the pass."""
        taken = self._taken
        found = self._reached if self.is_counting and self._told is None and self._was_reached else taken
        self.forget_pass()
        if found != taken:
            raise UpdateError(
                f"Gradients of this backward pass left with a weight of {taken:g} samples before it reached another "
                f"forward pass, with which it has {found:g}; say the number with syncline.batch_size({found:g}) before "
                "backward()"
            )

    def end_step(self) -> None:
        """Forget what was told for the step."""
        self._told = None
        self.drop_pass()

    def drop_pass(self) -> None:
        """Note that no gradients of the step are left."""
        self._has_left = self._is_told_late = False


def first_dimension(*args: Any, **kwargs: Any) -> float:
    """Return the first dimension of the first tensor among the arguments that has one; 1 if none has."""
    for value in (*tree_leaves(args), *tree_leaves(dict(kwargs))):
        if isinstance(value, torch.Tensor) and value.dim():
            return float(value.size(0))  # a nested tensor may have no shape
    return 1.0


def checked_number(number: float) -> float:
    """Return a number of samples; :class:`UpdateError` unless it is 0 or more, and finite."""
    if not is_number(number) or not 0 <= number < math.inf:
        raise UpdateError(f"A number of samples is at least 0 and finite, not {number!r}")
    return float(number)
