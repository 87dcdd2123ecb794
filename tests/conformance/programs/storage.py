"""Where parameters lie: views of one vector, memory shared with other modules, ``.data`` kept, swapped or strided."""

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


@program("an actor that takes the trained weights' memory anew after each step")
def actor_takes_memory(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    actor = copy.deepcopy(run.module(model)).requires_grad_(requires_grad=False)
    actions = []
    for _ in range(3):
        train(run, model, optimizer, steps=1)
        for own, other in zip(actor.parameters(), model.parameters(), strict=True):
            own.data = other.data
        with torch.no_grad():
            actions.append(float(run.mean(actor(run.normal(4, 6)).mean())))
    return final(run, model, actions=actions)


@program("moving averages swapped in by exchanging .data, evaluated, and swapped out")
def data_exchanged(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    shadow = [one.detach().clone() for one in model.parameters()]
    scores = []

    def exchange() -> None:
        for number, parameter in enumerate(model.parameters()):
            parameter.data, shadow[number] = shadow[number], parameter.data

    def evaluate(_: int) -> None:
        for kept, parameter in zip(shadow, model.parameters(), strict=True):
            kept.lerp_(parameter.detach(), 0.3)
        exchange()
        with torch.no_grad():
            scores.append(float(run.mean(run.module(model)(run.normal(4, 6)).square().mean())))
        exchange()

    return final(run, model, losses=train(run, model, optimizer, steps=4, after_step=evaluate), scores=scores)


@program("parameters that are not contiguous: transposed, and a slice of a larger tensor")
def strided(run: Run) -> Values:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turned = nn.Parameter((torch.randn(6, 9) * 0.3).t())
            self.sliced = nn.Parameter((torch.randn(9, 8) * 0.3)[:, 2:5])

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.tanh(inputs @ self.turned.t()) @ self.sliced

    model = Strided()
    return trained(run, model, adam(model))


@program("attributes of the user's own on parameters, from which groups are made and rates read")
def attributes_of_parameters(run: Run) -> Values:
    model = perceptron()
    for number, parameter in enumerate(model.parameters()):
        parameter.rate, parameter.is_bias = 0.01 * (number + 1), parameter.ndim == 1
    model, optimizer = run.wrap(model, sgd(model, momentum=0.9))
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        for parameter in model.parameters():
            if parameter.is_bias:
                parameter.grad.mul_(parameter.rate)
        optimizer.step()
    return final(run, model, rates=[one.rate for one in model.parameters()])


@program("target networks by torch.add(..., out=) and by torch._foreach_lerp_ of state_dict values")
def averages_written_out(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    module = run.module(model)
    first, second = copy.deepcopy(module), copy.deepcopy(module)

    @torch.no_grad()
    def follow(_: int) -> None:
        for own, other in zip(first.parameters(), module.parameters(), strict=True):
            own.data.mul_(0.8)
            torch.add(own.data, other.data, alpha=0.2, out=own.data)
        torch._foreach_lerp_(list(second.state_dict().values()), list(module.state_dict().values()), 0.3)

    losses = train(run, model, optimizer, after_step=follow)
    return final(run, model, losses=losses, first=first.state_dict(), second=second.state_dict())


@program("weights written through NumPy's view of them between steps")
def written_through_numpy(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))

    def write(_: int) -> None:
        weight = run.module(model)[0].weight.detach().numpy()
        weight *= 0.95

    return final(run, model, losses=train(run, model, optimizer, steps=4, after_step=write))


@program("a module of the model moved to another number type and back for evaluation")
def type_changed_and_back(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    scores = []

    def evaluate(_: int) -> None:
        single = copy.deepcopy(run.module(model)).float()
        with torch.no_grad():
            scores.append(float(run.mean(single(torch.ones(2, 6).float()).double().mean())))

    losses = train(run, model, optimizer, steps=3, after_step=evaluate)
    return final(run, model, losses=losses, scores=scores)


@program("flat vectors of weights from parameters_to_vector kept for an average of the last steps (SWA by hand)")
def vectors_averaged(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    vectors: list[torch.Tensor] = []
    losses = train(
        run,
        model,
        optimizer,
        after_step=lambda _: vectors.append(nn.utils.parameters_to_vector(model.parameters()).detach()),
    )
    nn.utils.vector_to_parameters(torch.stack(vectors[-3:]).mean(0), model.parameters())
    held = run.normal(4, 6)
    with torch.no_grad():
        score = float(run.mean(run.module(model)(held).square().mean()))
    return final(run, model, losses=losses, score=score)


@program("two parameters that share one memory: a head tied by .data", refused="by assigning the parameter itself")
def tied_by_data(run: Run) -> Values:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
            self.head.weight.data = self.embed.weight.data

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.embed(words)))

    model = Tied()
    batches = [(run.integers(10, 5), run.integers(10, 5)) for _ in range(4)]
    return trained(run, model, sgd(model), batches=batches, loss_of=nn.functional.cross_entropy)


@program(
    "parameters that are views of one flat vector, which is read after training",
    refused="give the parameters memory of their own",
)
def views_of_a_vector(run: Run) -> Values:
    model = perceptron()
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(flat, model.parameters())
    return {**trained(run, model, sgd(model)), "flat": flat}


@program(
    "parameters made views of one flat vector between steps, which is read after more of them",
    refused="write the values with p.data.copy_",
)
def views_made_later(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    losses = train(run, model, optimizer, steps=2)
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(flat, model.parameters())
    losses += train(run, model, optimizer, steps=2)
    return final(run, model, losses=losses, flat=flat)


@program(
    "the parameters' .data taken before the model is wrapped, and read after training",
    refused="give the parameters memory of their own",
)
def data_kept(run: Run) -> Values:
    model = perceptron()
    kept = [parameter.data for parameter in model.parameters()]
    return {**trained(run, model, sgd(model)), "kept": kept}


@program(
    "an actor in the memory of a model that share_memory() has moved, as for workers' processes",
    refused="give the parameters memory of their own",
)
def actor_shares_memory(run: Run) -> Values:
    model = perceptron().share_memory()
    actor = perceptron()
    for own, other in zip(actor.parameters(), model.parameters(), strict=True):
        own.data = other.data
    values = trained(run, model, sgd(model))
    with torch.no_grad():
        return {**values, "action": float(run.mean(actor(torch.ones(2, 6)).mean()))}
