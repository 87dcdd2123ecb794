"""What workers send to a server shard, and what it and they then ask for: plain records, no I/O.

A *payload* is what comes with a message, which the machines never open. A worker's *place* is a buffer, by number;
whoever drives it maps numbers to memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# --- what a worker sends to a server shard ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """A gradient of ``worker`` for ``round_number``."""

    worker: int
    period: int
    round_number: int
    iteration: int
    """The worker's iteration when it pushed."""
    weight: float
    """Samples of an iteration; of a run, their mean, so that each gradient in it counts as much as one by itself."""
    payload: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """``worker`` has ended its period, with these parameters."""

    worker: int
    period: int
    weight: float
    """Samples that the worker used in the whole period."""
    iteration: int = 0
    """The worker's iteration since the start of the training."""
    payload: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """``worker`` greets the successor of a dead server, with the start of ``period`` that it holds."""

    worker: int
    period: int
    iteration: int = 0
    """The fleet's iteration at the start of ``period``."""
    weight: float = 1.0
    """Of the only one in an average."""
    payload: Any = field(default=None, compare=False, repr=False)


ServerMessage = Push | End | Hello

# --- instructions of a server shard ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Add the weighted mean of these (in rank order) to the cumulative sum."""

    round_number: int
    contributions: tuple[Push, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """Make the weighted mean of these (in rank order): the next period's start, which a greeting may hold already."""

    period: int
    contributions: tuple[End | Hello, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clear:
    """Set the cumulative sum to zero: a period begins."""

    period: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Send ``worker`` the cumulative sum."""

    worker: int
    period: int
    closed: int
    clock: int
    accepted: tuple[int, ...]
    """The latest rounds in which ``worker`` was, rising."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyAverage:
    """Send ``worker`` the average that ends ``period``."""

    worker: int
    period: int
    iteration: int = 0
    """The furthest iteration of a worker in the average: where the next period begins for all."""
    dropped: tuple[int, ...] = ()
    """For each rank, how many of its pushes this shard has dropped so far, as whoever sends it fills in."""


ServerInstruction = Fold | Average | Clear | Reply | ReplyAverage

# --- instructions of a worker ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Copy the gradient to ``place``; with ``add``, add it to what lies there."""

    place: int
    add: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Push what lies at ``place``."""

    place: int
    push: Push


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Add what the newest cumulative sum has over the last one used, and subtract what lies at ``subtract``.

    With ``replaces`` set, the gradient of this very step is among those that are in: it is not subtracted, it is not
    added in the first place.
    """

    closed: int
    subtract: tuple[int, ...]
    replaces: bool
    run_length: int
    """Own iterations that a global gradient stands for: the longest run that is settled by it."""
    num_steps: int = 1
    """Iterations of the fleet that all that is new stands for."""
    num_own: int = 0
    """Own iterations that are in it."""
