"""How models are run: recomputed in the backward pass, compiled, scripted; with outputs of any structure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from declarations import program
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from programs.small import adam, final, mse, perceptron, sgd, train, trained

if TYPE_CHECKING:
    from neutral_run import Run

Values = dict[str, Any]


class Checkpointed(nn.Module):
    """Its inner layers run again in the backward pass."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.second, self.third, self.last = (
            nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 3),
        )  # fmt: skip

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        for layer in (self.second, self.third):
            hidden = torch.tanh(checkpoint(layer, hidden, use_reentrant=self.use_reentrant))
        return self.last(hidden)


@program("activation checkpoints, not reentrant")
def checkpoints(run: Run) -> Values:
    model = Checkpointed(use_reentrant=False)
    return trained(run, model, adam(model))


@program("activation checkpoints, reentrant")
def checkpoints_reentrant(run: Run) -> Values:
    model = Checkpointed(use_reentrant=True)
    return trained(run, model, adam(model))


@program("checkpoint_sequential")
def checkpoints_sequential(run: Run) -> Values:
    class Segmented(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = perceptron()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return checkpoint_sequential(self.net, 2, inputs, use_reentrant=False)

    model = Segmented()
    return trained(run, model, sgd(model))


@program("the whole model within a checkpoint of the loop")
def model_within_checkpoint(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        mse(checkpoint(run.module(model), inputs, use_reentrant=False), targets).backward()
        if type(run).__name__ == "DdpRun":  # outside DDP's forward nobody averages: the script does
            for parameter in model.parameters():
                parameter.grad = run.mean(parameter.grad)
        optimizer.step()
    return final(run, model)


@program("torch.compile(backend='aot_eager') of the distributed model")
def compiled_after(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    compiled = torch.compile(model, backend="aot_eager")
    losses = train(run, compiled, optimizer, steps=4)
    torch._dynamo.reset()
    return final(run, model, losses=losses)


@program("model.compile() in place, before distributing", tolerance=1e-9)
def compiled_before(run: Run) -> Values:
    model = perceptron()
    model.compile(backend="aot_eager")
    model, optimizer = run.wrap(model, sgd(model))
    losses = train(run, model, optimizer, steps=4)
    torch._dynamo.reset()
    return final(run, model, losses=losses)


@program("a compiled block within a model that is not")
def compiled_block(run: Run) -> Values:
    model = perceptron()
    model[2] = torch.compile(model[2], backend="aot_eager")
    model, optimizer = run.wrap(model, sgd(model))
    losses = train(run, model, optimizer, steps=4)
    torch._dynamo.reset()
    return final(run, model, losses=losses)


@program("a scripted model (torch.jit.script)")
def scripted(run: Run) -> Values:
    model = torch.jit.script(perceptron())
    return trained(run, model, sgd(model))


@dataclass
class Output:
    """A structured output."""

    logits: torch.Tensor
    hidden: list[torch.Tensor]


class Pair(NamedTuple):
    """Another."""

    first: torch.Tensor
    second: dict[str, torch.Tensor]


@program("outputs in a dataclass")
def dataclass_output(run: Run) -> Values:
    class Structured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 9), nn.Linear(9, 3)

        def forward(self, inputs: torch.Tensor) -> Output:
            hidden = torch.tanh(self.first(inputs))
            return Output(self.last(hidden), [hidden])

    model = Structured()
    model, optimizer = run.wrap(model, adam(model))
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        output = model(inputs)
        (mse(output.logits, targets) + 0.01 * output.hidden[0].square().mean()).backward()
        optimizer.step()
    return final(run, model)


@program("outputs nested in named tuples and dicts; inputs by keyword in a dict")
def nested_output(run: Run) -> Values:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = perceptron()

        def forward(self, *, batch: dict[str, torch.Tensor], scale: float = 1.0) -> Pair:
            outputs = self.layer(batch["inputs"]) * scale
            return Pair(outputs, {"again": outputs * 2})

    model = Nested()
    model, optimizer = run.wrap(model, sgd(model))
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        output = model(batch={"inputs": inputs}, scale=0.5)
        (mse(output.first, targets) + output.second["again"].abs().mean()).backward()
        optimizer.step()
    return final(run, model)
