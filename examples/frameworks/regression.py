"""What the examples of this folder train: a regression on scikit-learn's digits; and one process as reference."""

import functools
import time
from collections.abc import Iterable

import torch
from sklearn.datasets import load_digits
from torch import nn

NUM_STEPS = 6
BATCH_SIZE = 8


def make_model() -> nn.Sequential:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))


def make_optimizer(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Return what all examples step with."""
    return torch.optim.AdamW(parameters, lr=0.01)


def make_batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs (8, 64), images, and targets (8, 10), 1 at the digit that each shows, of one rank and step."""
    images, digits = read_digits()
    chosen = torch.randint(len(images), (BATCH_SIZE,), generator=torch.Generator().manual_seed(1000 * step + rank))
    return images[chosen], nn.functional.one_hot(digits[chosen], 10).float()


@functools.cache
def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return all images (1797, 64), from 0 to 1, and the digits that they show."""
    bunch = load_digits()
    return torch.tensor(bunch.data, dtype=torch.float32) / 16, torch.tensor(bunch.target)


class Speed:
    """How fast this rank trains after its first step, in which much is done once."""

    def __init__(self) -> None:
        self.num_steps = -1

    def count_step(self) -> None:
        """Note that a step is made."""
        self.num_steps += 1
        if self.num_steps == 0:
            self.began_s = time.perf_counter()

    def show(self) -> None:
        """Print it."""
        elapsed_s = time.perf_counter() - self.began_s
        print(f"{self.num_steps * BATCH_SIZE / elapsed_s:,.0f} samples/s", flush=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Iterable[int]) -> None:
    """Make one step on this rank's batch of each number."""
    speed = Speed()
    for step in steps:
        inputs, targets = make_batch(rank, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        speed.count_step()
    speed.show()


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
