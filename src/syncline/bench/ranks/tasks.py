"""What the trainings of ``syncline bench convergence`` learn: a GPT, and digits in several forms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as PyTorch's users have it

from syncline.demo import gpt
from syncline.errors import ConfigurationError

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningTask:
    """What one rank learns: all ranks have the same model, and data of their own."""

    model: nn.Module
    make_optimizer: Callable[..., torch.optim.Optimizer]
    draw: Callable[[int], Batch]
    """The batch of a step."""
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    held_out: Batch


def _drawn(seed: int, step: int, rank: int, num_choices: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step * 1009 + rank)
    return torch.randint(num_choices, (count,), generator=generator)


_corpus = functools.cache(gpt.load_corpus)


def gpt_task(rank: int, num_ranks: int, seed: int) -> LearningTask:
    """Predict the next byte of Python's library, of which each rank reads a part: 0.36 M parameters, Adam."""
    shape = gpt.GPTShape(width=96, num_layers=3, num_heads=4, context_length=48)
    text = _corpus()
    own = text.training.tensor_split(num_ranks)[rank]
    torch.manual_seed(seed)

    def draw(step: int) -> Batch:
        starts = _drawn(seed, step, rank, len(own) - shape.context_length - 1, 2)
        windows = own[starts[:, None] + torch.arange(shape.context_length + 1)].long()
        return windows[:, :-1], windows[:, 1:]

    return LearningTask(
        model=gpt.GPT(shape),
        make_optimizer=partial(torch.optim.Adam, lr=2e-3),
        draw=draw,
        loss=gpt.nats_per_byte,
        held_out=text.validation_batch(num_sequences=32, context_length=shape.context_length),
    )


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def _convolutions() -> nn.Module:
    convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10))


def digits_task(
    rank: int,
    num_ranks: int,
    seed: int,
    *,
    by_label: bool,
    make_optimizer: Callable[..., torch.optim.Optimizer],
    make_model: Callable[[], nn.Module] = _perceptron,
) -> LearningTask:
    """Read handwritten digits; with ``by_label`` no rank sees more than a few of them."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigurationError(
            "--task digits-... and convolution learn scikit-learn's digits, and it is not installed; pip install "
            "scikit-learn, or say --task gpt"
        ) from error
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    held_out, rest = order[:360], order[360:]
    own = (rest[torch.argsort(labels[rest], stable=True)] if by_label else rest).tensor_split(num_ranks)[rank]
    torch.manual_seed(seed)

    def draw(step: int) -> Batch:
        chosen = own[_drawn(seed, step, rank, len(own), 16)]
        return images[chosen], labels[chosen]

    return LearningTask(
        model=make_model(),
        make_optimizer=make_optimizer,
        draw=draw,
        loss=lambda model, inputs, targets: F.cross_entropy(model(inputs), targets),
        held_out=(images[held_out], labels[held_out]),
    )


_MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
_ADAM = partial(torch.optim.Adam, lr=3e-3)
TASKS: Mapping[str, Callable[[int, int, int], LearningTask]] = MappingProxyType(
    {
        "gpt": gpt_task,
        "digits-by-label": partial(digits_task, by_label=True, make_optimizer=_MOMENTUM),
        "digits-by-label-adam": partial(digits_task, by_label=True, make_optimizer=_ADAM),
        "digits-mixed": partial(digits_task, by_label=False, make_optimizer=_MOMENTUM),
        "digits-mixed-adam": partial(digits_task, by_label=False, make_optimizer=_ADAM),
        "convolution": partial(digits_task, by_label=False, make_optimizer=_ADAM, make_model=_convolutions),
    }
)
