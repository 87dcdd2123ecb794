"""What an operation makes of the tensors of all ranks: one of a fleet's names, or a ``torch.distributed.ReduceOp``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.distributed as dist

from syncline.errors import ConfigurationError
from syncline.runtime.reduction import Reduction
from syncline.tensors.memory import reduction_for

Operation = Literal["sum", "mean", "max", "min", "product"]
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
_WITHOUT_QUOTIENT = frozenset({torch.bool, torch.uint16, torch.uint32, torch.uint64})
"""PyTorch divides no tensors of these types by rounding."""
_OF_BOOL = MappingProxyType({"sum": "bor", "max": "bor", "min": "band", "product": "band"})
"""What becomes of truth values, as with gloo and NCCL: a sum says whether any is true, a product whether all are."""


class TensorReduction(NamedTuple):
    """How the tensors of all ranks become one."""

    reduction: Reduction
    meaning: str
    """What other ranks must mean too, such as "mean"."""
    prepare: Callable[[torch.Tensor], object] | None = None
    """Changes what this rank brings, in place."""
    finish: Callable[[torch.Tensor], object] | None = None
    """Changes the result, in place."""

    def prepared(self, brought: torch.Tensor) -> torch.Tensor:
        """Prepare what this rank brings, and return it."""
        if self.prepare is not None:
            self.prepare(brought)
        return brought

    def finished(self, result: torch.Tensor) -> torch.Tensor:
        """Finish a result, and return it."""
        if self.finish is not None:
            self.finish(result)
        return result


def reduction_of(op: Operation | ReduceOp, dtype: torch.dtype, num_ranks: int) -> TensorReduction:
    """Return how tensors of ``dtype`` are reduced by ``op``, in any of its forms.

    Of a fleet's names, a "mean" divides the sum by ``num_ranks``, and needs a float type. AVG does so too, of integers
    towards zero, as NCCL does; PREMUL_SUM, of floats and complex numbers, multiplies by its factor (a number, or a
    tensor of one) before. Of bool, SUM and MAX are "any", PRODUCT and MIN "all". Raises :class:`ConfigurationError` for
    what has no such result: AVG of bool and of uint16 to uint64, MIN and MAX of complex numbers, bits of floats,
    anything of 8-bit floats.
    """
    if isinstance(op, str):
        return _named(op, dtype, num_ranks)
    kind, factor = _parse(op)
    reduction = _without_factor(kind, dtype, num_ranks)
    return reduction if factor is None else reduction._replace(prepare=multiply_by(factor))


@cache
def _named(op: Operation, dtype: torch.dtype, num_ranks: int) -> TensorReduction:
    if op not in get_args(Operation):
        raise ConfigurationError(f"op must be one of {', '.join(get_args(Operation))}, not {op!r}")
    if op != "mean":
        return TensorReduction(reduction=reduction_for(dtype, op), meaning=op)
    if not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigurationError(f"A mean of {dtype} is not of that type; convert the tensor to a float type")
    return TensorReduction(reduction=reduction_for(dtype), meaning=op, finish=_divide_by(num_ranks, None))


def check_weight(dtype: torch.dtype, meaning: str, weight: float) -> None:
    """Raise :class:`ConfigurationError` if what ``meaning`` says of numbers of ``dtype`` cannot be weighted so."""
    if meaning not in {"sum", "mean"}:
        raise ConfigurationError(f"A {meaning} has no weights; leave weight={weight} out, or multiply the tensor by it")
    if not (dtype.is_floating_point or dtype.is_complex or isinstance(weight, int)):
        raise ConfigurationError(f"{dtype} times {weight} is not of that type; convert the tensor to a float type")


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
    name: str = kind.name if isinstance(kind, dist.ReduceOp.RedOpType) else ""
    if name not in _NAMES:
        raise ConfigurationError(f"op must be a torch.distributed.ReduceOp: {', '.join(_NAMES)}, not {op!r}")
    if name != "PREMUL_SUM":
        return name, None
    if isinstance(op, dist.ReduceOp.RedOpType):
        raise ConfigurationError("ReduceOp.PREMUL_SUM needs a factor; make it with dist._make_nccl_premul_sum(factor)")
    state: Any = op.__getstate__()
    return name, state[1]


def multiply_by(factor: Any) -> Callable[[torch.Tensor], None]:
    """Return what multiplies a tensor by a number, or by a tensor of one, in place."""
    number = factor.item() if isinstance(factor, torch.Tensor) else factor

    def multiply(tensor: torch.Tensor) -> None:
        tensor.mul_(number)

    return multiply


def _divide_by(num_ranks: int, rounding: str | None) -> Callable[[torch.Tensor], None]:
    def divide(tensor: torch.Tensor) -> None:
        # detached here: the work may be ended where no inference goes on
        tensor.detach().div_(num_ranks, rounding_mode=rounding)

    return divide
