"""Parameters that are written outside the optimizer: initialised late, clamped, normalised, averaged, replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from declarations import program
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from programs.small import adam, final, mse, perceptron, sgd, train

if TYPE_CHECKING:
    from neutral_run import Run

Values = dict[str, Any]


def trained_after(run: Run, write: Any, *, optimizer_of: Any = adam, steps: int = 6) -> Values:
    """Train, and call ``write`` with the user's module after each step."""
    model = perceptron()
    model, optimizer = run.wrap(model, optimizer_of(model))
    module = run.module(model)
    return final(run, model, losses=train(run, model, optimizer, steps=steps, after_step=lambda _: write(module)))


@program("WGAN's clamp of the weights after each step, through .data", worlds=(2, 3))
def clamp_by_data(run: Run) -> Values:
    def write(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.data.clamp_(-0.1, 0.1)

    return trained_after(run, write)


@program("clamp under no_grad")
def clamp_under_no_grad(run: Run) -> Values:
    @torch.no_grad()
    def write(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.clamp_(-0.1, 0.1)

    return trained_after(run, write)


@program("rows normalised after each step, with copy_")
def row_normalisation(run: Run) -> Values:
    @torch.no_grad()
    def write(module: nn.Module) -> None:
        weight = module[0].weight
        weight.copy_(nn.functional.normalize(weight, dim=1))

    return trained_after(run, write, optimizer_of=sgd)


@program("max-norm by renorm, assigned to .data")
def data_assigned(run: Run) -> Values:
    def write(module: nn.Module) -> None:
        module[0].weight.data = module[0].weight.data.renorm(2, 0, 0.5)

    return trained_after(run, write)


@program("decoupled weight decay by hand, with torch._foreach_mul_")
def decay_by_hand(run: Run) -> Values:
    @torch.no_grad()
    def write(module: nn.Module) -> None:
        torch._foreach_mul_(list(module.parameters()), 0.99)

    return trained_after(run, write)


@program("pruning: a mask multiplied onto a weight after each step")
def masked_weights(run: Run) -> Values:
    mask = (torch.arange(17 * 6).view(17, 6) % 3 > 0).double()

    def write(module: nn.Module) -> None:
        module[0].weight.data.mul_(mask)

    return trained_after(run, write)


@program("some rows set to 0 with an index")
def rows_cleared(run: Run) -> Values:
    def write(module: nn.Module) -> None:
        with torch.no_grad():
            module[2].weight[::3] = 0.0

    return trained_after(run, write)


@program("nn.init after wrapping, the same on all ranks")
def initialised_after(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    torch.manual_seed(3)
    for layer in run.module(model):
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return final(run, model, losses=train(run, model, optimizer))


@program("a layer reset to new values in the middle of training")
def layer_reset(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model, momentum=0.9))
    losses = train(run, model, optimizer, steps=3)
    torch.manual_seed(5)
    run.module(model)[4].reset_parameters()
    return final(run, model, losses=losses + train(run, model, optimizer, steps=3))


@program("EMA by hand: lerp_ of a copy after each step")
def ema_by_hand(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    averages = {name: value.detach().clone() for name, value in run.module(model).named_parameters()}

    def average(_: int) -> None:
        for name, value in run.module(model).named_parameters():
            averages[name].mul_(0.9).add_(value.detach(), alpha=0.1)

    train(run, model, optimizer, after_step=average)
    return final(run, model, averages=averages)


@program("AveragedModel with an EMA, made of the distributed model", worlds=(2, 3))
def ema_averaged_model(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    average = AveragedModel(run.module(model), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    train(run, model, optimizer, after_step=lambda _: average.update_parameters(run.module(model)))
    return final(run, model, average=average.module.state_dict())


@program("SWA with SWALR and update_bn")
def swa(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    average = AveragedModel(run.module(model))
    scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)

    def after_step(step: int) -> None:
        if step >= 2:
            average.update_parameters(run.module(model))
            scheduler.step()

    train(run, model, optimizer, steps=7, after_step=after_step)
    update_bn([run.normal(4, 6)], average)
    return final(run, model, average=average.state_dict())


@program("Lookahead: every third step back to slow weights")
def lookahead(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    slow = [value.detach().clone() for value in model.parameters()]

    def look_back(step: int) -> None:
        if step % 3 == 2:
            for kept, value in zip(slow, model.parameters(), strict=True):
                kept.add_(value.detach() - kept, alpha=0.5)
                value.data.copy_(kept)

    return final(run, model, losses=train(run, model, optimizer, steps=7, after_step=look_back), slow=slow)


@program("EMA weights swapped in for evaluation and out again")
def ema_swapped(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    shadow = [value.detach().clone() for value in model.parameters()]
    held, scores = run.normal(4, 6), []

    def evaluate(_: int) -> None:
        for kept, value in zip(shadow, model.parameters(), strict=True):
            kept.lerp_(value.detach(), 0.2)
        backup = [value.detach().clone() for value in model.parameters()]
        with torch.no_grad():
            for kept, value in zip(shadow, model.parameters(), strict=True):
                value.copy_(kept)
            scores.append(run.module(model)(held).square().mean())
            for kept, value in zip(backup, model.parameters(), strict=True):
                value.copy_(kept)

    train(run, model, optimizer, steps=4, after_step=evaluate)
    return final(run, model, scores=[float(run.mean(score)) for score in scores])


@program("a weight penalty computed from parameters before the forward pass")
def penalty_before_forward(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for inputs, targets in run.pairs(5):
        optimizer.zero_grad()
        penalty = sum(parameter.square().sum() for parameter in model.parameters()).detach()
        penalties = float(penalty)
        (mse(model(inputs), targets) + 1e-3 * penalties * model(inputs).square().mean()).backward()
        optimizer.step()
    return final(run, model)


@program("L1 and L2 penalties of the weights added to the loss")
def penalty_in_loss(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for inputs, targets in run.pairs(5):
        optimizer.zero_grad()
        loss = mse(model(inputs), targets)
        loss = loss + sum(0.01 * one.square().sum() + 0.001 * one.abs().sum() for one in run.module(model).parameters())
        loss.backward()
        optimizer.step()
    return final(run, model)


@program("EWC: a penalty for the distance to earlier weights")
def distance_penalty(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    train(run, model, optimizer, steps=2)
    anchors = [value.detach().clone() for value in model.parameters()]
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        penalty = sum(((value - anchor) ** 2).sum() for value, anchor in zip(model.parameters(), anchors, strict=True))
        (mse(model(inputs), targets) + penalty).backward()
        optimizer.step()
    return final(run, model)


@program("stochastic weight noise added before a step and taken off after it")
def weight_noise(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    generator = torch.Generator().manual_seed(9)
    for inputs, targets in run.pairs(4):
        noise = [0.01 * torch.randn(one.shape, generator=generator) for one in model.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), noise)
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), noise)
        optimizer.step()
    return final(run, model)


@program("parameters_to_vector and vector_to_parameters between steps")
def vector_round_trip(run: Run) -> Values:
    def write(module: nn.Module) -> None:
        vector = nn.utils.parameters_to_vector(module.parameters())
        nn.utils.vector_to_parameters(vector.detach() * 0.98, module.parameters())

    return trained_after(run, write)


@program("the norm of all weights logged after each step, through numpy and tolist")
def weights_logged(run: Run) -> Values:
    logged: list[Any] = []

    def read(module: nn.Module) -> None:
        logged.append(float(module[0].weight.detach().numpy().sum()))
        logged.append(module[4].bias.tolist())
        logged.append(module[0].bias.data_ptr() > 0 and float(module[0].bias.max()))

    return trained_after(run, read, steps=4) | {"logged": logged}
