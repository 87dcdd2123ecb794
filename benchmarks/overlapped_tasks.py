"""What the ranks of a comparison of update rules learn: a model, this rank's data, and how the whole is judged.

Both models have much to compute for each parameter, so that two processors carry eight ranks and what is measured is
the network: a step's gradients are 116 kB with the digits; with the GPT 176 kB, and 1.1 MB with ``--width 96``.

Still, what moves messages has to share those two with what computes. A host whose accelerator computes has its
processors free meanwhile: with ``--accelerator-ms`` and a small batch a step is mostly waiting, as there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from accelerator import Timer
from sklearn.datasets import load_digits
from torch import nn

from syncline.demo.gpt import GPT, GPTShape, load_corpus, nats_per_byte

JUDGED_EVERY = 4
"""Of the digits, so many times fewer are judged, of all labels alike: judging takes the processor too."""
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, this rank's data, and how the whole is judged."""

    model: nn.Module
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
    judge: Callable[[nn.Module], float]
    batch_size: int


def digits_task(rank: int, world_size: int, options: argparse.Namespace) -> Task:
    """Handwritten digits; split by label, no rank sees more than a few of them."""
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    everything = torch.argsort(labels, stable=True) if options.split == "labels" else torch.arange(len(labels))
    own = everything.tensor_split(world_size)[rank]
    torch.manual_seed(options.seed)
    layers = [
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 16, 10)),
    ]

    def batch(step: int) -> Batch:
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step * 1009 + rank)
        chosen = own[torch.randint(len(own), (options.batch_size,), generator=generator)]
        return images[chosen], labels[chosen]

    def loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(inputs), targets)

    def judge(model: nn.Module) -> float:
        return loss(model, images[::JUDGED_EVERY], labels[::JUDGED_EVERY]).item()

    return Task(model=nn.Sequential(*layers), batch=batch, loss=loss, judge=judge, batch_size=options.batch_size)


def gpt_task(rank: int, world_size: int, options: argparse.Namespace) -> Task:  # noqa: ARG001 - ranks share the text
    """Python's own source, byte by byte; ranks draw their own windows."""
    corpus = load_corpus()
    shape = GPTShape(width=options.width, num_layers=2, num_heads=2, context_length=48)
    torch.manual_seed(options.seed)
    model = GPT(shape)
    held_out = corpus.validation_batch(num_sequences=64, context_length=shape.context_length)

    def batch(step: int) -> Batch:
        seed = options.seed * 1_000_003 + step * 1009 + rank
        return corpus.batch(num_sequences=options.batch_size, context_length=shape.context_length, seed=seed)

    def judge(model: nn.Module) -> float:
        return nats_per_byte(model, *held_out).item()

    return Task(model=model, batch=batch, loss=nats_per_byte, judge=judge, batch_size=options.batch_size)


def on_accelerator(task: Task, seconds: float) -> Task:
    """Return ``task`` with steps that wait ``seconds`` on top of computing, half of it before the backward pass."""

    def loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return Timer.apply(task.loss(model, inputs, targets), seconds / 2, True)

    return replace(task, loss=loss)


TASKS = {"digits": digits_task, "gpt": gpt_task}
