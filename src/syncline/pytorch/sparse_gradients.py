"""Sparse gradients of embeddings, where every rank gets whole ones: they travel dense, and are sparse again after it.

A parameter of a module with ``sparse=True`` has gradients for the rows that were looked up. Which rows any rank has is
told by one count for each row, summed over the ranks; so the optimizer touches the rows that it would touch in one
process with all batches. One more count per parameter says whether some rank's gradient is dense, as that of a tied
weight: then all ranks have it dense.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from syncline.updates.bucket import Bucket, Slot
from syncline.updates.control import ControlStream


class SparseGradients:
    """The sparse gradients of one model; parameters go by their position in buckets."""

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket], control: ControlStream) -> None:
        self._control = control
        weights = {id(module.weight) for module in model.modules() if getattr(module, "sparse", False) is True}
        self._ranges: dict[int, slice] = {}
        """By position, where the counts of a parameter lie: its rows, then the one for dense gradients."""
        self._places: dict[int, tuple[nn.Parameter, Bucket, Slot]] = {}
        start = 0
        for bucket in buckets:
            for slot, parameter in zip(bucket.plan.slots, bucket.tensors, strict=True):
                if id(parameter) in weights and len(slot.shape) > 0:
                    stop = start + slot.shape[0] + 1
                    self._ranges[slot.position] = slice(start, stop)
                    self._places[slot.position] = parameter, bucket, slot
                    start = stop
        self._counts = torch.zeros(start, dtype=torch.int32)

    @property
    def positions(self) -> frozenset[int]:
        """The parameters whose gradients may be sparse."""
        return frozenset(self._ranges)

    def take(self, position: int, gradient: torch.Tensor) -> torch.Tensor:
        """Note the rows of this rank's gradient, and return it dense."""
        counts = self._counts[self._ranges[position]]
        if gradient.layout is torch.strided:
            counts[-1] = 1
            return gradient
        gradient = gradient.coalesce()
        counts[gradient.indices()[0].cpu()] = 1
        return gradient.to_dense()

    def start_pass(self) -> None:
        """Forget the rows of the pass before."""
        self._counts.zero_()

    def show(self, exist: Sequence[bool]) -> None:
        """Put the combined gradients that exist (by position) where PyTorch looks for them; a collective."""
        if not self._ranges:
            return
        self._control.sum(self._counts, "rows of sparse gradients")
        for position, where in self._ranges.items():
            counts = self._counts[where]
            if not exist[position] or counts[-1]:
                continue
            parameter, bucket, slot = self._places[position]
            place = bucket.gradient(slot)
            rows = counts[:-1].nonzero().to(place.device)
            parameter.grad = torch.sparse_coo_tensor(
                rows.T, place[rows[:, 0]], place.shape, is_coalesced=True, check_invariants=False
            )
