"""A shard's optimizer state as named tensors and notes, so that a storage can keep it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from syncline.errors import UpdateError
from syncline.updates.bucket import BucketPlan
from syncline.updates.shard import Shard
from syncline.updates.shard_view import Segment

NOTE = "pieces"


class ShardState:
    """The state of this rank's shards of one stage, bucket by bucket, and within it piece by piece."""

    def __init__(self, buckets: Sequence[Sequence[tuple[tuple[Segment, ...], dict[str, Any]]]]) -> None:
        self.buckets = tuple(tuple(pieces) for pieces in buckets)

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> ShardState:
        """Take the state of ``shards``, which do not go on."""
        return cls([[(segments, dict(state)) for segments, state in shard.views()] for shard in shards])

    @property
    def num_bytes(self) -> int:
        """Memory of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return everything that is a tensor, by bucket, piece and key."""
        return {
            f"{bucket}.{piece}.{key}": value
            for bucket, pieces in enumerate(self.buckets)
            for piece, (_, state) in enumerate(pieces)
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        }

    def notes(self) -> dict[str, str]:
        """Return the rest: where each piece lies, and values that are no tensors."""
        told = [[[_places(segments), _plain(state)] for segments, state in pieces] for pieces in self.buckets]
        return {NOTE: json.dumps(told)}


def read_state(
    plans: Sequence[BucketPlan], tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str]
) -> ShardState:
    """Return the state that was stored."""
    buckets = []
    for bucket, (plan, pieces) in enumerate(zip(plans, json.loads(notes[NOTE]), strict=True)):
        slots = {slot.position: slot for slot in plan.slots}
        restored = []
        for piece, (places, plain) in enumerate(pieces):
            segments = tuple(Segment(slot=slots[number], start=start, stop=stop) for number, start, stop in places)
            prefix = f"{bucket}.{piece}."
            found = {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}
            restored.append((segments, plain | found))
        buckets.append(restored)
    return ShardState(buckets)


def _places(segments: Sequence[Segment]) -> list[tuple[int, int, int]]:
    return [(segment.slot.position, segment.start, segment.stop) for segment in segments]


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
    for key, value in plain.items():
        if not (value is None or isinstance(value, bool | int | float | str)):
            raise UpdateError(
                f"The optimizer keeps {key!r} as a {type(value).__name__}, which cannot be stored; use one whose state "
                "is tensors and numbers"
            )
    return plain
