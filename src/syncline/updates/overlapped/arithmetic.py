"""The sums of the overlapped update, in one fixed order each, so that a replay gives the same bits.

Halves are summed as float32, everything else in its own type; averages of parameters are made in float64 and rounded
once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

HALVES = frozenset({torch.float16, torch.bfloat16})


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which gradients of ``dtype`` are summed and sent back."""
    return torch.float32 if dtype in HALVES else dtype


def shares(weights: Sequence[float]) -> list[float]:
    """Return each weight over their sum; equal shares if nobody had any samples."""
    total = sum(weights)
    if total <= 0.0:
        return [1.0 / len(weights)] * len(weights)
    return [weight / total for weight in weights]


def add_mean(cumulative: torch.Tensor, gradients: Sequence[torch.Tensor], weights: Sequence[float]) -> None:
    """Add the weighted mean of ``gradients``, in their order, to ``cumulative``."""
    mean = torch.zeros_like(cumulative)
    for gradient, share in zip(gradients, shares(weights), strict=True):
        mean.add_(gradient.to(cumulative.dtype), alpha=share)
    cumulative.add_(mean)


def average(values: Sequence[torch.Tensor], weights: Sequence[float], *, out: torch.Tensor) -> None:
    """Write the weighted mean of ``values``, in their order, to ``out``; of one value, that value."""
    if len(values) == 1:
        out.copy_(values[0])
        return
    mean = torch.zeros(out.shape, dtype=torch.float64)
    for value, share in zip(values, shares(weights), strict=True):
        mean.add_(value.to(torch.float64), alpha=share)
    out.copy_(mean)


def correct(
    gradient: torch.Tensor,
    *,
    newest: torch.Tensor,
    base: torch.Tensor | None,
    subtract: Sequence[torch.Tensor],
    replaces: bool,
) -> None:
    """Add what ``newest`` has over ``base`` to ``gradient``, less the own gradients that it holds.

    With ``replaces``, what was in ``gradient`` is inside ``newest`` and is dropped.
    """
    change = newest.clone() if base is None else newest - base
    for own in subtract:
        change.sub_(own.to(change.dtype))
    change = change.to(gradient)
    if replaces:
        gradient.copy_(change)
    else:
        gradient.add_(change)
