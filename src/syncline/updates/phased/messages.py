"""What goes between the two ranks of a pair: a text that describes what follows, then each tensor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from syncline.tensors.memory import bytes_of
from syncline.updates.phased.instructions import Kind, Pass, Phase
from syncline.updates.phased.micro_batches import WHOLE, Part


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
    """Of the pair's whole batch."""
    share: float = 1.0
    """That of the micro-batch in them."""
    part: Part = WHOLE
    """Which rows of the batch the micro-batch has."""
    loss: float | None = None
    """Of the micro-batches so far, once it is known."""

    @property
    def call(self) -> tuple[Pass, int]:
        """Which pass it belongs to: what kind, and which of all."""
        return self.kind, self.number

    @property
    def num_bytes(self) -> int:
        """Memory of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not None)

    def encode(self) -> bytes:
        """Return the text."""
        fields = {
            "phase": [self.phase.kind.value, self.phase.stage, self.phase.micro],
            "kind": self.kind.value,
            "number": self.number,
            "tensors": [None if one is None else [str(one.dtype)[6:], *one.shape] for one in self.tensors],
            "is_tuple": self.is_tuple,
            "num_samples": self.num_samples,
            "share": self.share.hex(),
            "part": [self.part.start, self.part.stop, self.part.total],
            "loss": None if self.loss is None else self.loss.hex(),
        }
        return json.dumps(fields).encode()


def decode(text: bytes) -> tuple[Message, list[memoryview]]:
    """Return the message that a text describes, its tensors not filled yet, and their memory."""
    fields = json.loads(text)
    kind, stage, micro = fields["phase"]
    message = Message(
        phase=Phase(Kind(kind), stage, micro),
        kind=Pass(fields["kind"]),
        number=fields["number"],
        tensors=tuple(None if one is None else _make(one) for one in fields["tensors"]),
        is_tuple=fields["is_tuple"],
        num_samples=fields["num_samples"],
        share=float.fromhex(fields["share"]),
        part=Part(*fields["part"]),
        loss=None if fields["loss"] is None else float.fromhex(fields["loss"]),
    )
    return message, [bytes_of(tensor) for tensor in message.tensors if tensor is not None]


def _make(described: Sequence[int | str]) -> torch.Tensor:
    name, *shape = described
    dtype = getattr(torch, str(name))
    assert isinstance(dtype, torch.dtype), "a text names types of tensors"
    return torch.empty([int(size) for size in shape], dtype=dtype)
