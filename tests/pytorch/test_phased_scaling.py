"""A gradient scaler is refused wherever a phased model may meet it, before a scaled loss is trained on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from phased_models import make_batches, make_stages, squared

from syncline.errors import ConfigurationError
from syncline.pytorch.phased import phase

SCALER = torch.amp.GradScaler("cpu")
IDLE = torch.amp.GradScaler("cpu", enabled=False)
REFUSED = r"a GradScaler, which scales the loss; phase\(\) computes stages in host memory .* return the plain mean"


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


def scaled_by_a_global(output: torch.Tensor, targets: torch.Tensor) -> Any:
    return SCALER.scale(squared(output, targets))


def scaled_by_an_argument(scaler: Any, output: torch.Tensor, targets: torch.Tensor) -> Any:
    return scaler.scale(squared(output, targets))


class Training:
    """As many programs keep a scaler: beside the loss that uses it."""

    def __init__(self) -> None:
        self.scaler = SCALER

    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> Any:
        return self.scaler.scale(squared(output, targets))

    __call__ = loss


def enclosing() -> Callable[..., Any]:
    own = SCALER
    return lambda output, targets: own.scale(squared(output, targets))


@pytest.mark.parametrize(
    "loss",
    [
        scaled_by_a_global,
        enclosing(),
        partial(scaled_by_an_argument, SCALER),
        Training().loss,
        Training(),
    ],
    ids=["global", "enclosed", "bound", "method", "object"],
)
def test_a_loss_that_scales_is_refused(loss: Any, run_fleets: Any) -> None:
    def body(fleet: Any) -> None:
        with pytest.raises(ConfigurationError, match=REFUSED):
            phase(make_stages(2), sgd, loss=loss, fleet=fleet)

    run_fleets(2, body)


def test_a_scaler_that_is_not_enabled_changes_nothing(run_fleets: Any) -> None:
    inputs, targets = make_batches(1, 1)[0][0]

    def body(fleet: Any, loss: Any) -> float:
        trainer = phase(make_stages(2), sgd, loss=loss, fleet=fleet)
        told = trainer.step(inputs, targets)
        IDLE.step(trainer.optimizer)
        return told

    plain = run_fleets(2, partial(body, loss=squared))
    assert run_fleets(2, partial(body, loss=partial(scaled_by_an_argument, IDLE))) == plain


def test_a_scaler_that_was_not_seen_is_refused_when_it_steps(run_fleets: Any) -> None:
    inputs, targets = make_batches(1, 1)[0][0]

    def body(fleet: Any) -> None:
        scaler = torch.amp.GradScaler("cpu")
        hidden = [scaler]
        trainer = phase(make_stages(2), sgd, loss=lambda *given: hidden[0].scale(squared(*given)), fleet=fleet)
        trainer.step(inputs, targets)
        scaler.scale(torch.ones(1))  # as the loss did, on the rank that computes it
        with pytest.raises(ConfigurationError, match="A GradScaler steps the optimizer of a phased model; phase"):
            scaler.step(trainer.optimizer)

    run_fleets(2, body)
