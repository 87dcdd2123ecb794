"""A batch's gradients as vectors, and back: of all parameters, or of a rank's part where its cluster divides them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from syncline.schedule import Collective
from syncline.updates.bucket import Bucket
from syncline.updates.clustered.means import products_of
from syncline.updates.flat import Vector, VectorShape
from syncline.updates.report import StepReports
from syncline.updates.shard import Segment
from syncline.updates.sharded_updater import ShardedUpdater


class GradientVectors:
    """Where each rank has all of them."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self.shape = VectorShape.of(buckets)
        """Of what clusters exchange."""

    def take(self, present: Sequence[bool]) -> Vector:
        """Return the gradients, as they are after backward, of the parameters that are ``present`` (by position)."""
        own = self.shape.empty()
        for bucket, part in zip(self._buckets, own.parts, strict=False):
            bucket.stage_gradients()
            bucket.wait_staged()
            part.copy_(bucket.wire_gradients)
        own.presence.copy_(torch.tensor(present, dtype=torch.float32))
        return own

    def show(self, vector: Vector, *, is_pass: bool) -> None:  # noqa: ARG002 - what was there is not needed
        """Put what to step on where the optimizer reads it; a parameter that nobody used keeps no gradient.

        ``is_pass``: whether there were gradients in its place, of a backward pass.
        """
        present = (vector.presence > 0).tolist()
        for bucket, part in zip(self._buckets, vector.parts, strict=False):
            bucket.wire_gradients.copy_(part)
            bucket.unstage_gradients()
            bucket.show_gradients(present)

    def join(self, own: Vector) -> Vector:
        """Return the vector of which the cluster's ranks each have their ``own`` part; all of them call it."""
        return own

    def part(self, whole: Vector) -> Vector:
        """Return the own part of a vector."""
        return whole

    def products(self, now: Vector, before: Vector) -> tuple[float, float]:
        """Return the inner products of ``before`` with both, of whole vectors; all ranks of the cluster call it."""
        return products_of(now, before)


class DividedGradientVectors(GradientVectors):
    """Where each rank has those of its shards: what it adds up over a period is as small."""

    def __init__(self, updater: ShardedUpdater) -> None:
        super().__init__(updater.buckets)
        self._updater = updater
        gradients = ((gradient.dtype, gradient.numel()) for _, _, gradient in self._places())
        self._shape_of_part = VectorShape(parts=(*gradients, self.shape.parts[-1]))

    def take(self, present: Sequence[bool]) -> Vector:  # noqa: ARG002 - of what was carried or dropped its updater knows
        """Return those of the shards, as they were clipped and scaled."""
        own, gradients = self._shape_of_part.empty(), self._updater.divided_gradients
        gradients.apply_scales()
        for part, (_, _, gradient) in zip(own.parts, self._places(), strict=False):
            part.copy_(gradient)
        own.presence.copy_(torch.tensor(gradients.present, dtype=torch.float32))
        return own

    def show(self, vector: Vector, *, is_pass: bool) -> None:
        """Let the shards step on it; without a backward pass, all ranks of the cluster make one of zeros."""
        if not is_pass:
            self._pass_nothing()
        for part, (_, _, gradient) in zip(vector.parts, self._places(), strict=False):
            gradient.copy_(part)
        self._updater.divided_gradients.replace((vector.presence > 0).tolist())

    def join(self, own: Vector) -> Vector:
        """Gather the parts as those of parameters are."""
        whole, collectives = self.shape.zeros(), self._updater.collectives
        for part, (bucket, segment, _) in zip(own.parts, self._places(), strict=False):
            whole.parts[bucket.index][segment.start : segment.stop].copy_(part)
        calls = [
            collectives.start(bucket, Collective.ALL_GATHER, None, values=part)
            for bucket, part in zip(self._buckets, whole.parts, strict=False)
        ]
        for call in calls:
            call.wait()
        whole.presence.copy_(own.presence)
        return whole

    def part(self, whole: Vector) -> Vector:
        """Return a copy of what belongs to the shards."""
        own = self._shape_of_part.empty()
        for part, (bucket, segment, _) in zip(own.parts, self._places(), strict=False):
            part.copy_(whole.parts[bucket.index][segment.start : segment.stop])
        own.presence.copy_(whole.presence)
        return own

    def products(self, now: Vector, before: Vector) -> tuple[float, float]:
        """Sum those of the parts."""
        totals = torch.tensor(products_of(now, before), dtype=torch.float64)
        self._updater.collectives.control.start_sum(totals, "how a forecast has held").wait()
        return float(totals[0]), float(totals[1])

    def _pass_nothing(self) -> None:
        updater = self._updater
        updater.discard()
        updater.begin_backward()
        for bucket in self._buckets:
            bucket.gradients.zero_()
            updater.reduce(bucket)
        present = [False] * self.shape.parts[-1][1]
        reports = StepReports(updater.collectives.control)
        updater.finish_backward(reports.start(0.0, 1.0, present, (), step=updater.step_number))

    def _places(self) -> Iterator[tuple[Bucket, Segment, torch.Tensor]]:
        """Yield the segments of all shards with their gradients."""
        for bucket, shard in zip(self._buckets, self._updater.shards, strict=True):
            for segment, gradient in shard.gradients():
                yield bucket, segment, gradient
