"""Copies, checkpoints and hooks: what programs do with the model and the optimizer as objects."""

from __future__ import annotations

import copy
import io
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from declarations import program
from torch import nn

from programs.small import adam, final, mse, perceptron, sgd, train

if TYPE_CHECKING:
    from neutral_run import Run

Values = dict[str, Any]


@program("deepcopy of the model after each step; the copy is evaluated")
def deep_copies(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    scores = []

    def evaluate(_: int) -> None:
        copied = copy.deepcopy(run.module(model))
        with torch.no_grad():
            scores.append(copied(torch.ones(2, 6)).sum())

    train(run, model, optimizer, steps=4, after_step=evaluate)
    return final(run, model, scores=scores)


@program("a snapshot of state_dict after each step, cloned")
def snapshots(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    kept: list[Any] = []

    def snapshot(_: int) -> None:
        kept.append({name: value.clone() for name, value in run.module(model).state_dict().items()})

    train(run, model, optimizer, steps=3, after_step=snapshot)
    return final(run, model, kept=kept)


@program(
    "checkpoint and resume: model and optimizer saved, a new model and optimizer loaded and distributed", worlds=(2, 3)
)
def save_and_resume(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    losses = train(run, model, optimizer, steps=3)
    file = io.BytesIO()
    torch.save({"model": run.module(model).state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    torch.manual_seed(99)
    again = perceptron()
    again.load_state_dict(saved["model"])
    for_again = adam(again)
    for_again.load_state_dict(saved["optimizer"])
    again, for_again = run.wrap(again, for_again)
    losses += train(run, again, for_again, steps=3)
    return final(run, again, losses=losses)


@program("state loaded into a model and an optimizer that are distributed already, in the middle")
def loaded_in_the_middle(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    train(run, model, optimizer, steps=2)
    weights, state = copy.deepcopy(run.module(model).state_dict()), copy.deepcopy(optimizer.state_dict())
    train(run, model, optimizer, steps=2)
    run.module(model).load_state_dict(weights)
    optimizer.load_state_dict(state)
    return final(run, model, losses=train(run, model, optimizer, steps=2))


@program("the optimizer's state_dict compared: moments and step counts")
def optimizer_state(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model, amsgrad=True))
    train(run, model, optimizer, steps=3)
    return final(run, model, optimizer={str(key): dict(one) for key, one in optimizer.state_dict()["state"].items()})


@program("torch.save of the whole model, loaded as a plain model")
def whole_model_saved(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    train(run, model, optimizer, steps=3)
    file = io.BytesIO()
    torch.save(run.module(model), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with torch.no_grad():
        outputs = loaded(torch.ones(2, 6))
    return final(run, model, outputs=outputs, keys=sorted(loaded.state_dict()))


@program("rank 0 saves the weights to a file; all ranks load them after a barrier", has_union=False)
def saved_by_one_rank(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    train(run, model, optimizer, steps=3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.pt"
        if run.rank == 0:
            torch.save(run.module(model).state_dict(), path)
        run.mean(torch.zeros(1))
        if run.rank == 0:
            run.module(model).load_state_dict(torch.load(path))
    losses = train(run, model, optimizer, steps=2)
    return final(run, model, losses=losses)


@program("fine-tuning: pretrained weights loaded with strict=False before distributing, a new head")
def fine_tuning(run: Run) -> Values:
    torch.manual_seed(1)
    pretrained = {name: value for name, value in perceptron().state_dict().items() if not name.startswith("4.")}
    model = perceptron()
    model.load_state_dict(pretrained, strict=False)
    groups = [
        {"params": [*model[0].parameters(), *model[2].parameters()], "lr": 1e-3},
        {"params": model[4].parameters()},
    ]
    model, optimizer = run.wrap(model, torch.optim.AdamW(groups, lr=0.01))
    return final(run, model, losses=train(run, model, optimizer))


class LowRank(nn.Module):
    """A frozen layer and a trained update of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base(inputs) + inputs @ self.down.T @ self.up.T


@program("LoRA: frozen layers with trained updates of low rank, merged at the end")
def low_rank(run: Run) -> Values:
    model = perceptron()
    for index in (0, 2, 4):
        model[index] = LowRank(model[index])
    model, optimizer = run.wrap(
        model, torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.02)
    )
    losses = train(run, model, optimizer)
    with torch.no_grad():
        merged = [
            layer.base.weight + layer.up @ layer.down for layer in run.module(model) if isinstance(layer, LowRank)
        ]
    return final(run, model, losses=losses, merged=merged)


@program("forward hooks that keep activations, backward hooks that count")
def module_hooks(run: Run) -> Values:
    model = perceptron()
    kept: list[torch.Tensor] = []
    counts = {"backward": 0}
    model[0].register_forward_hook(lambda _, __, output: kept.append(output.detach().clone()))
    model[2].register_full_backward_hook(lambda *_: counts.__setitem__("backward", counts["backward"] + 1))
    model[2].register_forward_pre_hook(lambda _, args: (args[0] * 1.1,))
    model, optimizer = run.wrap(model, sgd(model))
    losses = train(run, model, optimizer, steps=3)
    return final(run, model, losses=losses, counts=counts, kept=[run.mean(one.mean()) for one in kept])


@program("tensor hooks that change the gradients of parameters, set before distributing", has_union=False)
def tensor_hooks(run: Run) -> Values:
    model = perceptron()
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    model[4].bias.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    model, optimizer = run.wrap(model, sgd(model))
    return final(run, model, losses=train(run, model, optimizer))


@program("post-accumulate-grad hooks that read the local gradient", has_union=False)
def gradient_hooks(run: Run) -> Values:
    model = perceptron()
    norms: list[torch.Tensor] = []
    model[2].weight.register_post_accumulate_grad_hook(lambda one: norms.append(one.grad.detach().norm()))
    model, optimizer = run.wrap(model, sgd(model))
    losses = train(run, model, optimizer, steps=3)
    return final(run, model, losses=losses, norms=norms)


@program("hooks of the optimizer before and after each step")
def optimizer_hooks(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append(float(run.module(model)[4].bias.sum())))
    return final(run, model, losses=train(run, model, optimizer, steps=3), seen=seen)


@program("hooks on activations: gradients of outputs clipped in the middle of the network", has_union=False)
def activation_hooks(run: Run) -> Values:
    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 9), nn.Linear(9, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.first(inputs))
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: gradient.clamp(-0.005, 0.005))
            return self.last(hidden)

    model = Clipped()
    model, optimizer = run.wrap(model, sgd(model, lr=0.5))
    return final(run, model, losses=train(run, model, optimizer))


@program("the loop walks over modules and named parameters, counts and prints them")
def introspection(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    module = run.module(model)
    losses = train(run, model, optimizer, steps=2)
    shapes = {name: list(one.shape) for name, one in module.named_parameters()}
    kinds = [type(one).__name__ for one in module.modules()]
    leaves = [one.is_leaf and one.requires_grad and isinstance(one, nn.Parameter) for one in module.parameters()]
    return final(run, model, losses=losses, shapes=shapes, kinds=kinds, leaves=leaves, same=repr(module))


@program("mixed precision: autocast to bfloat16 on the CPU, parameters in single precision", tolerance=0.02)
def autocast(run: Run) -> Values:
    model = perceptron().float()
    model, optimizer = run.wrap(model, sgd(model))
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(inputs.float())
        mse(outputs.float(), targets.float()).backward()
        optimizer.step()
    return final(run, model)


@program(
    "weight decay added to gradients by hand, which are assigned anew",
    refused_by_sharded="AllReduce",
)
def decay_in_gradients(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    for inputs, targets in run.pairs(3):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        for one in model.parameters():
            one.grad = one.grad.to(torch.float64)
            one.grad.add_(one.detach(), alpha=0.01)
        optimizer.step()
    return final(run, model)


@program("training, then the same model distributed with another optimizer for a second stage", has_union=True)
def second_stage(run: Run) -> Values:
    model = perceptron()
    first, optimizer = run.wrap(model, adam(model))
    losses = train(run, first, optimizer, steps=3)
    second = copy.deepcopy(run.module(first))
    second[0].requires_grad_(False)
    second, optimizer = run.wrap(
        second, torch.optim.SGD([one for one in second.parameters() if one.requires_grad], lr=0.1)
    )
    losses += train(run, second, optimizer, steps=3)
    return final(run, second, losses=losses)


@program(
    "all moments of Adam cleared in mid-training by optimizer.state.clear()",
    refused_by_sharded="give a whole state to optimizer.load_state_dict",
)
def moments_cleared(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    losses = train(run, model, optimizer, steps=3)
    optimizer.state.clear()
    return final(run, model, losses=losses + train(run, model, optimizer, steps=3))


@program("step() replaced on the instance that the loop holds, by one that counts and calls the first")
def step_replaced(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    plain, calls = optimizer.step, []

    def step(closure: Any = None) -> Any:
        calls.append(len(calls))
        return plain(closure)

    optimizer.step = step
    return final(run, model, losses=train(run, model, optimizer), calls=len(calls))
