"""Tensors as the runtime sees them: writable bytes, and a way to add two ranges of them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from syncline.errors import ConfigurationError
from syncline.runtime.reduction import BITWISE_OPS, DTYPES, Reduction, numpy_reduction

_TORCH_SUMS = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",  # torch adds halves with vector instructions, numpy one by one
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}
"""What complex numbers are summed as: torch multiplies the second by one before, which makes NaN of an infinite part's
other one."""
_FUNCTIONS: dict[str, Any] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as writable bytes, which keep it alive; nothing is copied.

    Not through NumPy, after which no tensor on that memory can be resized any more: FSDP frees its parameters so.
    """
    assert tensor.is_contiguous(), "only contiguous tensors are moved"
    assert tensor.device.type == "cpu", "tensors on a device are moved through host memory"
    size = tensor.nbytes
    if not size:
        return memoryview(bytearray())
    memory: Any = _array_of(size).from_address(tensor.data_ptr())
    memory.owner = tensor.untyped_storage()  # and not the tensor, which its user may set to other memory meanwhile
    return memoryview(memory).cast("B")


@lru_cache(maxsize=1024)
def _array_of(size: int) -> Any:
    return ctypes.c_char * size


@dataclass(frozen=True, slots=True)
class TorchReduction:
    """Sums, or what ``op`` says, of elements that numpy does not know, or adds slowly."""

    dtype: str
    itemsize: int
    kind: torch.dtype
    op: str = "sum"

    def add(self, into: memoryview, other: memoryview) -> None:
        """Add ``other`` to ``into``, element by element."""
        self.add_both(into, into, other)

    def add_both(self, into: memoryview, first: memoryview, second: memoryview) -> None:
        """Make ``into`` the sum of two, in this order; it may be one of them."""
        if len(into):
            left, right, total = (torch.frombuffer(view, dtype=self.kind) for view in (first, second, into))
            _FUNCTIONS[self.op](left, right, out=total)


@cache
def reduction_for(dtype: torch.dtype, op: str = "sum") -> Reduction:
    """Return how elements of ``dtype`` are added, or what ``op`` ("max", "min", "product", "band", ...) says.

    Raises :class:`ConfigurationError` for what has no such result of its own: sums of bool, maxima of complex numbers,
    bits of floats, anything of the 8-bit floats.
    """
    if op in BITWISE_OPS and (dtype.is_floating_point or dtype.is_complex):
        raise ConfigurationError(
            f"There is no {op} of {dtype}, only of integers and bool; reduce tensor.view() of an integer type"
        )
    if dtype.is_complex and op in {"max", "min"}:
        raise ConfigurationError(f"Complex numbers have no order, so there is no {op} of {dtype}; reduce their abs()")
    if dtype in _TORCH_SUMS:
        kind = _PARTS.get(dtype, dtype) if op == "sum" else dtype
        return TorchReduction(_TORCH_SUMS[dtype], dtype.itemsize, kind, op)
    name = dtype_name(dtype)
    if dtype is torch.bool:
        if op == "sum":
            raise ConfigurationError(
                'Elements of torch.bool cannot be summed; op="max" tells whether any rank says so, op="min" whether '
                "all do, and of numbers (tensor.int()) the sum counts them"
            )
        return TorchReduction(name, dtype.itemsize, dtype, op)
    if name not in DTYPES:
        names = ", ".join(sorted({*DTYPES, *_TORCH_SUMS.values()}))
        raise ConfigurationError(
            f"Elements of {dtype} cannot be summed or compared; convert the tensor to one of {names}"
        )
    return numpy_reduction(name, op)


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"``."""
    return str(dtype).removeprefix("torch.")
