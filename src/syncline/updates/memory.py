"""Tensors as the runtime sees them: writable bytes, and a way to add two ranges of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from syncline.errors import ConfigurationError
from syncline.runtime.reduction import DTYPES, Reduction, numpy_reduction

_TORCH_SUMS = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",  # torch adds halves with vector instructions, numpy one by one
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}

_NUMPY_KINDS = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8})


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as writable bytes; nothing is copied."""
    assert tensor.is_contiguous(), "only contiguous tensors are moved"
    assert tensor.device.type == "cpu", "tensors on a device are moved through host memory"
    plain = tensor.detach()
    if tensor.dtype in _NUMPY_KINDS and tensor.ndim == 1 and len(tensor):
        numbers: Any = plain.numpy()
        return memoryview(numbers).cast("B")  # half as long, which counts in small calls
    array: Any = plain.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


@dataclass(frozen=True, slots=True)
class TorchReduction:
    """Sums of elements that numpy does not know, or adds slowly."""

    dtype: str
    itemsize: int
    kind: torch.dtype

    def add(self, into: memoryview, other: memoryview) -> None:
        """Add ``other`` to ``into``, element by element."""
        self.add_both(into, into, other)

    def add_both(self, into: memoryview, first: memoryview, second: memoryview) -> None:
        """Make ``into`` the sum of two, in this order; it may be one of them."""
        if len(into):
            left, right, total = (torch.frombuffer(view, dtype=self.kind) for view in (first, second, into))
            torch.add(left, right, out=total)


def reduction_for(dtype: torch.dtype) -> Reduction:
    """Return how elements of ``dtype`` are added.

    Raises :class:`ConfigurationError` for what has no sum of its own, such as bool or the 8-bit floats.
    """
    if dtype in _TORCH_SUMS:
        return TorchReduction(_TORCH_SUMS[dtype], dtype.itemsize, dtype)
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        sums = sorted({*DTYPES, *_TORCH_SUMS.values()})
        raise ConfigurationError(f"Elements of {dtype} cannot be summed; convert it to one of {', '.join(sums)}")
    return numpy_reduction(name)
