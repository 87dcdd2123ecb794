"""Gradients of parameters that no distributed optimizer has: ranks get their mean too, as with DDP.

A program may step such a parameter by hand, or with an optimizer that it gave nobody. No rule works on it, so it is in
no bucket: where there are any, each synchronised pass ends with one small sum, of the ranks' weights and of who has a
gradient of which, and sums of those that some rank has. ``p.grad`` is whole on every rank, whatever the rule divides.

A model may be distributed once with each of several optimizers, one after the other, so which parameters are left over
is asked when a pass needs it. Of several trainings of one model the first takes care of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

from syncline.errors import UpdateError
from syncline.updates.bucket import DEFAULT_BUCKET_BYTES
from syncline.updates.rule import Updater

# Which trainings there are in this process: for one that has to know of its neighbours, and for functions that are not
# told.

_lock = threading.Lock()
_trainings: list[ModelInTraining] = []
_num_changes = [0]


class ModelInTraining(Protocol):
    """What is known of a training here."""

    model: nn.Module

    @property
    def tensors(self) -> frozenset[nn.Parameter]:
        """The parameters that lie in its buckets."""


def add_training(training: ModelInTraining) -> None:
    """Remember a training."""
    with _lock:
        _trainings.append(training)
        _num_changes[0] += 1


def remove_training(training: ModelInTraining) -> None:
    """Forget a training; nothing happens if that was done before."""
    with _lock:
        _trainings[:] = [each for each in _trainings if each is not training]
        _num_changes[0] += 1


def all_trainings() -> tuple[ModelInTraining, ...]:
    """Return the trainings that there are."""
    with _lock:
        return tuple(_trainings)


def all_trained() -> frozenset[nn.Parameter]:
    """Return the parameters that lie in the buckets of any training."""
    return frozenset[nn.Parameter]().union(*(training.tensors for training in all_trainings()))


class OutsideGradients:
    """Averages the gradients of what ``model`` has beside ``own``, where it required gradients from the beginning."""

    def __init__(self, model: nn.Module, updater: Updater, own: frozenset[nn.Parameter]) -> None:
        self._model = model
        self._updater = updater
        self._own = own
        self.candidates = {
            parameter: name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.numel() and parameter not in own
        }
        """Names of what other optimizers may come to train, or nobody."""
        self._seen = -1
        self._current: dict[nn.Parameter, str] = {}
        self._fresh: set[nn.Parameter] = set()

    def note(self, parameter: nn.Parameter) -> bool:
        """Take note of a new gradient; return whether it is one that is averaged here.

        Raises :class:`UpdateError` where it is one that nobody can average.
        """
        if parameter.grad is None or parameter not in self._parameters():
            return False
        name, updater = self._current[parameter], self._updater
        if not updater.is_synchronous or updater.is_elastic:
            why = "elastic=True" if updater.is_elastic else f"{updater.rule_name}()"
            raise UpdateError(
                f"Parameter {name!r} got a gradient, but no optimizer that was given to distribute() has it, and with "
                f"{why} its gradient would stay this rank's own; call requires_grad_(False) of it, give it to the "
                "optimizer, or take AllReduce() or Sharded() without elastic=True, which average it"
            )
        if parameter.grad.layout is not torch.strided:
            raise UpdateError(
                f"The gradient of {name!r} is {parameter.grad.layout}, and no optimizer that was given to distribute() "
                "has it; make the layer with sparse=False, or give it to the optimizer with update=AllReduce()"
            )
        self._fresh.add(parameter)
        return True

    def check_known(self) -> None:
        """Raise :class:`UpdateError` if a parameter that no training knows has got a gradient: of this rank alone."""
        for name, parameter in self._model.named_parameters():
            if parameter.grad is None or not parameter.requires_grad or parameter in self._own:
                continue
            if parameter.numel() and parameter not in self.candidates and parameter not in all_trained():
                raise UpdateError(
                    f"Parameter {name!r} got a gradient, but came into the model after distribute(), or was frozen "
                    "then, so its gradient would stay this rank's own; distribute() the model once more, with an "
                    "optimizer that has it"
                )

    def average(self, weight: float) -> None:
        """End a pass in which this rank's gradients have this weight; every rank calls it."""
        parameters, control = self._parameters(), self._updater.collectives.control
        if not parameters or control.is_alone or not self._updater.is_synchronous or self._updater.is_elastic:
            return
        has_new = [weight > 0 and one in self._fresh and one.grad is not None for one in parameters]
        self._fresh.clear()
        totals = torch.tensor([weight, *has_new], dtype=torch.float64)
        total, *counts = control.sum(totals, "weights of gradients outside of the optimizer").tolist()
        new = [parameter for parameter, count in zip(parameters, counts, strict=True) if count]
        for kind in dict.fromkeys((parameter.dtype, parameter.device) for parameter in new):
            alike = [parameter for parameter in new if (parameter.dtype, parameter.device) == kind]
            self._average(alike, weight / total)

    def _average(self, parameters: list[nn.Parameter], share: float) -> None:
        """Make the gradients of parameters of one number type and device their sum of shares."""
        flat = torch.zeros(sum(one.numel() for one in parameters), dtype=parameters[0].dtype)
        for parameter, place in _places(parameters, flat):
            if share and parameter.grad is not None:
                place.copy_(parameter.grad.detach() * share)
        control = self._updater.collectives.control
        pieces = torch.split(flat, DEFAULT_BUCKET_BYTES // flat.element_size())
        for work in [control.start_sum(piece, "gradients outside of the optimizer") for piece in pieces]:
            work.wait()
        with torch.no_grad():
            for parameter, place in _places(parameters, flat):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(place)

    def _parameters(self) -> dict[nn.Parameter, str]:
        """Return what is left over by all trainings that there are now, alike on all ranks."""
        if not self.candidates:
            return self.candidates
        if self._seen != _num_changes[0]:
            self._seen, trained = _num_changes[0], all_trained()
            first = next((training.tensors for training in all_trainings() if training.model is self._model), None)
            left = {parameter: name for parameter, name in self.candidates.items() if parameter not in trained}
            self._current = left if first is self._own else {}
        return self._current


def _places(parameters: list[nn.Parameter], flat: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    parts = torch.split(flat, [parameter.numel() for parameter in parameters])
    return ((parameter, part.view(parameter.shape)) for parameter, part in zip(parameters, parts, strict=True))
