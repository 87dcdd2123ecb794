"""The model that every method trains: residual MLP blocks, and a batch that stays the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from syncline.bench.task import ModelShape

SEED = 0
LEARNING_RATE = 1e-4


class Block(nn.Module):
    """``width`` to 4 x ``width`` and back, added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inward = nn.Linear(width, 4 * width)
        self.outward = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is (batch, width), and so is the result."""
        out: Tensor = x + self.outward(self.inward(x).relu())
        return out


def build_model(shape: ModelShape) -> nn.Sequential:
    """Build the model with the same numbers on every rank and for every method."""
    torch.manual_seed(SEED)
    return nn.Sequential(*(Block(shape.width) for _ in range(shape.num_blocks)))


def build_batch(shape: ModelShape, rank: int) -> tuple[Tensor, Tensor]:
    """Return this rank's inputs and targets."""
    generator = torch.Generator().manual_seed(SEED + 1 + rank)
    inputs, targets = torch.randn(2, shape.batch_size, shape.width, generator=generator)
    return inputs, targets


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, as every method has it."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
