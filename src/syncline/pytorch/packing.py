"""Packs tensors of any number types into one run of bytes, so that one message carries them all."""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
