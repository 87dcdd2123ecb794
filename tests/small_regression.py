"""A small regression in double precision: its model, its loss, its optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model


def batch(rank: int, step: int, size: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranks see different distributions."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64) + 0.3 * rank
    targets = torch.sin(inputs[:, :3] * (1 + 0.2 * rank))
    return inputs.to(dtype), targets.to(dtype)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((model(inputs) - targets) ** 2).mean()


def parameters_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in model.parameters()])


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def make_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)
