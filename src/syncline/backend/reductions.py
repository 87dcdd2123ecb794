"""What each ``torch.distributed.ReduceOp`` makes of the tensors of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from syncline.errors import ConfigurationError
from syncline.pytorch.collectives import TensorReduction
from syncline.updates.memory import reduction_for

ReduceOp: TypeAlias = "dist.ReduceOp | dist.ReduceOp.RedOpType"

_NAMES = MappingProxyType(
    {
        "SUM": "sum",
        "AVG": "sum",
        "PREMUL_SUM": "sum",
        "PRODUCT": "product",
        "MIN": "min",
        "MAX": "max",
        "BAND": "band",
        "BOR": "bor",
        "BXOR": "bxor",
    }
)
_KINDS: MappingProxyType[dist.ReduceOp.RedOpType, str] = MappingProxyType(
    {getattr(dist.ReduceOp, name): name for name in _NAMES}
)
_WITHOUT_QUOTIENT = frozenset({torch.bool, torch.uint16, torch.uint32, torch.uint64})
"""PyTorch divides no tensors of these types by rounding."""
_OF_BOOL = MappingProxyType({"sum": "bor", "max": "bor", "min": "band", "product": "band"})
"""What becomes of truth values, as with gloo and NCCL: a sum says whether any is true, a product whether all are."""


def reduction_of(op: ReduceOp, dtype: torch.dtype, num_ranks: int) -> TensorReduction:
    """Return how tensors of ``dtype`` are reduced by ``op``, in any of its forms.

    AVG divides the sum by ``num_ranks``, of integers towards zero, as NCCL does; PREMUL_SUM, of floats and complex
    numbers, multiplies by its factor (a number, or a tensor of one) before. Of bool, SUM and MAX are "any", PRODUCT and
    MIN "all". Raises :class:`ConfigurationError` for what has no such result: AVG of bool and of uint16 to uint64, MIN
    and MAX of complex numbers, bits of floats, anything of 8-bit floats.
    """
    kind, factor = _parse(op)
    reduction = _without_factor(kind, dtype, num_ranks)
    return reduction if factor is None else replace(reduction, prepare=_multiply_by(factor))


@cache
def _without_factor(kind: str, dtype: torch.dtype, num_ranks: int) -> TensorReduction:
    is_inexact = dtype.is_floating_point or dtype.is_complex
    if not is_inexact and (kind == "PREMUL_SUM" or (kind == "AVG" and dtype in _WITHOUT_QUOTIENT)):
        raise ConfigurationError(
            f"ReduceOp.{kind} of {dtype} is not of that type; convert the tensor to a float type, or take ReduceOp.SUM"
        )
    name = _NAMES[kind]
    reduction = reduction_for(dtype, _OF_BOOL.get(name, name) if dtype is torch.bool else name)
    finish = _divide_by(num_ranks, None if is_inexact else "trunc") if kind == "AVG" else None
    return TensorReduction(reduction=reduction, meaning=kind.lower(), finish=finish)


def _parse(op: ReduceOp) -> tuple[str, Any]:
    """Return the name of an operation, and the factor of a PREMUL_SUM, which its pickled state alone tells."""
    kind: Any = getattr(op, "op", op)
    name = _KINDS.get(kind) if isinstance(kind, dist.ReduceOp.RedOpType) else None
    if name is None:
        raise ConfigurationError(f"op must be a torch.distributed.ReduceOp: {', '.join(_NAMES)}, not {op!r}")
    if name != "PREMUL_SUM":
        return name, None
    if isinstance(op, dist.ReduceOp.RedOpType):
        raise ConfigurationError("ReduceOp.PREMUL_SUM needs a factor; make it with dist._make_nccl_premul_sum(factor)")
    state: Any = op.__getstate__()
    return name, state[1]


def _multiply_by(factor: Any) -> Callable[[torch.Tensor], None]:
    number = factor.item() if isinstance(factor, torch.Tensor) else factor

    def multiply(tensor: torch.Tensor) -> None:
        tensor.mul_(number)

    return multiply


def _divide_by(num_ranks: int, rounding: str | None) -> Callable[[torch.Tensor], None]:
    def divide(tensor: torch.Tensor) -> None:
        # detached here: the work may be ended where no inference goes on
        tensor.detach().div_(num_ranks, rounding_mode=rounding)

    return divide
