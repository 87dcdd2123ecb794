"""What goes between the two ranks of a pair: a header of fixed size that describes what follows, then each tensor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from syncline.errors import UpdateError
from syncline.updates.phased.phases import Kind, Pass, Phase

HEADER_BYTES = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What one phase computed, for the phase that needs it."""

    phase: Phase
    """The phase that needs it."""
    kind: Pass
    number: int
    """Which pass it belongs to."""
    tensors: tuple[torch.Tensor | None, ...]
    """Outputs of the stage before, or gradients of the own outputs; None is a gradient that is zero."""
    is_tuple: bool
    """Whether the outputs were a tuple; a single tensor is not."""
    num_samples: float
    loss: float | None = None
    """Once it is known."""

    def encode(self) -> memoryview:
        """Return the header."""
        fields = {
            "phase": [self.phase.kind.value, self.phase.stage],
            "kind": self.kind.value,
            "number": self.number,
            "tensors": [None if one is None else [str(one.dtype)[6:], *one.shape] for one in self.tensors],
            "is_tuple": self.is_tuple,
            "num_samples": self.num_samples,
            "loss": None if self.loss is None else self.loss.hex(),
        }
        text = json.dumps(fields).encode()
        if len(text) > HEADER_BYTES:
            raise UpdateError(
                f"Stage {self.phase.stage} is given {len(self.tensors)} tensors, more than {HEADER_BYTES} bytes can "
                "describe; let stages pass fewer, larger tensors on"
            )
        return memoryview(bytearray(text.ljust(HEADER_BYTES)))


def decode(header: memoryview) -> Message:
    """Return the message that a header describes, its tensors not filled yet."""
    fields = json.loads(bytes(header))
    kind, stage = fields["phase"]
    return Message(
        phase=Phase(Kind(kind), stage),
        kind=Pass(fields["kind"]),
        number=fields["number"],
        tensors=tuple(None if one is None else _make(one) for one in fields["tensors"]),
        is_tuple=fields["is_tuple"],
        num_samples=fields["num_samples"],
        loss=None if fields["loss"] is None else float.fromhex(fields["loss"]),
    )


def _make(described: Sequence[int | str]) -> torch.Tensor:
    name, *shape = described
    dtype = getattr(torch, str(name))
    assert isinstance(dtype, torch.dtype), "a header names types of tensors"
    return torch.empty([int(size) for size in shape], dtype=dtype)
