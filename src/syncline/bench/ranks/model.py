"""The model that every method trains: residual MLP blocks or the demo's GPT, and a batch that stays the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as PyTorch's users have it

from syncline.bench.task import ModelShape
from syncline.demo import gpt

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


def build_model(shape: ModelShape) -> nn.Module:
    """Build the model with the same numbers on every rank and for every method."""
    torch.manual_seed(SEED)
    if shape.is_demo:
        return gpt.GPT(gpt.GPTShape())
    return nn.Sequential(*(Block(shape.width) for _ in range(shape.num_blocks)))


def build_batch(shape: ModelShape, rank: int) -> tuple[Tensor, Tensor]:
    """Return this rank's inputs and targets."""
    generator = torch.Generator().manual_seed(SEED + 1 + rank)
    if shape.is_demo:
        size = (2, shape.batch_size, gpt.GPTShape().context_length)
        inputs, targets = torch.randint(gpt.NUM_SYMBOLS, size, generator=generator)
    else:
        inputs, targets = torch.randn(2, shape.batch_size, shape.width, generator=generator)
    return inputs, targets


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of either model."""
    return (
        F.mse_loss(model(inputs), targets) if targets.is_floating_point() else gpt.nats_per_byte(model, inputs, targets)
    )


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, as every method has it."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
