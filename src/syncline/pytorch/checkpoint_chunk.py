"""A chunk of a tensor: what a rank writes of it, or needs of it, wherever that lies on the disk."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of the tensor called ``name`` (of shape ``size``), which begins at ``offset``."""

    name: str
    size: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> Chunk:
        """Make a chunk that is all of its tensor."""
        return cls(name=name, size=tuple(tensor.shape), offset=(0,) * tensor.dim(), tensor=tensor)
