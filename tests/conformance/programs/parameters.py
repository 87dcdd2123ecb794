"""Models whose parameters are used in unusual ways: rarely, late, twice, not at all; of unusual types and shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from declarations import program
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from programs.small import adam, final, mse, perceptron, sgd, train, trained

if TYPE_CHECKING:
    from neutral_run import Run

Values = dict[str, Any]


@program("the first layers frozen before distributing")
def frozen_layers(run: Run) -> Values:
    model = perceptron()
    model[0].requires_grad_(False)
    return trained(run, model, sgd(model, momentum=0.9))


@program("the optimizer is given the parameters that are not frozen alone")
def frozen_and_filtered(run: Run) -> Values:
    model = perceptron()
    model[2].requires_grad_(False)
    optimizer = torch.optim.Adam((one for one in model.parameters() if one.requires_grad), lr=0.01)
    return trained(run, model, optimizer)


@program("the optimizer trains one part; the rest needs gradients but is not stepped")
def partly_optimized(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, sgd(model[4]))


class WithUnused(nn.Module):
    """One layer that is never used, one that is used by some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare, self.never, self.last = (
            nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 4), nn.Linear(9, 3),
        )  # fmt: skip

    def forward(self, inputs: torch.Tensor, *, takes_branch: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        if takes_branch:
            hidden = torch.tanh(self.rare(hidden))
        return self.last(hidden)


@program("a layer that is never used (find_unused_parameters), with weight decay", worlds=(2, 3))
def unused_parameters(run: Run) -> Values:
    model = WithUnused()
    model, optimizer = run.wrap(model, adam(model, weight_decay=0.1), find_unused_parameters=True)
    return final(run, model, losses=train(run, model, optimizer))


@program("a branch taken on some ranks alone (find_unused_parameters)", has_union=False, worlds=(2, 3))
def branch_on_some_ranks(run: Run) -> Values:
    model = WithUnused()
    model, optimizer = run.wrap(model, adam(model), find_unused_parameters=True)
    for step, (inputs, targets) in enumerate(run.pairs(6)):
        optimizer.zero_grad()
        mse(model(inputs, takes_branch=step % 3 == run.rank), targets).backward()
        optimizer.step()
    return final(run, model)


@program("a branch that all ranks take now and then; Adam leaves it alone in between")
def branch_now_and_then(run: Run) -> Values:
    model = WithUnused()
    model, optimizer = run.wrap(model, adam(model), find_unused_parameters=True)
    for step, (inputs, targets) in enumerate(run.pairs(6)):
        optimizer.zero_grad()
        mse(model(inputs, takes_branch=step % 3 == 1), targets).backward()
        optimizer.step()
    return final(run, model)


class ReadsLate(nn.Module):
    """From some step on the forward pass reads another layer's weight directly."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.out = nn.Linear(6, 20), nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 3)
        self.is_on = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.a(inputs)
        if self.is_on:
            hidden = hidden + functional.linear(hidden, self.c.weight)
        return self.out(torch.relu(self.c(torch.relu(self.b(hidden)))))


@program("a parameter first read late, functionally, by another module")
def first_read_late(run: Run) -> Values:
    model = ReadsLate()
    model, optimizer = run.wrap(model, sgd(model, lr=0.5))

    def switch(step: int) -> None:
        run.module(model).is_on = step >= 2

    return final(run, model, losses=train(run, model, optimizer, steps=7, after_step=switch))


@program("layers used first from the third step on (find_unused_parameters)")
def layer_used_late(run: Run) -> Values:
    model = WithUnused()
    model, optimizer = run.wrap(model, adam(model), find_unused_parameters=True)
    for step, (inputs, targets) in enumerate(run.pairs(6)):
        optimizer.zero_grad()
        mse(model(inputs, takes_branch=step >= 3), targets).backward()
        optimizer.step()
    return final(run, model)


@program("unfreezing a layer in the middle by requires_grad (DDP: find_unused_parameters)", has_union=True)
def frozen_by_multiplication(run: Run) -> Values:
    model = WithUnused()
    model, optimizer = run.wrap(model, sgd(model), find_unused_parameters=True)
    for step, (inputs, targets) in enumerate(run.pairs(6)):
        optimizer.zero_grad()
        hidden = model(inputs, takes_branch=True)
        (mse(hidden, targets) * (0.0 if step < 2 else 1.0)).backward()
        optimizer.step()
    return final(run, model)


class Tied(nn.Module):
    """The embedding's weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embedding(tokens)))).mean(1)


@program("tied weights: embedding and head", worlds=(2, 3))
def tied_weights(run: Run) -> Values:
    model = Tied()
    batches = [(run.integers(13, 4, 5), run.integers(13, 4)) for _ in range(5)]
    return trained(run, model, adam(model), batches=batches, loss_of=functional.cross_entropy)


class Recurrent(nn.Module):
    """One layer is applied several times in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        for _ in range(3):
            hidden = torch.tanh(self.shared(hidden))
        return self.last(hidden)


@program("one layer applied three times")
def shared_layer(run: Run) -> Values:
    model = Recurrent()
    return trained(run, model, sgd(model))


@program("weight_norm (parametrization)")
def weight_norm(run: Run) -> Values:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 9)), nn.Tanh(), nn.Linear(9, 3))
    return trained(run, model, sgd(model))


@program("spectral_norm (parametrization), whose power iteration lives in buffers")
def spectral_norm(run: Run) -> Values:
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 9)), nn.Tanh(), nn.Linear(9, 3))
    return trained(run, model, sgd(model))


@program("an orthogonal parametrization")
def orthogonal(run: Run) -> Values:
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3))
    return trained(run, model, sgd(model), steps=4)


class Symmetric(nn.Module):
    """A parametrization of the user's own."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).T


@program("a parametrization of the user's own, written to through the module")
def own_parametrization(run: Run) -> Values:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return trained(run, model, adam(model))


class OddShapes(nn.Module):
    """Parameters of no dimension, of no element, complex ones, and containers of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.many = nn.ParameterList([torch.randn(6, 6) * 0.3 for _ in range(3)])
        self.named = nn.ParameterDict({"bias": torch.zeros(6), "last": torch.randn(6, 3) * 0.3})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs
        for weight in self.many:
            hidden = torch.tanh(hidden @ weight)
        return ((hidden + self.named["bias"]) @ self.named["last"]) * self.scale + self.empty.sum()


@program("0-d and empty parameters, ParameterList, ParameterDict")
def odd_shapes(run: Run) -> Values:
    model = OddShapes()
    return trained(run, model, adam(model))


@program("complex parameters", refused_by_sharded=None)
def complex_parameters(run: Run) -> Values:
    model = nn.Linear(6, 3, dtype=torch.complex128)
    model, optimizer = run.wrap(model, sgd(model))
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        (model(inputs.to(torch.complex128)) - targets).abs().square().mean().backward()
        optimizer.step()
    return final(run, model)


@program("a float32 model", tolerance=2e-6)
def single_precision(run: Run) -> Values:
    model = perceptron().float()
    batches = [(inputs.float(), targets.float()) for inputs, targets in run.pairs(5)]
    return trained(run, model, sgd(model, momentum=0.9), batches=batches)


@program("a bfloat16 model", tolerance=0.05, has_union=False)
def brain_floats(run: Run) -> Values:
    model = perceptron().bfloat16()
    batches = [(inputs.bfloat16(), targets.bfloat16()) for inputs, targets in run.pairs(4)]
    return trained(run, model, sgd(model), batches=batches)


class TwoTypes(nn.Module):
    """A body in double and a head in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 9), nn.Linear(9, 3).float()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(inputs)).float()).double()


@program("parameters of two number types", tolerance=2e-6)
def two_types(run: Run) -> Values:
    model = TwoTypes()
    return trained(run, model, sgd(model))


@program("channels_last convolutions")
def channels_last(run: Run) -> Values:
    model = nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    model = model.to(memory_format=torch.channels_last)
    batches = [
        (run.normal(4, 2, 6, 6).contiguous(memory_format=torch.channels_last), run.normal(4, 3)) for _ in range(4)
    ]
    return trained(run, model, adam(model), batches=batches)


@program("the model's ranks start from different values: rank 0's are taken", has_union=False)
def different_starts(run: Run) -> Values:
    torch.manual_seed(run.rank)
    model = perceptron()
    return trained(run, model, sgd(model))
