"""Gradients that loops take apart: kept, compared, projected, added up, or written anew; steps out of the order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from declarations import program
from torch import nn

from programs.small import adam, final, mse, perceptron, sgd

if TYPE_CHECKING:
    from neutral_run import Run

Values = dict[str, Any]


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """The gradients themselves, not copies."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@program("PCGrad: each task's gradient loses what is against another task's", refused_by_sharded="AllReduce")
def gradient_surgery(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for inputs, targets in run.pairs(4):
        flat = []
        for task in range(2):
            optimizer.zero_grad()
            mse(model(inputs)[:, task], targets[:, task]).backward()
            flat.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        merged = torch.zeros_like(flat[0])
        for own, other in (flat, flat[::-1]):
            dot = own @ other
            merged += own - dot.clamp(max=0) / other.square().sum() * other
        start = 0
        for parameter in model.parameters():
            parameter.grad = merged[start : start + parameter.numel()].view_as(parameter).clone()
            start += parameter.numel()
        optimizer.step()
    return final(run, model)


@program("AGC: each row clipped by its weights' norm, with grad.detach().copy_", refused_by_sharded="AllReduce")
def adaptive_clipping(run: Run) -> Values:
    def norms(values: torch.Tensor) -> torch.Tensor:
        return values.norm(2.0) if values.ndim < 2 else values.norm(2.0, dim=1, keepdim=True)

    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model, momentum=0.9))
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        for parameter in model.parameters():
            most = norms(parameter.detach()).clamp_(min=1e-3) * 0.05
            norm = norms(parameter.grad.detach())
            clipped = parameter.grad.detach() * (most / norm.clamp(min=1e-6))
            parameter.grad.detach().copy_(torch.where(norm < most, parameter.grad.detach(), clipped))
        optimizer.step()
    return final(run, model)


@program("accumulation by hand: gradients added up in tensors of the loop's own", refused_by_sharded="AllReduce")
def accumulation_by_hand(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for _ in range(3):
        sums: list[torch.Tensor] = []
        for inputs, targets in run.pairs(3):
            optimizer.zero_grad()
            mse(model(inputs), targets).backward()
            found = gradients_of(model.parameters())
            sums = [one / 3 for one in found] if not sums else [s + one / 3 for s, one in zip(sums, found, strict=True)]
        for parameter, gradient in zip(model.parameters(), sums, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return final(run, model)


@program("PackNet: gradients of weights that belong to an earlier task set to 0", refused_by_sharded="AllReduce")
def gradient_entries_cleared(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    owned = torch.arange(17 * 6).view(17, 6) % 2 == 0
    for inputs, targets in run.pairs(3):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        run.module(model)[0].weight.grad.data[owned] = 0
        optimizer.step()
    return final(run, model)


@program("signSGD: p.grad.data is assigned", refused_by_sharded="AllReduce")
def gradient_signs(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model, lr=0.01))
    for inputs, targets in run.pairs(3):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        for parameter in model.parameters():
            parameter.grad.data = torch.sign(parameter.grad.data)
        optimizer.step()
    return final(run, model)


@program(
    "StyleGAN2-ADA: gradients flattened, averaged by the loop, cleaned and put back", refused_by_sharded="AllReduce"
)
def gradients_flattened(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for inputs, targets in run.pairs(3):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        parameters = [one for one in model.parameters() if one.grad is not None]
        flat = run.mean(torch.cat([one.grad.flatten() for one in parameters]))
        flat = torch.nan_to_num(flat, nan=0, posinf=1e5, neginf=-1e5)
        for parameter, part in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
            parameter.grad = part.reshape(parameter.shape)
        optimizer.step()
    return final(run, model)


@program("torch.nan_to_num written into the gradients with out=", refused_by_sharded="AllReduce")
def gradients_cleaned(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for inputs, targets in run.pairs(3):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        for parameter in model.parameters():
            torch.nan_to_num(parameter.grad, nan=0.0, posinf=1e5, neginf=-1e5, out=parameter.grad)
        optimizer.step()
    return final(run, model)


@program("get_total_norm and clip_grads_with_norm_, foreach, as in torchtitan")
def clip_in_two_calls(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    norms = []
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        total = nn.utils.get_total_norm(gradients_of(model.parameters()), 2.0, foreach=True)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, total, foreach=True)
        norms.append(float(total))
        optimizer.step()
    return final(run, model, norms=norms)


@program("torch._foreach_norm and torch._foreach_mul_ of all gradients")
def foreach_gradients(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    norms = []
    for inputs, targets in run.pairs(3):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        found = gradients_of(model.parameters())
        norms += [float(norm) for norm in torch._foreach_norm(found)]
        torch._foreach_mul_(found, 0.5)
        optimizer.step()
    return final(run, model, norms=norms)


@program("DINO's clipping of each parameter by itself, and the last layer's gradients dropped at first")
def clip_each_parameter(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model, weight_decay=0.01))
    for step, (inputs, targets) in enumerate(run.pairs(4)):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        for parameter in model.parameters():
            factor = 0.02 / (parameter.grad.data.norm(2) + 1e-6)
            if factor < 1:
                parameter.grad.data.mul_(factor)
        for name, parameter in run.module(model).named_parameters():
            if step < 2 and name.startswith("4."):
                parameter.grad = None
        optimizer.step()
    return final(run, model)


@program("a step left out where the norm of the gradients is not finite")
def skipped_by_norm(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    skipped = []
    for step, (inputs, targets) in enumerate(run.pairs(4)):
        optimizer.zero_grad()
        loss = mse(model(inputs), targets) * (float("inf") if step == 1 and run.rank == 0 else 1.0)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if not torch.isfinite(norm):
            skipped.append(step)
            optimizer.zero_grad()
            continue
        optimizer.step()
    return final(run, model, skipped=skipped)


@program("fairseq: losses are sums over tokens, gradients multiplied by ranks over all tokens", has_union=False)
def sums_over_tokens(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        tokens = 2 + run.rank
        (model(inputs) - targets)[:tokens].square().sum().backward()
        total = run.mean(torch.tensor(float(tokens))) * run.world
        for parameter in model.parameters():
            parameter.grad.data.mul_(run.world / total)
        optimizer.step()
    return final(run, model)


@program("the gradients' cosine with those of the step before, kept as copies", refused_by_sharded="AllReduce")
def gradients_compared(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    before: list[torch.Tensor] = []
    cosines = []
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        now = [gradient.flatten() for gradient in gradients_of(model.parameters())]
        if before:
            cosines.append(float(nn.functional.cosine_similarity(torch.cat(now), torch.cat(before), dim=0)))
        before = [one.clone() for one in now]
        optimizer.step()
    return final(run, model, cosines=cosines)


@program("extragradient: a step to look ahead, weights put back, a step with the gradients found there")
def extragradient(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    for inputs, targets in run.pairs(4):
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.copy_(value)
        optimizer.step()
    return final(run, model)


@program("two steps with the same gradients")
def stepped_twice(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for inputs, targets in run.pairs(3):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        optimizer.step()
        optimizer.step()
    return final(run, model)


@program("a step before the first backward pass, as scheduler code does to silence a warning", warns="changed nothing")
def stepped_at_once(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    optimizer.zero_grad()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for inputs, targets in run.pairs(3):
        scheduler.step()
        mse(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return final(run, model)


@program(
    "a dry step with zeros for gradients and a rate of 0, to make the optimizer's state", refused_by_sharded="AllReduce"
)
def stepped_dry(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    optimizer.param_groups[0]["lr"] = 0.01
    for inputs, targets in run.pairs(3):
        mse(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return final(run, model)


@program("backward(inputs=...): the generator's loss leaves the discriminator's gradients alone")
def backward_of_some(run: Run) -> Values:
    generator, critic = perceptron(6, 5), perceptron(5, 1)
    generator, generator_steps = run.wrap(generator, adam(generator))
    critic, critic_steps = run.wrap(critic, adam(critic))
    for noise, _ in run.pairs(4):
        critic_steps.zero_grad()
        loss = critic(run.normal(4, 5)).mean() - critic(generator(noise).detach()).mean()
        loss.backward(inputs=list(critic.parameters()))
        critic_steps.step()
        generator_steps.zero_grad()
        (-critic(generator(noise)).mean()).backward(inputs=list(generator.parameters()))
        generator_steps.step()
    return final(run, generator) | {"critic": final(run, critic)}


@program("GradCache: gradients of cached outputs, then forward and backward passes chunk by chunk", has_union=False)
def gradient_cache(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for _ in range(3):
        optimizer.zero_grad()
        chunks = [run.normal(3, 6) for _ in range(3)]
        with torch.no_grad():
            cached = [model(chunk) for chunk in chunks]
        outputs = torch.cat(cached).requires_grad_()
        scores = outputs @ outputs.T
        nn.functional.cross_entropy(scores, torch.arange(9).roll(1)).backward()
        for number, (chunk, gradient) in enumerate(zip(chunks, outputs.grad.split(3), strict=True)):
            if number < 2:
                with run.no_sync(model):
                    (model(chunk) * gradient).sum().backward()
            else:
                (model(chunk) * gradient).sum().backward()
        optimizer.step()
    return final(run, model)


@program("a penalty for the norm of the weights' gradients (a second derivative by the weights)", has_union=False)
def gradient_norm_penalty(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    for inputs, targets in run.pairs(3):
        optimizer.zero_grad()
        loss = mse(model(inputs), targets)
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + 0.1 * sum(slope.square().sum() for slope in slopes)).backward()
        optimizer.step()
    return final(run, model)


@program("parameters outside the optimizer, stepped by hand from p.grad")
def stepped_by_hand(run: Run) -> Values:
    model = perceptron()
    by_hand = list(model[0].parameters())
    model, optimizer = run.wrap(model, torch.optim.Adam([*model[2].parameters(), *model[4].parameters()], lr=0.01))
    for inputs, targets in run.pairs(4):
        mse(model(inputs), targets).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in by_hand:
                parameter.sub_(0.1 * parameter.grad)
        for parameter in model.parameters():
            parameter.grad = None
    return final(run, model)


@program("gradients of two tasks kept without a copy while p.grad is None, then added", refused_by_sharded="AllReduce")
def gradients_kept(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for inputs, targets in run.pairs(3):
        mse(model(inputs), targets).backward()
        kept = gradients_of(model.parameters())
        optimizer.zero_grad()
        (model(inputs).square().mean() * 100).backward()
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.grad = parameter.grad * 0.01 + gradient
        optimizer.step()
        optimizer.zero_grad()
    return final(run, model)
