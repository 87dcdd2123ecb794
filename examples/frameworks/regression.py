"""What the examples of this folder train: a regression on batches of each rank's own; and one process as reference."""

from collections.abc import Iterable

import torch
from torch import nn

NUM_STEPS = 6
BATCH_SIZE = 8


def make_model() -> nn.Sequential:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def make_optimizer(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Return what all examples step with."""
    return torch.optim.AdamW(parameters, lr=0.01)


def make_batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs (8, 16) and targets (8, 4) of one rank and step."""
    inputs = torch.randn(BATCH_SIZE, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
    return inputs, inputs[:, :4].sin()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Iterable[int]) -> None:
    """Make one step on this rank's batch of each number."""
    for step in steps:
        inputs, targets = make_batch(rank, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def train_alone(world_size: int, num_steps: int = NUM_STEPS) -> nn.Module:
    """Return what one process learns from the batches of all ranks."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    for step in range(num_steps):
        batches = [make_batch(rank, step) for rank in range(world_size)]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return model


def report(name: str, rank: int, model: nn.Module, expected: nn.Module) -> None:
    """Print by how much the parameters, whole or in parts of DTensors, differ from those of one process."""
    difference = 0.0
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        difference = max(difference, (whole - other).abs().max().item())
    print(f"{name}: rank {rank} differs from one process by {difference:.1e}", flush=True)
