"""What the machines of a pair talk about: passes, phases, and the instructions that follow from what has happened."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What is done with a stage in a phase."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"


class Pass(StrEnum):
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
class StageInstruction:
    """What is to be done with ``stage``."""

    stage: int


@dataclass(frozen=True, slots=True)
class PhaseInstruction:
    """What is to be done with ``phase``, or with what was sent for it."""

    phase: Phase


class Load(StageInstruction):
    """Give ``stage`` memory, and read its parameters into it."""


class Drop(StageInstruction):
    """Take the memory of ``stage`` away."""


class LoadState(StageInstruction):
    """Read this rank's optimizer state of ``stage``."""


class Compute(PhaseInstruction):
    """Compute ``phase``; one at a time."""


class Send(PhaseInstruction):
    """Send what was computed to the partner, which needs it for ``phase``."""


class Reduce(StageInstruction):
    """Reduce-scatter the gradients of ``stage`` among the ranks of this side."""


class StoreGradients(StageInstruction):
    """Write this rank's shard of the gradients of ``stage``, and free their memory."""


@dataclass(frozen=True, slots=True)
class SumNorm:
    """Sum the squares of all gradients over all ranks: those of this rank are complete."""


class LoadGradients(StageInstruction):
    """Read this rank's shard of the gradients of ``stage``."""


class Update(StageInstruction):
    """Step this rank's shard of ``stage``, and gather the others'."""


class Store(StageInstruction):
    """Write parameters and state of ``stage``."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Declare that all stages of this rank are stored as they are after ``step``, and tell all ranks."""

    step: int


class Spill(PhaseInstruction):
    """Write what was sent for ``phase``; it stays in memory meanwhile."""


class Fetch(PhaseInstruction):
    """Read what was sent for ``phase``, and was spilled."""


class Forget(PhaseInstruction):
    """Free the memory of what was sent for ``phase``."""


class Remove(PhaseInstruction):
    """Free the storage of what was sent for ``phase``."""


Instruction = StageInstruction | PhaseInstruction | SumNorm | Commit
