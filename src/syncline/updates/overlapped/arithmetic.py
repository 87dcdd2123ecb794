"""The sums of the overlapped update, in one fixed order each, so that a replay gives the same bits.

Halves are summed as float32, everything else in its own type; averages of parameters are made in float64 and rounded
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from syncline.updates.flat import shares, weighted_sum
from syncline.updates.overlapped.events import Use


def add_mean(
    cumulative: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    weights: Sequence[float],
    *,
    scratch: torch.Tensor | None = None,
) -> None:
    """Add the weighted mean of ``gradients``, in their order, to ``cumulative``; ``scratch`` is overwritten."""
    mean = torch.empty_like(cumulative) if scratch is None else scratch
    cumulative.add_(weighted_sum(gradients, shares(weights), out=mean))


def average(values: Sequence[torch.Tensor], weights: Sequence[float], *, out: torch.Tensor) -> None:
    """Write the weighted mean of ``values``, in their order, to ``out``; of one value, that value."""
    if len(values) == 1:
        out.copy_(values[0])
        return
    out.copy_(weighted_sum(values, shares(weights), out=torch.empty(out.shape, dtype=torch.float64)))


def correction(*, newest: torch.Tensor, base: torch.Tensor | None, subtract: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what ``newest`` has over ``base``, less the own gradients that it holds."""
    change = newest.clone() if base is None else newest - base
    for own in subtract:
        change.sub_(own.to(change.dtype))
    return change


def own_inside(use: Use, place: Callable[[int], torch.Tensor], gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the own gradients that are in what is used, by where they lie; ``gradient`` is this step's."""
    own = tuple(place(number) for number in use.subtract)
    return (*own, gradient) if use.replaces else own


class Feed:
    """How corrections come into the gradients that a worker's optimizer gets.

    A correction is added to the gradient of the step at hand, be it for one round or for several. Where the network
    does not keep up, a round stands for a run of r iterations, and its correction is r times as large; it is added in r
    equal parts to the next r steps. The optimizer gets the same sum, in gradients of the size that it is used to; one
    that is large and rare would make Adam's steps small for long.
    """

    def __init__(self) -> None:
        self._part: torch.Tensor | None = None
        self._num_left = 0

    def take(
        self,
        gradient: torch.Tensor,
        change: torch.Tensor,
        use: Use,
        own: Sequence[torch.Tensor],  # noqa: ARG002 - for Collect
    ) -> None:
        """Take what a :class:`Use` has changed; ``own`` are the own gradients in it."""
        if use.replaces:
            gradient.copy_(change)
        elif use.run_length <= 1:
            gradient.add_(change.to(gradient))
        else:
            if self._part is not None:
                change.add_(self._part, alpha=self._num_left)
            self._num_left = max(self._num_left, use.run_length)
            self._part = change.div_(self._num_left)

    def finish(self, gradient: torch.Tensor) -> None:
        """Add this step's part of what is left, once in a step."""
        if self._part is None:
            return
        gradient.add_(self._part.to(gradient))
        self._num_left -= 1
        if not self._num_left:
            self._part = None

    def clear(self) -> None:
        """Forget what is left: a period begins."""
        self._part = None
        self._num_left = 0
