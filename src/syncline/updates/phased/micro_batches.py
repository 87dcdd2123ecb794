"""Micro-batches: a batch in equal parts along the first dimension of its tensors, which go through a stage in turn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from syncline.errors import UpdateError
from syncline.updates.private_torch import tree_leaves, tree_map


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A part of a batch; what this rank does not need of it is None."""

    inputs: Any
    targets: Any
    num_samples: float
    """0 where this rank has no inputs: the first rank of the pair tells it."""


def divide(value: Any, number: int, what: str) -> list[Any]:
    """Return ``number`` equal parts of a batch: views of each of its tensors; what is no tensor is in every part.

    Raises :class:`UpdateError` if there is no tensor, or one whose first dimension is no multiple of ``number``.

    >>> divide({"x": torch.arange(4), "name": "a"}, 2, "inputs")
    [{'x': tensor([0, 1]), 'name': 'a'}, {'x': tensor([2, 3]), 'name': 'a'}]
    """
    if number == 1 or value is None:
        return [value] * number
    tensors = [leaf for leaf in tree_leaves(value) if _is_divided(leaf)]
    sizes = sorted({leaf.shape[0] for leaf in tensors})
    if not tensors or any(size % number for size in sizes):
        found = f"first dimensions of {sizes}" if tensors else "no tensor"
        raise UpdateError(
            f"With {number} micro-batches the first dimension of each tensor of a batch is a multiple of {number}, but "
            f"the {what} have {found}; take other batches (drop_last=True leaves out a smaller last one), or another "
            "number of micro-batches"
        )
    return [tree_map(partial(_part, part=part, number=number), value) for part in range(number)]


def _is_divided(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _part(leaf: Any, *, part: int, number: int) -> Any:
    if not _is_divided(leaf):
        return leaf
    size = leaf.shape[0] // number
    return leaf[part * size : (part + 1) * size]
