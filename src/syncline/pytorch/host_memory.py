"""Tensors in the memory that is sent: themselves where they can be, else copies that are put back in the end."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch


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
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


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

    A tensor of an inference may only be written where the inference goes on, but what was detached just before may.
    """
    if not shares_memory(host, tensor):
        tensor.detach().copy_(host.view(tensor.shape))


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


def _empty(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(mode=False):  # memory that is kept must not belong to an inference
        return torch.empty(num_elements, dtype=dtype)
