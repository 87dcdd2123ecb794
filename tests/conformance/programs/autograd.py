"""What programs ask of autograd: second derivatives, checkpoints, functions of their own, compiled and scripted models."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from declarations import program
from programs.small import adam, final, mse, perceptron, sgd, train, trained
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

if TYPE_CHECKING:
    from neutral_run import Run

Values = dict[str, Any]


@program("retain_graph: two losses of one forward pass, each with its backward pass", has_ddp=False)
def retain_graph(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        outputs = model(inputs)
        mse(outputs, targets).backward(retain_graph=True)
        (0.1 * outputs.square().mean()).backward()
        optimizer.step()
    return final(run, model)


@program("torch.autograd.backward of two losses at once")
def two_roots(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        outputs = model(inputs)
        torch.autograd.backward([mse(outputs, targets), outputs.square().mean()])
        optimizer.step()
    return final(run, model)


@program("backward() of outputs with a gradient given by hand", has_union=False)
def gradient_given(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        outputs = model(inputs)
        outputs.backward(gradient=(outputs - targets).detach() / len(inputs))
        optimizer.step()
    return final(run, model)


@program("the gradient of the inputs in the loss (double backward)")
def double_backward(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        asked = inputs.clone().requires_grad_()
        outputs = model(asked)
        (slope,) = torch.autograd.grad(outputs.sum(), asked, create_graph=True)
        (mse(outputs, targets) + slope.square().sum(1).mean()).backward()
        optimizer.step()
    return final(run, model)


@program("a network that solves a differential equation: second derivative by the input")
def physics_informed(run: Run) -> Values:
    model = perceptron(1, 1)
    model, optimizer = run.wrap(model, adam(model))
    for _ in range(4):
        points = run.normal(6, 1).requires_grad_()
        values = model(points)
        (first,) = torch.autograd.grad(values.sum(), points, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), points, create_graph=True)
        optimizer.zero_grad()
        (second + values).square().mean().backward()
        optimizer.step()
    return final(run, model)


@program("adversarial training: FGSM by a backward pass of its own, whose gradients are dropped", has_union=False)
def fast_gradient_sign(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    for inputs, targets in run.pairs(4):
        attacked = inputs.clone().requires_grad_()
        mse(model(attacked), targets).backward()
        attacked = (attacked + 0.05 * attacked.grad.sign()).detach()
        optimizer.zero_grad()
        mse(model(attacked), targets).backward()
        optimizer.step()
    return final(run, model)


@program("adversarial training: PGD with torch.autograd.grad of the inputs", has_union=False)
def projected_gradient(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for inputs, targets in run.pairs(3):
        attacked = inputs.clone()
        for _ in range(3):
            attacked.requires_grad_()
            (slope,) = torch.autograd.grad(mse(model(attacked), targets), attacked)
            attacked = (attacked.detach() + 0.02 * slope.sign()).clamp(-3, 3)
        optimizer.zero_grad()
        mse(model(attacked), targets).backward()
        optimizer.step()
    return final(run, model)


@program("Langevin sampling through an energy model before each step", has_union=False)
def energy_model(run: Run) -> Values:
    model = perceptron(6, 1)
    model, optimizer = run.wrap(model, adam(model))
    for _ in range(3):
        real, sample = run.normal(4, 6), run.normal(4, 6)
        for _ in range(3):
            sample = sample.detach().requires_grad_()
            (slope,) = torch.autograd.grad(model(sample).sum(), sample)
            sample = sample - 0.1 * slope
        optimizer.zero_grad()
        (model(real) - model(sample.detach())).mean().backward()
        optimizer.step()
    return final(run, model)


@program("MAML: an inner step with torch.autograd.grad and functional_call, the outer loss through it", has_ddp=False)
def meta_learning(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    for inputs, targets in run.pairs(3):
        optimizer.zero_grad()
        weights = dict(model.named_parameters())
        slopes = torch.autograd.grad(
            mse(model(torch.ones(2, 6)), torch.ones(2, 3)), list(weights.values()), create_graph=True
        )
        fast = {name: value - 0.1 * slope for (name, value), slope in zip(weights.items(), slopes, strict=True)}
        mse(torch.func.functional_call(model, fast, (inputs,)), targets).backward()
        optimizer.step()
    return final(run, model)


@program("Reptile: a copy trained alone, the model moved towards it", has_union=False)
def reptile(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    train(run, model, optimizer, steps=2)
    for _ in range(2):
        copied = copy.deepcopy(run.module(model))
        inner = sgd(copied)
        for _ in range(2):
            inner.zero_grad()
            mse(copied(torch.ones(2, 6)), torch.ones(2, 3)).backward()
            inner.step()
        with torch.no_grad():
            for slow, fast in zip(run.module(model).parameters(), copied.parameters(), strict=True):
                slow.add_(fast - slow, alpha=0.3)
        train(run, model, optimizer, steps=1)
    return final(run, model)


@program("torch.func.functional_call with the model's own parameters, without calling the model", has_ddp=False)
def functional_call(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        mse(torch.func.functional_call(model, dict(model.named_parameters()), (inputs,)), targets).backward()
        optimizer.step()
    return final(run, model)


class WithLoss(nn.Module):
    """Has methods that compute losses; nobody calls forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron()

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return mse(self.net(inputs), targets)


@program("model.loss(x): methods that are not forward", has_ddp=False)
def loss_method(run: Run) -> Values:
    model = WithLoss()
    model, optimizer = run.wrap(model, adam(model))
    for inputs, targets in run.pairs(5):
        optimizer.zero_grad()
        model.loss(inputs, targets).backward()
        optimizer.step()
    return final(run, model)


@program("the model's parts are called by the loop, never the model", has_ddp=False)
def parts_called(run: Run) -> Values:
    model = nn.ModuleDict({"encoder": perceptron(6, 4), "decoder": perceptron(4, 3)})
    model, optimizer = run.wrap(model, adam(model))
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        mse(model["decoder"](model["encoder"](inputs)), targets).backward()
        optimizer.step()
    return final(run, model)


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


class Reversed(torch.autograd.Function):
    """Turns the gradient round (domain-adversarial training)."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, strength: float) -> torch.Tensor:
        ctx.strength = strength
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return -ctx.strength * gradient, None


@program("a gradient reversal written as autograd.Function, with a domain classifier")
def gradient_reversal(run: Run) -> Values:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.label, self.domain = nn.Linear(6, 9), nn.Linear(9, 3), nn.Linear(9, 1)

        def forward(self, inputs: torch.Tensor, strength: float) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = torch.tanh(self.body(inputs))
            return self.label(hidden), self.domain(Reversed.apply(hidden, strength))

    model = Adapted()
    model, optimizer = run.wrap(model, adam(model))
    for step, (inputs, targets) in enumerate(run.pairs(4)):
        optimizer.zero_grad()
        label, domain = model(inputs, 0.1 * step)
        (mse(label, targets) + nn.functional.softplus(domain).mean()).backward()
        optimizer.step()
    return final(run, model)


@program("binary weights: signs in the forward pass by a straight-through estimator")
def straight_through(run: Run) -> Values:
    class Binary(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            weight = self.weight + (self.weight.sign() - self.weight).detach()
            return nn.functional.linear(inputs, weight, self.bias)

    model = nn.Sequential(Binary(6, 9), nn.Tanh(), Binary(9, 3))
    return trained(run, model, sgd(model))


@program("BinaryConnect: signs written into .data for the passes, real weights back for the step")
def binary_connect(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    for inputs, targets in run.pairs(4):
        real = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data.copy_(parameter.data.sign() * 0.3)
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        for parameter, kept in zip(model.parameters(), real, strict=True):
            parameter.data.copy_(kept)
        optimizer.step()
    return final(run, model)


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
