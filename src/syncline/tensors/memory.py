"""The memory of tensors: as bytes that the runtime moves and adds, and in the host, if need be as a copy."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from syncline.errors import ConfigurationError
from syncline.runtime.reduction import BITWISE_OPS, DTYPES, Reduction, numpy_reduction

_TORCH_SUMS = frozenset({torch.bfloat16, torch.float16, torch.complex64, torch.complex128})
"""What numpy does not know, or adds one by one, where torch adds halves with vector instructions."""
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
        return memoryview(bytearray(16))[:0]  # aligned as any tensor is, which an empty one need not be
    memory: Any = _array_of(size).from_address(tensor.data_ptr())
    memory.owner = tensor.untyped_storage()  # and not the tensor, which its user may set to other memory meanwhile
    return memoryview(memory).cast("B")


@lru_cache(maxsize=1024)
def _array_of(size: int) -> Any:
    return ctypes.c_char * size


class TorchReduction(NamedTuple):
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
    name = dtype_name(dtype)
    if dtype in _TORCH_SUMS:
        kind = _PARTS.get(dtype, dtype) if op == "sum" else dtype
        return TorchReduction(name, dtype.itemsize, kind, op)
    if dtype is torch.bool:
        if op == "sum":
            raise ConfigurationError(
                'Elements of torch.bool cannot be summed; op="max" tells whether any rank says so, op="min" whether '
                "all do, and of numbers (tensor.int()) the sum counts them"
            )
        return TorchReduction(name, dtype.itemsize, dtype, op)
    if name not in DTYPES:
        names = ", ".join(sorted({*DTYPES, *map(dtype_name, _TORCH_SUMS)}))
        raise ConfigurationError(
            f"Elements of {dtype} cannot be summed or compared; convert the tensor to one of {names}"
        )
    return numpy_reduction(name, op)


def summands_of(tensor: torch.Tensor) -> tuple[memoryview, Reduction]:
    """Return what a communicator is given of a contiguous CPU tensor: its bytes, and how its elements are added."""
    return bytes_of(tensor), reduction_for(tensor.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"``."""
    return str(dtype).removeprefix("torch.")


class ScratchPool:
    """One tensor of memory that is kept from call to call: fresh pages cost more than the copy into them.

    Any thread may borrow; of two at once, one gets fresh memory.
    """

    MAX_BYTES = 256 << 20

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []  # its pop is one step, which no other thread divides

    def borrow(self, source: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``source`` in memory of its own."""
        return self.borrow_empty(source.numel(), source.dtype).view(source.shape).copy_(source)

    def borrow_empty(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory that holds anything."""
        try:
            kept = self._kept.pop()
        except IndexError:
            return _empty(num_elements, dtype)
        return kept if kept.dtype == dtype and kept.numel() == num_elements else _empty(num_elements, dtype)

    def give_back(self, tensor: torch.Tensor) -> None:
        """Keep ``tensor`` for the next call, unless it is very large."""
        if tensor.nbytes <= self.MAX_BYTES:
            self._kept[:] = [tensor.view(-1)]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's own memory can be sent and written: on the CPU, row by row, its numbers as they are."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether no more need be looked at to move the tensor's own memory; others may be plain, too."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return is_plain(tensor) and not tensor.is_quantized


def host_memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it can be sent as it is, else a copy in host memory."""
    if is_plain(tensor):
        return tensor.detach()
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def landing_memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if its memory can be written, else memory for :func:`put_back` that holds anything."""
    return tensor.detach() if is_plain(tensor) else _empty(tensor.numel(), tensor.dtype).view(tensor.shape)


def shares_memory(host: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether ``host``, made of ``tensor`` by one of these functions, is that very memory."""
    return host.data_ptr() == tensor.data_ptr()


def put_back(host: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy what was made in host memory to where it belongs, if that is elsewhere.

    A tensor of an inference may only be written where the inference goes on, but what was detached just before may. Of
    elements that share memory, as ``expand()`` makes them, the first one's value counts for all.
    """
    if not shares_memory(host, tensor):
        values, place = without_repeats(host.view(tensor.shape), tensor.detach())
        place.copy_(values)


def without_repeats(values: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both without what is the same memory again in ``place``: torch writes nothing that ``expand()`` made."""
    for dimension, stride in enumerate(place.stride()):
        if not stride and place.size(dimension) > 1:
            values, place = values.narrow(dimension, 0, 1), place.narrow(dimension, 0, 1)
    return values, place


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the memory of all as one flat tensor, if they lie one directly behind the other in one storage."""
    first = tensors[0]
    starts = accumulate((tensor.nbytes for tensor in tensors[:-1]), initial=first.data_ptr())
    storage = first.untyped_storage().data_ptr()
    for tensor, start in zip(tensors, starts, strict=True):
        is_next = is_plain(tensor) and tensor.dtype == first.dtype and tensor.data_ptr() == start
        if not is_next or tensor.untyped_storage().data_ptr() != storage:
            return None
    return first.detach().as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


def overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether any two of these tensors have memory in common, with what lies between numbers of one."""
    return any(stop > start for (_, stop), (start, _) in pairwise(_ranges(tensors)))


def touches(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether one of ``others`` has memory in common with one of ``tensors``, which do not overlap; all contiguous."""
    ranges = _ranges(tensors)
    for start, stop in _ranges(others):
        place = bisect_left(ranges, (stop, 0)) - 1  # of those that begin before it ends, the last ends last
        if place >= 0 and ranges[place][1] > start:
            return True
    return False


def _ranges(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return sorted((tensor.data_ptr(), tensor.data_ptr() + _extent(tensor)) for tensor in tensors if tensor.nbytes)


def _extent(tensor: torch.Tensor) -> int:
    """Return how many bytes lie from the first number to the end of the last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (sum(steps) + 1) * tensor.itemsize


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the number type in which norms of ``dtype`` are made."""
    return torch.complex128 if dtype.is_complex else torch.float64


def _empty(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(mode=False):  # memory that is kept must not belong to an inference
        return torch.empty(num_elements, dtype=dtype)


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of all tensors as bytes in host memory."""
    pieces = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


def unpack(packed: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Write packed elements back into tensors like those that they came from."""
    start = 0
    for tensor in tensors:
        stop = start + tensor.numel() * tensor.element_size()
        # a copy of the bytes begins at an address that suits any type
        values = packed[start:stop].clone().view(tensor.dtype).reshape(tensor.shape)
        tensor.data.copy_(values)
        start = stop


# Host memory in large pages, where the kernel has them.
#
# Ranks of one machine copy out of each other's memory, and for each page the kernel looks up where it is: of pages of
# 4 KiB that takes longer than the copying itself.

PAGE_BYTES = 2 << 20
ALIGNMENT_BYTES = 64
"""Of each tensor, as PyTorch's own."""


def aligned(num_bytes: int) -> int:
    """Return the next multiple of :data:`ALIGNMENT_BYTES`."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def zeros_in_large_pages(sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return zeros of dtype uint8 and these numbers of bytes (at least 1), one behind the other in large pages.

    The memory is given back when the last of them is. Where the kernel has no large pages, it has small ones.

    >>> [len(tensor) for tensor in zeros_in_large_pages([100, 3 << 20])]
    [100, 3145728]
    """
    starts = list(accumulate(map(aligned, sizes), initial=0))
    memory = mmap.mmap(-1, starts[-1] + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    edge = -_address(memory) % PAGE_BYTES
    whole_bytes = starts[-1] // PAGE_BYTES * PAGE_BYTES  # a large page that is used in part would cost all of itself
    if whole_bytes and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE, edge, whole_bytes)
    return [
        torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=edge + start)
        for size, start in zip(sizes, starts[:-1], strict=True)
    ]


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
