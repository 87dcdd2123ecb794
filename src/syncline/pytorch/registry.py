"""Which fleet is current, and which models are in training: for functions that are not told."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from torch import nn

from syncline.errors import ConfigurationError, UpdateError

if TYPE_CHECKING:
    from syncline.pytorch.fleet import Fleet
    from syncline.pytorch.training import Training

_lock = threading.Lock()
_current: Fleet | None = None
_trainings: list[Training] = []


def set_current_fleet(fleet: Fleet) -> None:
    """Make ``fleet`` the one that ``distribute()`` finds; there may be no other."""
    global _current  # noqa: PLW0603 - one process is one rank of one job
    with _lock:
        if _current is not None:
            raise ConfigurationError(
                f"syncline.init() was called twice; {_current!r} is still open: use it, or close() it first"
            )
        _current = fleet


def clear_current_fleet(fleet: Fleet) -> None:
    """Forget ``fleet``, if it is the current one."""
    global _current  # noqa: PLW0603 - as above
    with _lock:
        if _current is fleet:
            _current = None


def current_fleet() -> Fleet:
    """Return the fleet that ``syncline.init()`` made."""
    if _current is None:
        raise ConfigurationError("There is no fleet; call syncline.init() first")
    return _current


def has_current_fleet() -> bool:
    """Whether ``syncline.init()`` was called, and its fleet not closed."""
    return _current is not None


def add_training(training: Training) -> None:
    """Remember a model in training."""
    with _lock:
        _trainings.append(training)


def remove_training(training: Training) -> None:
    """Forget a model in training."""
    with _lock:
        if training in _trainings:
            _trainings.remove(training)


def trainings_of(model: nn.Module | None) -> tuple[Training, ...]:
    """Return the trainings of ``model`` (a model may have several optimizers), or all; an error if there is none."""
    with _lock:
        found = tuple(training for training in _trainings if model is None or training.model is model)
    if model is not None and not found:
        raise UpdateError(
            f"This {type(model).__name__} was not given to distribute(), or its fleet was closed; give the model "
            "that distribute() returned"
        )
    return found
