"""Small models with everything that has ever misled a data-parallel trainer, and batches for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, how its parameters are grouped, and where its batches come from."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    groups: Callable[[nn.Module], list[dict[str, object]]] = field(
        default=lambda model: [{"params": model.parameters()}]
    )
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-12
    is_batchwise: bool = False
    """What a sample gives depends on its batch (BatchNorm), so one process must go through the ranks' parts."""

    def make(self) -> nn.Module:
        """Build the model from a fixed seed; not in several threads at once."""
        torch.manual_seed(7)
        return self.build().to(self.dtype)

    def batches(self, num_steps: int, size: int) -> list[Batch]:
        """Draw batches from a fixed seed."""
        generator = torch.Generator().manual_seed(11)
        return [self.batch(size, generator) for _ in range(num_steps)]


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over samples of the squared error."""
    return ((model(inputs) - targets) ** 2).mean()


def train_alone(
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    shares: Sequence[Sequence[int]],
) -> None:
    """Train as one process on the union of the ranks' batches; ``shares`` are the ranks' sizes in each step."""
    for (inputs, targets), sizes in zip(batches, shares, strict=True):
        if case.is_batchwise:
            backward_in_parts(model, inputs.split(list(sizes)), targets.split(list(sizes)))
        else:
            loss_of(model, inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def backward_in_parts(model: nn.Module, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Add up each rank's gradient, weighted by its samples; buffers go on from rank 0's part."""
    total = sum(len(part) for part in inputs)
    before = [buffer.clone() for buffer in model.buffers()]
    after: list[torch.Tensor] = []
    for part, target in zip(inputs, targets, strict=True):
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
        (loss_of(model, part, target) * (len(part) / total)).backward()
        after = after or [buffer.clone() for buffer in model.buffers()]
    for buffer, value in zip(model.buffers(), after, strict=True):
        buffer.copy_(value)


class TiedModel(nn.Module):
    """An embedding whose weight is also that of the head, read functionally by the parent."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.body = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.embedding(tokens)).mean(1)
        return self.head(hidden) + nn.functional.linear(hidden, self.embedding.weight)


class SometimesUnused(nn.Module):
    """One layer is frozen, one is never used, one is used by the samples above a threshold alone, one is a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.frozen = nn.Linear(9, 9).requires_grad_(False)
        self.never = nn.Linear(9, 4)
        self.rare = nn.Linear(9, 9)
        self.last = nn.Linear(9, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.frozen(torch.tanh(self.first(inputs))))
        chosen = inputs[:, 0] > 0.8
        if bool(chosen.any()):
            hidden = torch.where(chosen[:, None], torch.tanh(self.rare(hidden)), hidden)
        return self.last(hidden) * self.scale


class TwoTypes(nn.Module):
    """A body in one number type and a head in another."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 10))
        self.head = nn.Linear(10, 3)

    def to(self, *_: object) -> TwoTypes:  # type: ignore[override]
        self.body.double()
        self.head.float()
        return self

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(inputs)).float()).double()


def vectors(size: int, generator: torch.Generator) -> Batch:
    return (
        torch.randn(size, 6, generator=generator, dtype=torch.float64),
        torch.randn(size, 3, generator=generator, dtype=torch.float64),
    )


def images(size: int, generator: torch.Generator) -> Batch:
    return torch.randn(size, 2, 6, 6, generator=generator, dtype=torch.float64), vectors(size, generator)[1]


def sequences(size: int, generator: torch.Generator) -> Batch:
    return torch.randn(size, 5, 8, generator=generator, dtype=torch.float64), torch.randn(
        size, 5, 8, generator=generator, dtype=torch.float64
    )


def tokens(size: int, generator: torch.Generator) -> Batch:
    return torch.randint(0, 13, (size, 4), generator=generator), torch.randn(
        size, 13, generator=generator, dtype=torch.float64
    )


def _groups_of_two_types(model: nn.Module) -> list[dict[str, object]]:
    assert isinstance(model, TwoTypes)
    return [{"params": model.body.parameters()}, {"params": model.head.parameters(), "lr": 3e-3}]


CASES = {
    "perceptron": Case(
        build=lambda: nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 11), nn.Tanh(), nn.Linear(11, 3)),
        batch=vectors,
    ),
    "convolution_batchnorm": Case(
        build=lambda: nn.Sequential(
            nn.Conv2d(2, 5, 3, bias=False),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.Conv2d(5, 4, 3),
            nn.Flatten(),
            nn.Linear(16, 3),
        ),
        batch=images,
        is_batchwise=True,  # no bias before the normalisation: its gradient is noise around 0
    ),
    "attention": Case(
        build=lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, bias=False),
            2,
            enable_nested_tensor=False,
        ),
        batch=sequences,
    ),
    "tied": Case(build=TiedModel, batch=tokens),
    "sometimes_unused": Case(build=SometimesUnused, batch=vectors),
    "two_types": Case(build=TwoTypes, batch=vectors, groups=_groups_of_two_types, tolerance=2e-6),
}


def copies(model: nn.Module, number: int) -> list[nn.Module]:
    """Return independent copies, made before threads start."""
    return [copy.deepcopy(model) for _ in range(number)]
