"""What the ranks of a soak train, and the same in plain PyTorch in one process, told who took part in each step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

WIDTH = 128
NUM_SAMPLES = 4
"""Of each rank in each step, so that the mean over ranks is the mean over samples."""
TOLERANCE = 1e-9
"""Sums in another order differ by this, relative to the numbers' own size; the model has 64 bits."""


def make_model() -> nn.Module:
    generator = torch.Generator().manual_seed(11)
    model = nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))
    model = model.double()
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch_of(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * rank + step)
    return torch.randn(NUM_SAMPLES, 16, generator=generator, dtype=torch.float64) + 0.1 * rank


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(batch) - torch.sin(batch[:, :8])).square().mean()
    return loss


class Gauge:
    """Tells what parameters are: a hash of all bits, and one number that shows how far others are from them."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        number = sum(parameter.numel() for parameter in self._parameters)
        self._weights = torch.randn(number, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def read(self) -> tuple[str, float]:
        """Return both; the number is not a number where a parameter is none."""
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in self._parameters])
        return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest(), float(flat @ self._weights)


def replay() -> Iterator[float]:
    """Take part in no job: be sent the ranks of each step, and yield the gauge's number after it (first: before)."""
    model = make_model()
    optimizer, gauge = make_optimizer(model), Gauge(model)
    step = 0
    while True:
        members: Sequence[int] = yield gauge.read()[1]
        optimizer.zero_grad()
        loss_of(model, torch.cat([batch_of(rank, step) for rank in members])).backward()
        optimizer.step()
        step += 1


class Replays:
    """What each step ends with, told who made each of the steps before; what was asked for before is kept."""

    def __init__(self) -> None:
        self._running: dict[tuple[int, ...], tuple[Iterator[float], list[float], list[Sequence[int]]]] = {}

    def number(self, members: Sequence[Sequence[int]]) -> float:
        """Return the gauge's number after steps of these ``members``, one entry for each step."""
        first = tuple(members[0]) if members else ()
        running, numbers, made = self._running.get(first, (None, [], []))
        if running is None or made != list(members)[: len(made)]:  # others went on than in the run before
            running = replay()
            numbers, made = [next(running)], []
        for one in list(members)[len(made) :]:
            numbers.append(running.send(one))  # type: ignore[attr-defined]
            made.append(one)
        self._running[first] = running, numbers, made
        return numbers[len(members)]
