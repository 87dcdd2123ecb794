"""Gradients that this rank was sent by others, such as processing units behind a gateway, for its next pass.

`docs/mechanisms.md`, Sharded update. They are kept as sums over samples, and join the buckets when these leave: for the
other ranks they are gradients of this one, which counts for as many more samples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from syncline.errors import UpdateError
from syncline.pytorch.samples import checked_number
from syncline.updates.bucket import Bucket, Slot

Gradients = Mapping[str, torch.Tensor] | Sequence[torch.Tensor | None]
"""By a parameter's name, or one for each trained parameter of the model in its order, None where there is none."""


class Contributions:
    """Sums what comes until a pass takes it; ``sparse`` are positions whose gradients do not travel dense."""

    def __init__(self, buckets: Sequence[Bucket], *, sparse: Collection[int] = ()) -> None:
        self._places = {slot.name: (bucket, slot) for bucket in buckets for slot in bucket.plan.slots}
        self._names = [name for name, _ in sorted(self._places.items(), key=lambda item: item[1][1].position)]
        self._sparse = sparse
        self._sums: dict[int, torch.Tensor] = {}
        self.weight = 0.0
        """Samples of all that came."""
        self.positions: set[int] = set()
        """Of the parameters for which something came."""

    def add(self, gradients: Gradients, num_samples: float) -> None:
        """Take means over ``num_samples``; if anything is wrong with them, nothing of them is taken."""
        num_samples = checked_number(num_samples)
        named = self._named(gradients)
        for name, gradient in named.items():
            self._check(name, gradient)
        if not num_samples:
            return
        for name, gradient in named.items():
            bucket, slot = self._places[name]
            self._sum(bucket, slot).add_(gradient.detach().to(bucket.plan.device), alpha=num_samples)
            self.positions.add(slot.position)
        self.weight += num_samples

    def join(self, bucket: Bucket, factor: float) -> None:
        """Add ``factor`` times the sums to the gradients of a bucket that is complete."""
        if bucket.index in self._sums:
            bucket.gradients.add_(self._sums[bucket.index], alpha=factor)

    def clear(self) -> None:
        """Begin anew: a pass has taken what came."""
        self._sums.clear()
        self.positions.clear()
        self.weight = 0.0

    def _named(self, gradients: Gradients) -> dict[str, torch.Tensor]:
        if isinstance(gradients, Mapping):
            return dict(gradients)
        if len(gradients) != len(self._names):
            raise UpdateError(
                f"contribute() takes one gradient for each of the {len(self._names)} parameters that the optimizer "
                f"trains, or None, in the model's order, not {len(gradients)}; or give them by name"
            )
        return {name: one for name, one in zip(self._names, gradients, strict=True) if one is not None}

    def _check(self, name: str, gradient: object) -> None:
        if name not in self._places:
            known = ", ".join(self._names[:8]) + (", ..." if len(self._names) > 8 else "")
            raise UpdateError(
                f"contribute(): {name!r} is no parameter that this optimizer trains; its parameters are {known}"
            )
        bucket, slot = self._places[name]
        if not isinstance(gradient, torch.Tensor) or gradient.layout is not torch.strided:
            raise UpdateError(f"contribute(): the gradient of {name!r} is a dense tensor, not {_kind(gradient)}")
        if tuple(gradient.shape) != slot.shape or gradient.dtype != bucket.plan.dtype:
            raise UpdateError(
                f"contribute(): the gradient of {name!r} has the parameter's shape {slot.shape} and number type "
                f"{bucket.plan.dtype}, not {tuple(gradient.shape)} and {gradient.dtype}"
            )
        if slot.position in self._sparse:
            raise UpdateError(f"contribute(): {name!r} has sparse gradients here; make its layer with sparse=False")

    def _sum(self, bucket: Bucket, slot: Slot) -> torch.Tensor:
        """Return the place of a sum, in at least float32: a sum over samples is larger than their mean."""
        if bucket.index not in self._sums:
            dtype = torch.promote_types(bucket.plan.dtype, torch.float32)
            self._sums[bucket.index] = torch.zeros(bucket.plan.num_elements, dtype=dtype, device=bucket.plan.device)
        return slot.view(self._sums[bucket.index])


def _kind(value: object) -> str:
    return f"one of layout {value.layout}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
