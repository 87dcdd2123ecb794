"""Host memory in large pages, where the kernel has them.

Ranks of one machine copy out of each other's memory, and for each page the kernel looks up where it is: of pages of
4 KiB that takes longer than the copying itself.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

PAGE_BYTES = 2 << 20
ALIGNMENT_BYTES = 64
"""Of each tensor, as PyTorch's own."""


def zeros_in_large_pages(sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return zeros of dtype uint8 and these numbers of bytes (at least 1), one behind the other in large pages.

    The memory is given back when the last of them is. Where the kernel has no large pages, it has small ones.

    >>> [len(tensor) for tensor in zeros_in_large_pages([100, 3 << 20])]
    [100, 3145728]
    """
    starts = list(accumulate((-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes), initial=0))
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
