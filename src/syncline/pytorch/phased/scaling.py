"""Refuses ``torch.amp.GradScaler`` where a model is phased: its gradients are reduced and used as the loss made them.

A loss that a scaler multiplies would be trained on as it is, so what the loss function refers to is looked through, and
the optimizer tells when a scaler steps it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from syncline.errors import ConfigurationError
from syncline.updates.private_torch import SCALED, let_scalers_step

REMEDY = (
    "phase() computes stages in host memory and updates them itself, with the gradients of the loss as it is; return "
    "the plain mean, without a scaler (bfloat16 under torch.autocast needs none)"
)


def refuse_scaled_loss(loss: Callable[..., Any]) -> None:
    """Raise :class:`ConfigurationError` if ``loss`` refers to a scaler that is enabled."""
    for name, value in _referred_to(loss):
        if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
            raise ConfigurationError(f"The loss refers to {name!r}, a GradScaler, which scales the loss; {REMEDY}")


def refuse_scaled_steps(optimizer: torch.optim.Optimizer) -> None:
    """Let ``GradScaler.step(optimizer)`` raise :class:`ConfigurationError`."""
    let_scalers_step(optimizer)
    optimizer.register_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if hasattr(optimizer, SCALED):
        raise ConfigurationError(f"A GradScaler steps the optimizer of a phased model; {REMEDY}")


def _referred_to(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function refers to, by name: its globals, what it encloses, and what it was bound with."""
    while isinstance(function, partial):
        yield from ((f"argument {value!r}", value) for value in function.args)
        yield from function.keywords.items()
        function = function.func
    yield from getattr(getattr(function, "__self__", function), "__dict__", {}).items()
    if inspect.isfunction(function) or inspect.ismethod(function):
        variables = inspect.getclosurevars(function)
        yield from variables.nonlocals.items()
        yield from variables.globals.items()
