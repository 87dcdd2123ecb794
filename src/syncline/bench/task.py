"""What the ranks of a benchmark are told to measure, and how often; it reaches them as a JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args

from pydantic import TypeAdapter

from syncline.errors import ConfigurationError

BUDGET_S = 60.0
"""Of one method."""
MIN_ROUNDS = 3
"""With fewer there is no spread to speak of."""
Experiment = Literal["collectives", "training"]
Order = Literal["topology", "interleaved"]
CollectiveName = Literal["all-reduce", "reduce-scatter", "all-gather"]
ORDERS: tuple[Order, ...] = get_args(Order)
COLLECTIVES: tuple[CollectiveName, ...] = get_args(CollectiveName)
COLLECTIVE_PEERS = ("gloo",)
TRAINING_PEERS = ("ddp", "ddp-syncline", "zero", "zero-syncline", "fsdp2", "fsdp2-syncline", "post-local-sgd")
NO_PEERS = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """``num_warm_ups`` rounds that do not count, then ``num_rounds`` that do.

    A method that has taken ``BUDGET_S`` seconds gets no more than ``MIN_ROUNDS`` rounds, and no second warm-up once it
    has taken a quarter of it: a slow peer must not make a benchmark endless.
    """

    num_rounds: int = 5
    num_warm_ups: int = 2


class Tally:
    """The rounds of one method so far; every rank must tell it the same times."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._num_warm_ups = 0
        self._spent_s = 0.0
        self.seconds: list[float] = []
        """What the counted rounds measured."""

    @property
    def wants_more(self) -> bool:
        """Whether another round is due."""
        if self._is_warming_up:
            return True
        enough = self._pace.num_rounds
        return len(self.seconds) < (min(MIN_ROUNDS, enough) if self._spent_s >= BUDGET_S else enough)

    def add(self, measured_s: float, *, elapsed_s: float) -> None:
        """Take note of a round that took ``elapsed_s`` and whose figure is ``measured_s``."""
        if self._is_warming_up:
            self._num_warm_ups += 1
        else:
            self.seconds.append(measured_s)
        self._spent_s += elapsed_s

    @property
    def _is_warming_up(self) -> bool:
        if self.seconds or self._num_warm_ups >= self._pace.num_warm_ups:
            return False
        return not self._num_warm_ups or self._spent_s < BUDGET_S / 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The model of the training step: residual blocks, each ``width`` to 4 x ``width`` and back, with ReLU between.

    With ``is_demo`` it is the demo's GPT instead.
    """

    num_blocks: int = 8
    width: int = 256
    batch_size: int = 64
    """Samples of each rank in one step."""
    is_demo: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What all ranks measure in one run."""

    experiment: Experiment
    collectives: tuple[CollectiveName, ...] = ("all-reduce",)
    sizes_bytes: tuple[int, ...] = ()
    pace: Pace = field(default_factory=Pace)
    peers: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    """Of this library's, by their titles, those that train; all where none are named."""
    num_steps: int = 8
    """Training steps that are timed in a row."""
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
        return TypeAdapter(cls).validate_json(path.read_bytes())


def choose_peers(experiment: Experiment, asked: Iterable[str]) -> tuple[str, ...]:
    """Return the peers to measure: all that there are, unless some are asked for by name, or ``none``."""
    known = COLLECTIVE_PEERS if experiment == "collectives" else TRAINING_PEERS
    names = tuple(dict.fromkeys(asked))
    if not names:
        return known
    if names == (NO_PEERS,):
        return ()
    check_known("--peers", names, known, f" for {experiment}, or {NO_PEERS} alone")
    return names


def check_known(option: str, names: Iterable[str], known: Iterable[str], more: str = "") -> None:
    """Raise :class:`ConfigurationError` if an option names what is not known; ``more`` is said of what it may name."""
    if unknown := [name for name in names if name not in known]:
        raise ConfigurationError(f"{option} must be of {listed(known)}{more}, got {listed(unknown)}")


def listed(names: Iterable[str]) -> str:
    """Join names by commas, those in quotes that have one themselves."""
    return ", ".join(f'"{name}"' if "," in name else name for name in names)
