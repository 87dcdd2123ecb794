"""What loops do to gradients between backward() and step(), and where they clear them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from declarations import program
from torch import nn

from programs.small import adam, final, mse, perceptron, sgd

if TYPE_CHECKING:
    from neutral_run import Run

Values = dict[str, Any]


@program("clip_grad_norm_ of torch, norms logged", worlds=(2, 3))
def clip_norm(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    norms = []
    for inputs, targets in run.pairs(5):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
    return final(run, model, norms=norms)


@program("clip_grad_norm_ with the infinity norm, foreach=False")
def clip_norm_infinity(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    norms = []
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05, float("inf"), foreach=False)))
        optimizer.step()
    return final(run, model, norms=norms)


@program("each layer clipped by itself")
def clip_by_layer(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        for layer in run.module(model).children():
            if list(layer.parameters()):
                nn.utils.clip_grad_norm_(layer.parameters(), 0.03)
        optimizer.step()
    return final(run, model)


@program("clip_grad_value_")
def clip_value(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for inputs, targets in run.pairs(5):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
    return final(run, model)


@program("the gradient norm computed by hand, as logging code does")
def norm_by_hand(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    norms = []
    for inputs, targets in run.pairs(3):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        squares = [one.grad.norm() ** 2 for one in model.parameters() if one.grad is not None]
        norms.append(float(torch.stack(squares).sum().sqrt()))
        optimizer.step()
    return final(run, model, norms=norms)


@program("GradScaler with unscale_ and clipping, with an infinity on one rank")
def grad_scaler(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model, momentum=0.9))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for step, (inputs, targets) in enumerate(run.pairs(6)):
        optimizer.zero_grad()
        loss = mse(model(inputs), targets)
        if step == 2 and run.rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return final(run, model, scales=scales)


@program("accumulation, with no_sync as a method of the model", has_union=False)
def accumulation_by_method(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for _ in range(3):
        optimizer.zero_grad()
        batches = run.pairs(3)
        with model.no_sync():
            for inputs, targets in batches[:-1]:
                (mse(model(inputs), targets) / 3).backward()
        (mse(model(batches[-1][0]), batches[-1][1]) / 3).backward()
        optimizer.step()
    return final(run, model)


@program("accumulation under no_sync, then clipping", worlds=(2, 3))
def accumulation_and_clipping(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model, momentum=0.9))
    norms = []
    for step, (inputs, targets) in enumerate(run.pairs(6)):
        if step % 2 == 0:
            with run.no_sync(model):
                (mse(model(inputs), targets) / 2).backward()
            continue
        (mse(model(inputs), targets) / 2).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.2)))
        optimizer.step()
        optimizer.zero_grad()
    return final(run, model, norms=norms)


@program("only the forward pass under no_sync, the backward pass outside", has_union=False, has_ddp=True)
def no_sync_ends_before_backward(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    for inputs, targets in run.pairs(3):
        optimizer.zero_grad()
        with run.no_sync(model):
            (mse(model(inputs), targets) / 2).backward()
        loss = mse(model(inputs), targets) / 2
        loss.backward()
        optimizer.step()
    return final(run, model)


@program("accumulation without no_sync: every backward pass is synchronised", worlds=(2, 3))
def accumulation_synchronised(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for _ in range(3):
        optimizer.zero_grad()
        for inputs, targets in run.pairs(3):
            (mse(model(inputs), targets) / 3).backward()
        optimizer.step()
    return final(run, model)


@program("three losses of one forward pass, each with its backward pass")
def several_backward_passes(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        mse(model(inputs * 2), targets).backward()
        model(inputs).square().mean().backward()
        optimizer.step()
    return final(run, model)


@program("nobody ever calls zero_grad: gradients add up over steps")
def never_cleared(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model, lr=0.02))
    for inputs, targets in run.pairs(4):
        mse(model(inputs), targets).backward()
        optimizer.step()
    return final(run, model)


@program("zero_grad every second step alone, Adam")
def cleared_now_and_then(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for step, (inputs, targets) in enumerate(run.pairs(6)):
        mse(model(inputs), targets).backward()
        optimizer.step()
        if step % 2:
            optimizer.zero_grad()
    return final(run, model)


@program("zero_grad between backward and the next forward pass, set_to_none=False")
def cleared_to_zero(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model, momentum=0.9, weight_decay=0.1))
    for inputs, targets in run.pairs(4):
        loss = mse(model(inputs), targets)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
    return final(run, model)


@program("model.zero_grad()")
def cleared_by_model(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for inputs, targets in run.pairs(4):
        model.zero_grad()
        mse(model(inputs), targets).backward()
        optimizer.step()
    return final(run, model)


@program("p.grad = None by hand")
def cleared_by_hand(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for inputs, targets in run.pairs(4):
        for parameter in model.parameters():
            parameter.grad = None
        mse(model(inputs), targets).backward()
        optimizer.step()
    return final(run, model)


@program("gradients of one batch dropped without a step")
def dropped_batch(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for step, (inputs, targets) in enumerate(run.pairs(5)):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        if step != 2:
            optimizer.step()
    return final(run, model)


@program("noise added to the gradients, the same on all ranks", refused_by_sharded="AllReduce")
def gradient_noise(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    generator = torch.Generator().manual_seed(5)
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        for parameter in model.parameters():
            parameter.grad.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
        optimizer.step()
    return final(run, model)


@program("gradients multiplied by hand")
def gradients_multiplied(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
            parameter.grad /= 2
        optimizer.step()
    return final(run, model)


@program("gradient centralisation: the mean taken off before the step", refused_by_sharded="AllReduce")
def gradient_centralisation(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for inputs, targets in run.pairs(3):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.grad = parameter.grad - parameter.grad.mean(1, keepdim=True)
        optimizer.step()
    return final(run, model)


@program("the gradient of one layer replaced by another tensor", refused_by_sharded="AllReduce")
def gradient_replaced(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    first = run.module(model)[0].weight
    for inputs, targets in run.pairs(3):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        first.grad = torch.ones_like(first) * 0.1
        optimizer.step()
    return final(run, model)


@program("the gradient of one layer dropped before the step")
def gradient_dropped(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for inputs, targets in run.pairs(3):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        run.module(model)[2].bias.grad = None
        optimizer.step()
    return final(run, model)


@program("gradients read after the step, for a log", refused_by_sharded="AllReduce")
def gradients_read(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    means = []
    for inputs, targets in run.pairs(3):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        means += [float(parameter.grad.abs().mean()) for parameter in model.parameters()]
        optimizer.step()
    return final(run, model, means=means)


@program("a step skipped on all ranks where the loss is not finite, as the mean says", has_union=False)
def skipped_steps(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for step, (inputs, targets) in enumerate(run.pairs(5)):
        loss = mse(model(inputs), targets)
        if step == 3 and run.rank == run.world - 1:
            loss = loss * float("nan")
        if not torch.isfinite(run.mean(loss)):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return final(run, model)


@program("SAM: two forward and backward passes for a step, weights moved in between", refused_by_sharded="AllReduce")
def sharpness_aware(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    for inputs, targets in run.pairs(3):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        with torch.no_grad():
            norm = torch.stack([one.grad.norm() for one in model.parameters()]).norm()
            moves = [one.grad * (0.05 / norm) for one in model.parameters()]
            for one, move in zip(model.parameters(), moves, strict=True):
                one.add_(move)
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        with torch.no_grad():
            for one, move in zip(model.parameters(), moves, strict=True):
                one.sub_(move)
        optimizer.step()
    return final(run, model)
