"""Flat vectors and their weighted sums, in one fixed order each, so that any rank that repeats them gets the same bits.

A :class:`Vector` is all gradients (or all parameters) of a model in one piece of memory, ready to be sent. Where ranks
send each other vectors, the last part tells for each parameter whether it got a gradient: 1 or 0, and above 0 in a mean
if any rank had one. Ranks must agree on that, or optimizers that count steps would drift apart within a cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from syncline.tensors.memory import aligned, bytes_of
from syncline.updates.bucket import Bucket

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorShape:
    """The parts of a model's vectors: (number type, number of elements) of each bucket, and of the presence."""

    parts: tuple[tuple[torch.dtype, int], ...]

    @classmethod
    def of(cls, buckets: Sequence[Bucket]) -> VectorShape:
        """Return the shape of the vectors of a model with these buckets."""
        num_parameters = sum(len(bucket.plan.slots) for bucket in buckets)
        of_buckets = ((bucket.plan.dtype, bucket.plan.num_elements) for bucket in buckets)
        return cls(parts=(*of_buckets, (torch.float32, num_parameters)))

    @property
    def num_bytes(self) -> int:
        """Size of a vector, each part on an aligned address."""
        return sum(aligned(dtype.itemsize * number) for dtype, number in self.parts)

    def times(self, number: int) -> VectorShape:
        """Return the shape of so many vectors, one after the other."""
        return self if number == 1 else VectorShape(parts=self.parts * number)

    def empty(self) -> Vector:
        """Return a vector of undefined numbers."""
        return Vector(self, torch.empty(self.num_bytes, dtype=torch.uint8))

    def zeros(self) -> Vector:
        """Return a vector of zeros."""
        return Vector(self, torch.zeros(self.num_bytes, dtype=torch.uint8))


class Vector:
    """A vector: one piece of memory, with a flat tensor for each part."""

    def __init__(self, shape: VectorShape, storage: torch.Tensor) -> None:
        self.shape = shape
        self._storage = storage
        self.parts: list[torch.Tensor] = []
        start = 0
        for dtype, number in shape.parts:
            self.parts.append(storage[start : start + dtype.itemsize * number].view(dtype))
            start += aligned(dtype.itemsize * number)

    @property
    def presence(self) -> torch.Tensor:
        """Above 0 for each parameter that got a gradient."""
        return self.parts[-1]

    @property
    def memory(self) -> memoryview:
        """All of it, as writable bytes."""
        return bytes_of(self._storage)

    def piece(self, shape: VectorShape, number: int) -> Vector:
        """Return one of several vectors of ``shape`` that this one is made of, as a view."""
        size = shape.num_bytes
        return Vector(shape, self._storage[number * size : (number + 1) * size])

    def copy(self) -> Vector:
        """Return a copy."""
        return Vector(self.shape, self._storage.clone())

    def add(self, other: Vector, *, factor: float = 1.0) -> Vector:
        """Add ``factor`` times ``other`` to this one, and return it."""
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine.add_(theirs, alpha=factor)
        return self

    def scale(self, factor: float) -> Vector:
        """Multiply by ``factor``, and return it."""
        for part in self.parts:
            part.mul_(factor)
        return self

    def dot(self, other: Vector) -> float:
        """Return the inner product of the gradients, summed in double precision."""
        return sum(
            float(torch.dot(mine.to(torch.float64), theirs.to(torch.float64)))
            for mine, theirs in zip(self.parts[:-1], other.parts[:-1], strict=True)
        )


def combine(vectors: Sequence[Vector], factors: Sequence[float]) -> Vector:
    """Return the sum of ``factors[i] * vectors[i]``, added in that order; halves are added in single precision."""
    result = vectors[0].shape.empty()
    for number, part in enumerate(result.parts):
        total = torch.empty_like(part, dtype=sum_dtype(part.dtype))
        part.copy_(weighted_sum([vector.parts[number] for vector in vectors], factors, out=total))
    return result


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which elements of ``dtype`` are summed: of halves single precision."""
    return _WIDER.get(dtype, dtype)


def shares(weights: Sequence[float]) -> list[float]:
    """Return each weight over their sum; equal shares if nobody had any samples."""
    total = sum(weights)
    if total <= 0.0:
        return [1.0 / len(weights)] * len(weights)
    return [weight / total for weight in weights]


def weighted_sum(values: Sequence[torch.Tensor], factors: Sequence[float], *, out: torch.Tensor) -> torch.Tensor:
    """Write the sum of ``factors[i] * values[i]``, reckoned in the type of ``out`` and in that order; return it."""
    out.copy_(values[0]).mul_(factors[0])
    for value, factor in zip(values[1:], factors[1:], strict=True):
        out.add_(value.to(out.dtype), alpha=factor)
    return out
