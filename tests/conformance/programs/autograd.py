"""What programs ask of autograd: second derivatives, attacks, sampling, learning to learn, functions of their own."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from declarations import program
from torch import nn

from programs.small import adam, final, mse, perceptron, sgd, train, trained

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
