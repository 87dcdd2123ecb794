"""Micro-batches: parts of a batch along the first dimension of its tensors, which go through a stage in turn.

The rank that has the inputs says which rows each part has, and what it sends says so to the one that has the targets:
with those alone nobody knows how many rows a batch has, since a sample may have several rows of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from syncline.errors import ConfigurationError, UpdateError
from syncline.updates.private_torch import tree_leaves, tree_map


@dataclass(frozen=True, slots=True)
class Part:
    """Rows ``start`` to ``stop`` of each tensor of a batch, if it has ``total`` rows; by default all of it.

    Of a tensor with several times as many rows it is as many times these.
    """

    start: int = 0
    stop: int = 1
    total: int = 1


WHOLE = Part()


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A part of a batch; on the rank without inputs they are None, and the first rank of the pair tells the rest."""

    inputs: Any = None
    part: Part = WHOLE
    num_samples: float = 0.0


def plan_parts(inputs: Any, number: int) -> list[Part]:
    """Return ``number`` parts of a batch: equal ones if that can be, else the first ones have a row more.

    Raises :class:`ConfigurationError` if there are too few rows, or none, or tensors that have not the same rows.

    >>> plan_parts(torch.zeros(4, 3), 2), plan_parts({"x": torch.zeros(5), "ids": torch.zeros(10)}, 2)[1]
    ([Part(start=0, stop=1, total=2), Part(start=1, stop=2, total=2)], Part(start=3, stop=5, total=5))
    """
    if number == 1:
        return [WHOLE]
    sizes = check_rows(inputs, number, "inputs")
    if not any(size % number for size in sizes):
        return [Part(part, part + 1, number) for part in range(number)]
    rows = sizes[0]
    if any(size % rows for size in sizes):
        raise ConfigurationError(
            f"The first dimension of each tensor of a batch is that of its smallest, or a multiple, where that is no "
            f"multiple of micro_batches={number}, but the inputs have first dimensions of {sizes}; give all as many "
            "rows"
        )
    small, num_larger = divmod(rows, number)
    bounds = [part * small + min(part, num_larger) for part in range(number + 1)]
    return [Part(start, stop, rows) for start, stop in pairwise(bounds)]


def check_rows(value: Any, number: int, what: str) -> list[int]:
    """Return the first dimensions of all tensors of a batch, ascending; each part gets a row of each, or this raises.

    Raises :class:`ConfigurationError`.
    """
    sizes = _sizes(value)
    if not sizes or sizes[0] < number:
        found = f"first dimensions of {sizes}" if sizes else "no tensor"
        raise ConfigurationError(
            f"With micro_batches={number} a batch is divided along the first dimension of its tensors into {number} "
            f"parts of one row or more, but the {what} have {found}; give larger batches (drop_last=True leaves out a "
            "smaller last one), or let phase() make fewer micro-batches"
        )
    return sizes


def take(value: Any, part: Part, what: str) -> Any:
    """Return a part of a batch: views of its tensors; what is no tensor is in every part.

    Raises :class:`UpdateError` if a tensor has other rows than the part is of.

    >>> take({"x": torch.arange(4), "name": "a"}, Part(0, 1, 2), "inputs")
    {'x': tensor([0, 1]), 'name': 'a'}
    """
    if part == WHOLE:
        return value
    sizes = _sizes(value)
    if any(size % part.total for size in sizes):
        raise UpdateError(
            f"A batch is divided into rows {part.start} to {part.stop} of {part.total} and others, as its inputs are, "
            f"but the {what} have first dimensions of {sizes}; give them as many rows as the inputs, or a multiple"
        )
    return tree_map(partial(_rows, part=part), value)


def _sizes(value: Any) -> list[int]:
    return sorted({leaf.shape[0] for leaf in tree_leaves(value) if _is_divided(leaf)})


def _is_divided(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _rows(leaf: Any, *, part: Part) -> Any:
    if not _is_divided(leaf):
        return leaf
    rows = leaf.shape[0] // part.total
    return leaf[part.start * rows : part.stop * rows]
