"""Sums of parameters in fixed point: whole numbers, so that their order does not matter.

What each rank has moved since the period's start, times its share, is rounded to a multiple of one small step that all
ranks agree on. Whole numbers add up to the same bits in any order and on any tree, and in a replay too. An element
takes 4 bytes on the wire (8 for float64). The step is 2**-30 of the largest move of any rank in the bucket (2**-62 for
float64): about what float32 itself can tell apart near a number as large as that move, and the start is added
afterwards in float64, so what has not moved stays as it was, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

MAX_EXPONENT = 1000
"""No step is finer than 2**-1000, so that it is a float64 of full precision."""


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the whole numbers in which elements of ``dtype`` are summed."""
    return torch.int64 if dtype == torch.float64 else torch.int32


def largest_move(values: torch.Tensor, start: torch.Tensor) -> float:
    """Return the largest difference of an element; not finite if one of ``values`` is not."""
    return float((values.to(torch.float64) - start.to(torch.float64)).abs().max()) if values.numel() else 0.0


def exponent_for(largest: Sequence[float], dtype: torch.dtype) -> int:
    """Return e for steps of 2**-e: the weighted sum of moves no larger than ``largest`` fits, with room to round up."""
    num_bits = torch.iinfo(wire_dtype(dtype)).bits - 2
    return min(MAX_EXPONENT, num_bits - math.frexp(max(largest))[1])


def to_steps(values: torch.Tensor, start: torch.Tensor, *, share: float, exponent: int) -> torch.Tensor:
    """Return ``share * (values - start)`` in steps of ``2**-exponent``, in host memory."""
    moved = values.to("cpu", torch.float64) - start.to("cpu", torch.float64)
    return moved.mul_(share).mul_(math.ldexp(1.0, exponent)).round_().to(wire_dtype(values.dtype))


def from_steps(total: torch.Tensor, start: torch.Tensor, *, exponent: int, out: torch.Tensor) -> None:
    """Write ``start`` plus the sum of all ranks' steps to ``out``, rounded once."""
    moved = total.to(torch.float64).mul_(math.ldexp(1.0, -exponent))
    out.copy_(start.to("cpu", torch.float64) + moved)
