"""How many samples this rank put into a step: the weight of its gradient in the mean over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree

from syncline.errors import UpdateError

CountSamples = Callable[..., float]
"""Gets what the model's forward gets, and returns the number of samples in it."""


class SampleCount:
    """Sums the samples of all forward passes of a step.

    By default a forward pass has as many samples as the first dimension of the first tensor that it is given.
    """

    def __init__(self, count: CountSamples | None) -> None:
        self._count = count or first_dimension
        self._seen = 0.0
        self._last = 0.0
        self._told: float | None = None

    def see(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count the samples of a forward pass that has come to its end."""
        self._last = _checked(self._count(*args, **kwargs))
        self._seen += self._last

    def forget_last(self) -> None:
        """Leave the last forward pass out: no gradient came of it."""
        self._seen, self._last = self._seen - self._last, 0.0

    def tell(self, num_samples: float) -> None:
        """Let the user's number stand for the whole step."""
        self._told = _checked(num_samples)

    def take(self) -> float:
        """Return the number of samples of the step, and begin the next."""
        number = self._seen if self._told is None else self._told
        self._seen, self._last, self._told = 0.0, 0.0, None
        return number


def first_dimension(*args: Any, **kwargs: Any) -> float:
    """Return the first dimension of the first tensor among the arguments; 1 if there is none."""
    for value in (*_pytree.tree_leaves(args), *_pytree.tree_leaves(dict(kwargs))):
        if isinstance(value, torch.Tensor):
            return float(value.shape[0]) if value.dim() else 1.0
    return 1.0


def _checked(number: float) -> float:
    if not 0 <= number < float("inf"):
        raise UpdateError(f"A number of samples is at least 0 and finite, not {number}")
    return float(number)
