"""How ranks of a soak train in pairs, with ``phase()``, and the same in plain PyTorch in one process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import syncline

WIDTHS = (16, 96, 64, 8)
NUM_SAMPLES = 4
NUM_PAIRS = 2


def make_stages() -> list[nn.Module]:
    generator = torch.Generator().manual_seed(12)
    stages: list[nn.Module] = [
        nn.Sequential(nn.Linear(first, second), nn.Tanh()).double() for first, second in pairwise(WIDTHS)
    ]
    for stage in stages:
        for parameter in stage.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    return stages


def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def pair_batch(pair: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(20_000 * pair + step)
    inputs = torch.randn(NUM_SAMPLES, WIDTHS[0], generator=generator, dtype=torch.float64)
    return inputs, torch.sin(inputs[:, : WIDTHS[-1]])


def squared(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - targets).square().mean()


def train_in_pairs(rank: Any) -> None:
    """Train to the end of the plan; each step tells the pair's loss, and the end the bits of each stage."""
    with syncline.init() as fleet:
        trainer = syncline.phase(make_stages(), optimizer_of, loss=squared)
        rank.teller.tell(event="ready", number=fleet.rank, join=None)
        pair = min(fleet.rank, trainer.partner) // 2
        for step in range(rank.plan["num_steps"]):
            rank.strike(step)
            loss = trainer.step(*pair_batch(pair, step))
            rank.tell_step(step + 1, digest="", value=loss, members=None)
        stages = {number: _digest(state) for number, state in trainer.stage_states()}
        rank.teller.tell(event="done", step=rank.plan["num_steps"], stages=stages)


def _digest(state: dict[str, torch.Tensor]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for value in state.values():
        found.update(value.numpy().tobytes())
    return found.hexdigest()


def replay_pairs() -> Iterator[list[float]]:
    """Yield the loss of each pair in one step after the other."""
    model = nn.Sequential(*make_stages())
    optimizer = optimizer_of(list(model.parameters()))
    step = 0
    while True:
        batches = [pair_batch(pair, step) for pair in range(NUM_PAIRS)]
        losses = [squared(model(inputs), targets) for inputs, targets in batches]
        optimizer.zero_grad()
        (sum(losses) / NUM_PAIRS).backward()  # type: ignore[union-attr]
        optimizer.step()
        yield [float(loss.detach()) for loss in losses]
        step += 1
