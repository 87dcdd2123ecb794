"""Which models are in training: for functions that are not told."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from syncline.errors import UpdateError
from syncline.pytorch import trained_parameters

if TYPE_CHECKING:
    from syncline.pytorch.fleet import Fleet
    from syncline.pytorch.training import Training

_lock = threading.Lock()
_trainings: list[Training] = []


def check_untrained(model: nn.Module, named: Mapping[nn.Parameter, tuple[str, int]]) -> None:
    """Raise :class:`UpdateError` for a parameter that a distributed optimizer trains: it lies in that one's bucket.

    ``named`` maps the parameters that are to be trained to their names (and groups).
    """
    trained = trained_parameters.of_all()
    taken = [name for parameter, (name, _) in named.items() if parameter in trained]
    if taken:
        raise UpdateError(
            f"{len(taken)} of {len(named)} parameters of this {type(model).__name__} (first: {taken[0]!r}) were given "
            "to distribute() before; use the optimizer that it returned, give each further optimizer parameters of its "
            "own, or close the fleet first"
        )


def add_training(training: Training, fleet: Fleet) -> None:
    """Remember a model in training, and on which fleet."""
    with _lock:
        _trainings.append(training)
        training.fleet = fleet
    trained_parameters.add(training.model, training.tensors)


def fleet_of(training: Training) -> Fleet:
    """Return the fleet of a model that is in training, or was."""
    assert training.fleet is not None, "a training is added when it begins"
    return training.fleet


def remove_training(training: Training) -> None:
    """Forget a model in training."""
    with _lock:
        if training in _trainings:
            _trainings.remove(training)
    trained_parameters.remove(training.tensors)


def is_in_training(model: nn.Module) -> bool:
    """Whether ``model`` is in training with some optimizer."""
    with _lock:
        return any(training.model is model for training in _trainings)


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
