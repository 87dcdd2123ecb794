"""Losses of several forward passes, several models, several heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from declarations import program
from torch import nn
from torch.nn import functional

from programs.small import adam, final, mse, perceptron, sgd, train

if TYPE_CHECKING:
    from neutral_run import Run

Values = dict[str, Any]
bce = functional.binary_cross_entropy_with_logits


def gan(run: Run) -> tuple[Any, Any, Any, Any]:
    """Distribute a generator and a discriminator, each with its optimizer."""
    generator, discriminator = perceptron(4, 6), perceptron(6, 1)
    generator, for_generator = run.wrap(generator, adam(generator, betas=(0.5, 0.999)))
    discriminator, for_discriminator = run.wrap(discriminator, adam(discriminator, betas=(0.5, 0.999)))
    return generator, for_generator, discriminator, for_discriminator


def both(run: Run, generator: nn.Module, discriminator: nn.Module, **more: Any) -> Values:
    """Return the state of both models."""
    return {"generator": final(run, generator), "discriminator": final(run, discriminator)} | more


@program("DCGAN: two backward passes for the discriminator, then the generator's through it", worlds=(2, 3))
def adversarial(run: Run) -> Values:
    generator, for_generator, discriminator, for_discriminator = gan(run)
    ones, losses = torch.ones(4 * (1 if run.__class__.__name__ != "AloneRun" else run.world), 1), []
    for _ in range(4):
        real, noise = run.normal(4, 6), run.normal(4, 4)
        discriminator.zero_grad()
        bce(discriminator(real), ones).backward()
        fake = generator(noise)
        bce(discriminator(fake.detach()), 0 * ones).backward()
        for_discriminator.step()
        generator.zero_grad()
        loss = bce(discriminator(fake), ones)
        loss.backward()
        for_generator.step()
        losses.append(float(run.mean(loss)))
    return both(run, generator, discriminator, losses=losses)


@program("a GAN with one backward pass for each model, discriminator frozen in the generator's turn")
def adversarial_frozen(run: Run) -> Values:
    generator, for_generator, discriminator, for_discriminator = gan(run)
    for _ in range(4):
        real, noise = run.normal(4, 6), run.normal(4, 4)
        with torch.no_grad():
            fake = generator(noise)
        for_discriminator.zero_grad()
        (functional.softplus(-discriminator(real)).mean() + functional.softplus(discriminator(fake)).mean()).backward()
        for_discriminator.step()
        for_generator.zero_grad()
        for_discriminator.zero_grad()
        functional.softplus(-discriminator(generator(noise))).mean().backward()
        for_generator.step()
    return both(run, generator, discriminator)


@program("WGAN-GP: a gradient penalty, five critic steps for one of the generator")
def gradient_penalty(run: Run) -> Values:
    generator, for_generator, critic, for_critic = gan(run)
    for step in range(5):
        real, noise = run.normal(4, 6), run.normal(4, 4)
        fake = generator(noise).detach()
        mixed = (0.3 * real + 0.7 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
        for_critic.zero_grad()
        (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
        for_critic.step()
        if step % 2:
            for_generator.zero_grad()
            (-critic(generator(noise)).mean()).backward()
            for_generator.step()
    return both(run, generator, critic)


@program("WGAN with clamped critic weights and RMSprop")
def clamped_critic(run: Run) -> Values:
    generator, critic = perceptron(4, 6), perceptron(6, 1)
    generator, for_generator = run.wrap(generator, torch.optim.RMSprop(generator.parameters(), lr=1e-3))
    critic, for_critic = run.wrap(critic, torch.optim.RMSprop(critic.parameters(), lr=1e-3))
    for _ in range(4):
        for _ in range(2):
            for_critic.zero_grad()
            (critic(generator(run.normal(4, 4)).detach()).mean() - critic(run.normal(4, 6)).mean()).backward()
            for_critic.step()
            for parameter in critic.parameters():
                parameter.data.clamp_(-0.05, 0.05)
        for_generator.zero_grad()
        (-critic(generator(run.normal(4, 4))).mean()).backward()
        for_generator.step()
    return both(run, generator, critic)


@program("CycleGAN's generators: two models, one optimizer each, one loss through both")
def two_models_one_loss(run: Run) -> Values:
    there, back = perceptron(6, 6), perceptron(6, 6)
    there, for_there = run.wrap(there, sgd(there))
    back, for_back = run.wrap(back, sgd(back))
    for _ in range(4):
        inputs = run.normal(4, 6)
        for_there.zero_grad()
        for_back.zero_grad()
        mse(back(there(inputs)), inputs).backward()
        for_there.step()
        for_back.step()
    return both(run, there, back)


@program("siamese: the model called twice for one loss")
def siamese(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for _ in range(4):
        optimizer.zero_grad()
        distance = (model(run.normal(4, 6)) - model(run.normal(4, 6))).square().sum(1)
        functional.relu(1 - distance).mean().backward()
        optimizer.step()
    return final(run, model)


@program("triplets: three forward passes, one of them of another batch size", worlds=(2, 3))
def triplets(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    for _ in range(4):
        optimizer.zero_grad()
        anchor, positive = model(torch.cat([run.normal(4, 6), run.normal(4, 6)])).chunk(2)
        functional.triplet_margin_loss(anchor, positive, model(run.normal(4, 6))).backward()
        optimizer.step()
    return final(run, model)


@program("SimCLR: two views, negatives within the rank's batch", has_union=False)
def contrastive(run: Run) -> Values:
    model = perceptron(outputs=4)
    model, optimizer = run.wrap(model, adam(model))
    for _ in range(4):
        inputs = run.normal(4, 6)
        optimizer.zero_grad()
        codes = functional.normalize(torch.cat([model(inputs + 0.1), model(inputs - 0.1)]), dim=1)
        similar = (codes @ codes.T / 0.5).masked_fill(torch.eye(8, dtype=torch.bool), -1e9)
        functional.cross_entropy(similar, torch.arange(8).roll(4)).backward()
        optimizer.step()
    return final(run, model)


@program("BYOL: a predictor, an EMA target, no gradient through the target")
def bootstrap(run: Run) -> Values:
    online, target, predictor = perceptron(outputs=4), perceptron(outputs=4), nn.Linear(4, 4)
    target.load_state_dict(online.state_dict())
    model = nn.Sequential(online, predictor)
    model, optimizer = run.wrap(model, sgd(model))
    for _ in range(4):
        inputs = run.normal(4, 6)
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = target(inputs - 0.1)
        (-functional.cosine_similarity(model(inputs + 0.1), wanted, dim=1)).mean().backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    return final(run, model, target=target.state_dict())


@program("mean teacher: consistency with an EMA of the weights, its rate rising")
def mean_teacher(run: Run) -> Values:
    model, teacher = perceptron(), perceptron()
    teacher.load_state_dict(model.state_dict())
    model, optimizer = run.wrap(model, adam(model))
    for step, (inputs, targets) in enumerate(run.pairs(5)):
        optimizer.zero_grad()
        with torch.no_grad():
            consistent = teacher(inputs + 0.05)
        outputs = model(inputs)
        (mse(outputs, targets) + 0.1 * step * mse(outputs, consistent)).backward()
        optimizer.step()
        keep = min(1 - 1 / (step + 1), 0.9)
        for slow, fast in zip(teacher.parameters(), run.module(model).parameters(), strict=True):
            slow.data.mul_(keep).add_(fast.data, alpha=1 - keep)
    return final(run, model, teacher=teacher.state_dict())


@program("distillation from a frozen teacher that is a submodule of the trained model")
def distillation(run: Run) -> Values:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = perceptron().requires_grad_(False), perceptron()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                wanted = functional.softmax(self.teacher(inputs) / 2, dim=1)
            return functional.kl_div(
                functional.log_softmax(self.student(inputs) / 2, dim=1), wanted, reduction="batchmean"
            )

    model = Pair()
    model, optimizer = run.wrap(model, adam(model))
    losses = train(run, model, optimizer, loss_of=lambda loss, _: loss)
    return final(run, model, losses=losses)


class TwoHeads(nn.Module):
    """One body, two tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 3), nn.Linear(9, 2)

    def forward(self, inputs: torch.Tensor, task: str = "both") -> Any:
        hidden = torch.tanh(self.body(inputs))
        if task != "both":
            return getattr(self, task)(hidden)
        return {"first": self.first(hidden), "second": self.second(hidden), "nothing": None}


@program("two heads and a weighted sum of their losses; outputs in a dict with None")
def two_heads(run: Run) -> Values:
    model = TwoHeads()
    model, optimizer = run.wrap(model, adam(model))
    for inputs, targets in run.pairs(5):
        optimizer.zero_grad()
        outputs = model(inputs)
        (mse(outputs["first"], targets) + 0.3 * outputs["second"].square().mean()).backward()
        optimizer.step()
    return final(run, model)


@program("tasks by turns: each step trains one head (find_unused_parameters)")
def tasks_by_turns(run: Run) -> Values:
    model = TwoHeads()
    model, optimizer = run.wrap(model, adam(model), find_unused_parameters=True)
    for step in range(6):
        optimizer.zero_grad()
        model(run.normal(4, 6), task=("first", "second")[step % 2]).square().mean().backward()
        optimizer.step()
    return final(run, model)


@program(
    "tasks by rank: each rank trains the head of its own data (find_unused_parameters)", has_union=False, worlds=(2, 3)
)
def tasks_by_rank(run: Run) -> Values:
    model = TwoHeads()
    model, optimizer = run.wrap(model, sgd(model), find_unused_parameters=True)
    for step in range(4):
        optimizer.zero_grad()
        model(run.normal(4, 6), task=("first", "second")[(step + run.rank) % 2]).square().mean().backward()
        optimizer.step()
    return final(run, model)


@program("uncertainty weights of two losses are parameters of the model, read by the loop")
def learnt_loss_weights(run: Run) -> Values:
    class Weighted(TwoHeads):
        def __init__(self) -> None:
            super().__init__()
            self.log_variance = nn.Parameter(torch.zeros(2))

        def forward(self, inputs: torch.Tensor, task: str = "both") -> Any:
            outputs = super().forward(inputs, task)
            return outputs["first"], outputs["second"], self.log_variance

    model = Weighted()
    model, optimizer = run.wrap(model, adam(model))
    for inputs, targets in run.pairs(5):
        optimizer.zero_grad()
        first, second, variance = model(inputs)
        losses = torch.stack([mse(first, targets), second.square().mean()])
        (torch.exp(-variance) * losses + variance).sum().backward()
        optimizer.step()
    return final(run, model)


@program("a criterion with parameters of its own (centre loss), in one module with the model")
def learnt_criterion(run: Run) -> Values:
    class WithCenters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.centers = perceptron(outputs=2), nn.Parameter(torch.randn(3, 2))

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return (self.model(inputs) - self.centers[labels]).square().sum(1).mean()

    model = WithCenters()
    groups = [{"params": model.model.parameters()}, {"params": [model.centers], "lr": 0.3}]
    model, optimizer = run.wrap(model, torch.optim.SGD(groups, lr=0.05))
    for inputs, labels in run.labelled(4, 4, 6):
        optimizer.zero_grad()
        model(inputs, labels).backward()
        optimizer.step()
    return final(run, model)


@program("a variational autoencoder: reparametrised noise, two loss terms")
def variational(run: Run) -> Values:
    encoder, decoder = perceptron(6, 8), perceptron(4, 6)
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})

    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, inputs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
            mean, log_variance = self.parts["encoder"](inputs).chunk(2, 1)
            return self.parts["decoder"](mean + noise * (0.5 * log_variance).exp()), mean, log_variance

    whole = Autoencoder()
    whole, optimizer = run.wrap(whole, adam(whole))
    for _ in range(5):
        inputs, noise = run.normal(4, 6), run.normal(4, 4)
        optimizer.zero_grad()
        outputs, mean, log_variance = whole(inputs, noise)
        (mse(outputs, inputs) - 0.05 * (1 + log_variance - mean**2 - log_variance.exp()).mean()).backward()
        optimizer.step()
    return final(run, whole)


@program("mixup of the batch, cross entropy with label smoothing")
def mixup(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model, lr=0.02))
    for step, (inputs, labels) in enumerate(run.labelled(5, 4, 6)):
        share = 0.3 + 0.1 * step
        optimizer.zero_grad()
        outputs = model(share * inputs + (1 - share) * inputs.flip(1))
        functional.cross_entropy(outputs, labels, label_smoothing=0.1).backward()
        optimizer.step()
    return final(run, model)
