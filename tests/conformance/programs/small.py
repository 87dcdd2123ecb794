"""What programs share: small models, the plain loop, and what is compared at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from neutral_run import Run

mse = nn.functional.mse_loss


def perceptron(features: int = 6, outputs: int = 3) -> nn.Sequential:
    """Two hidden layers; parameters of several shapes, in several buckets."""
    return nn.Sequential(nn.Linear(features, 17), nn.Tanh(), nn.Linear(17, 11), nn.Tanh(), nn.Linear(11, outputs))


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.SGD:
    """Plain gradient descent."""
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def adam(model: nn.Module, lr: float = 0.01, **options: Any) -> torch.optim.Adam:
    """Adam, so that first and second moments are compared too."""
    return torch.optim.Adam(model.parameters(), lr=lr, **options)


def final(run: Run, model: nn.Module, **more: Any) -> dict[str, Any]:
    """Return all parameters and buffers by name, and ``more``."""
    return {name: value.clone() for name, value in run.module(model).state_dict().items()} | more


def train(
    run: Run,
    model: nn.Module,
    optimizer: Any,
    *,
    steps: int = 6,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]] | None = None,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = mse,
    after_step: Callable[[int], object] = lambda _: None,
) -> list[float]:
    """Run the plain loop, and return the losses of all ranks, averaged."""
    losses = []
    for step, (inputs, targets) in enumerate(batches or run.pairs(steps)):
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        after_step(step)
        losses.append(float(run.mean(loss)))
    return losses


def trained(run: Run, model: nn.Module, optimizer: Any, **options: Any) -> dict[str, Any]:
    """Distribute, train in the plain loop, and return what is compared."""
    model, optimizer = run.wrap(model, optimizer)
    losses = train(run, model, optimizer, **options)
    return final(run, model, losses=losses)
