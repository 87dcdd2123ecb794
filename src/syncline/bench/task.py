"""What the ranks of a benchmark are told to measure; it reaches them as a JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from syncline.bench.pace import Pace
from syncline.errors import ConfigurationError

Experiment = Literal["collectives", "training"]
Order = Literal["topology", "interleaved"]

CollectiveName = Literal["all-reduce", "reduce-scatter", "all-gather"]

ORDERS: tuple[Order, ...] = get_args(Order)
COLLECTIVES: tuple[CollectiveName, ...] = get_args(CollectiveName)
COLLECTIVE_PEERS = ("gloo",)
TRAINING_PEERS = ("ddp", "ddp-syncline", "zero", "zero-syncline", "fsdp2", "fsdp2-syncline", "post-local-sgd")
NO_PEERS = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The model of the training step: residual blocks, each ``width`` to 4 x ``width`` and back, with ReLU between."""

    num_blocks: int = 8
    width: int = 256
    batch_size: int = 64
    """Samples of each rank in one step."""

    @property
    def num_parameters(self) -> int:
        """Number of trained numbers, weights and biases."""
        hidden = 4 * self.width
        return self.num_blocks * (2 * self.width * hidden + hidden + self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run of all ranks: an experiment in one order of ranks."""

    experiment: Experiment
    order: Order
    collectives: tuple[CollectiveName, ...] = ("all-reduce",)
    sizes_bytes: tuple[int, ...] = ()
    pace: Pace = field(default_factory=Pace)
    peers: tuple[str, ...] = ()
    planners: tuple[str, ...] = ()
    """Planners that are measured by name, beside the one that Syncline chooses."""
    shape: ModelShape = field(default_factory=ModelShape)

    def __post_init__(self) -> None:
        if any(size < 4 for size in self.sizes_bytes):
            raise ConfigurationError(
                f"--bytes must be at least one float32 (4 bytes), got {min(self.sizes_bytes)}; write for instance 16MB"
            )

    def save(self, path: Path) -> None:
        """Write the task for the ranks."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Task:
        """Read what :meth:`save` wrote."""
        values: dict[str, Any] = json.loads(path.read_text())
        lists = {key: tuple(values[key]) for key in ("collectives", "sizes_bytes", "peers", "planners")}
        parts = {"pace": Pace(**values["pace"]), "shape": ModelShape(**values["shape"])}
        return cls(**{**values, **lists, **parts})


def choose_peers(experiment: Experiment, asked: Iterable[str]) -> tuple[str, ...]:
    """Return the peers to measure: all that there are, unless some are asked for by name, or ``none``."""
    known = COLLECTIVE_PEERS if experiment == "collectives" else TRAINING_PEERS
    names = tuple(dict.fromkeys(asked))
    if not names:
        return known
    if names == (NO_PEERS,):
        return ()
    if unknown := [name for name in names if name not in known]:
        raise ConfigurationError(
            f"--peers must be of {', '.join(known)} for {experiment}, or {NO_PEERS} alone, got {', '.join(unknown)}"
        )
    return names
