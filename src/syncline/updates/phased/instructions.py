"""What the machines of a pair talk about: passes, phases, and the instructions that follow from what has happened."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What is done with a stage in a phase."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"


class Pass(Enum):
    """What all phases together do: a training step, or a forward pass alone."""

    TRAIN = "step"
    EVALUATE = "evaluate"


@dataclass(frozen=True, slots=True)
class Phase:
    """One stage's work on one micro-batch in a pass. What was sent for a phase goes by its name, too."""

    kind: Kind
    stage: int
    micro: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value} of stage {self.stage}" + (f", micro-batch {self.micro}" if self.micro else "")


@dataclass(frozen=True, slots=True)
class Load:
    """Give ``stage`` memory, and read its parameters into it."""

    stage: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Take the memory of ``stage`` away."""

    stage: int


@dataclass(frozen=True, slots=True)
class LoadState:
    """Read this rank's optimizer state of ``stage``."""

    stage: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute ``phase``; one at a time."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class Send:
    """Send what was computed to the partner, which needs it for ``phase``."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduce-scatter the gradients of ``stage`` among the ranks of this side."""

    stage: int


@dataclass(frozen=True, slots=True)
class StoreGradients:
    """Write this rank's shard of the gradients of ``stage``, and free their memory."""

    stage: int


@dataclass(frozen=True, slots=True)
class SumNorm:
    """Sum the squares of all gradients over all ranks: those of this rank are complete."""


@dataclass(frozen=True, slots=True)
class LoadGradients:
    """Read this rank's shard of the gradients of ``stage``."""

    stage: int


@dataclass(frozen=True, slots=True)
class Update:
    """Step this rank's shard of ``stage``, and gather the others'."""

    stage: int


@dataclass(frozen=True, slots=True)
class Store:
    """Write parameters and state of ``stage``."""

    stage: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Declare that all stages of this rank are stored as they are after ``step``, and tell all ranks."""

    step: int


@dataclass(frozen=True, slots=True)
class Spill:
    """Write what was sent for ``phase``; it stays in memory meanwhile."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read what was sent for ``phase``, and was spilled."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class Forget:
    """Free the memory of what was sent for ``phase``."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class Remove:
    """Free the storage of what was sent for ``phase``."""

    phase: Phase


Instruction = (
    Load
    | Drop
    | LoadState
    | Compute
    | Send
    | Reduce
    | StoreGradients
    | SumNorm
    | LoadGradients
    | Update
    | Store
    | Commit
    | Spill
    | Fetch
    | Forget
    | Remove
)
