"""Reinforcement learning: several networks and optimizers, targets, rollouts, running statistics, delayed updates."""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any

import torch
from declarations import program
from torch import nn

from programs.small import adam, final, mse, perceptron, sgd

if TYPE_CHECKING:
    from neutral_run import Run

Values = dict[str, Any]
functional = nn.functional


class Pair(nn.Module):
    """Two critics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = perceptron(8, 1), perceptron(8, 1)

    def forward(self, states: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat([states, actions], dim=-1)
        return self.first(both), self.second(both)


@torch.no_grad()
def follow(target: nn.Module, source: nn.Module, rate: float = 0.1) -> None:
    for slow, fast in zip(target.parameters(), source.parameters(), strict=True):
        slow.data.copy_(rate * fast.data + (1 - rate) * slow.data)


@program("TD3: two critics, the actor and all targets updated every second step")
def twin_delayed(run: Run) -> Values:
    actor, critics = perceptron(6, 2), Pair()
    actor_target, critics_target = copy.deepcopy(actor), copy.deepcopy(critics)
    actor, actor_steps = run.wrap(actor, adam(actor))
    critics, critic_steps = run.wrap(critics, adam(critics))
    for step in range(4):
        states, following, rewards = run.normal(4, 6), run.normal(4, 6), run.normal(4, 1)
        actions = run.normal(4, 2)
        with torch.no_grad():
            value = torch.min(*critics_target(following, torch.tanh(actor_target(following))))
        first, second = critics(states, actions)
        critic_steps.zero_grad()
        (mse(first, rewards + 0.9 * value) + mse(second, rewards + 0.9 * value)).backward()
        critic_steps.step()
        if step % 2:
            actor_steps.zero_grad()
            (-run.module(critics).first(torch.cat([states, torch.tanh(actor(states))], dim=-1)).mean()).backward()
            actor_steps.step()
            follow(actor_target, run.module(actor))
            follow(critics_target, run.module(critics))
    return final(run, actor) | {"critics": final(run, critics), "target": critics_target.state_dict()}


@program("SAC: a temperature outside all models with an optimizer of its own, its gradient averaged by the loop")
def temperature(run: Run) -> Values:
    actor, critics = perceptron(6, 2), Pair()
    log_alpha = torch.zeros(1, requires_grad=True)
    alpha_steps = torch.optim.Adam([log_alpha], lr=0.05)
    actor, actor_steps = run.wrap(actor, adam(actor))
    critics, critic_steps = run.wrap(critics, adam(critics))
    for _ in range(4):
        states, actions, rewards = run.normal(4, 6), run.normal(4, 2), run.normal(4, 1)
        critic_steps.zero_grad()
        sum(mse(value, rewards) for value in critics(states, actions)).backward()
        critic_steps.step()
        actor_steps.zero_grad()
        chosen = actor(states)
        entropy = chosen.square().mean(1)
        values = torch.min(*run.module(critics)(states, torch.tanh(chosen)))
        (-values.mean() - log_alpha.exp().detach() * entropy.mean()).backward()
        actor_steps.step()
        alpha_steps.zero_grad()
        (log_alpha * (entropy.detach() - 0.5).mean()).backward()
        log_alpha.grad = run.mean(log_alpha.grad)
        alpha_steps.step()
    return final(run, actor) | {"critics": final(run, critics), "alpha": log_alpha}


class ActorCritic(nn.Module):
    """One body, two heads, and statistics of observations in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(6, 9), nn.Linear(9, 3), nn.Linear(9, 1)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))
        self.register_buffer("count", torch.tensor(1e-4))

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.body((states - self.mean) / (self.variance + 1e-8).sqrt()))
        return self.policy(hidden), self.value(hidden).squeeze(-1)


@program(
    "PPO that stops an iteration's epochs by the mean divergence, and observations normalised by running statistics"
)
def stopped_by_divergence(run: Run) -> Values:
    model = ActorCritic()
    model, optimizer = run.wrap(model, adam(model, lr=0.05, eps=1e-5))
    module, epochs = run.module(model), []
    for _ in range(2):
        states, advantages = run.normal(6, 6), run.normal(6)
        mean, square = run.mean(states.mean(0)), run.mean(states.square().mean(0))
        module.count += 6
        module.mean.lerp_(mean, 0.3)
        module.variance.lerp_(square - mean.square(), 0.3)
        with torch.no_grad():
            before = module(states)[0].log_softmax(-1)
        for epoch in range(5):
            logits, values = model(states)
            after = logits.log_softmax(-1)
            ratio = (after - before)[:, 0].exp()
            loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
            divergence = run.mean((before.exp() * (before - after)).sum(-1).mean())
            if divergence > 0.01:
                epochs.append(epoch)
                break
            optimizer.zero_grad()
            (loss + 0.5 * mse(values, advantages)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return final(run, model, epochs=epochs)


@program("A2C over a recurrent cell: one loss at the end of a rollout, the state carried on detached")
def recurrent_rollout(run: Run) -> Values:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(6, 8), nn.Linear(8, 2)

        def forward(self, states: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            memory = self.cell(states, memory)
            return self.head(memory), memory

    model = Policy()
    model, optimizer = run.wrap(model, adam(model))
    size = 3 * (1 if len(run.normal(3, 1)) == 3 else run.world)
    memory = torch.zeros(size, 8)
    for _ in range(3):
        losses = []
        for _ in range(3):
            logits, memory = model(run.normal(3, 6), memory * (run.integers(4, 3) > 0).double()[:, None])
            losses.append(logits.log_softmax(-1)[:, 0].mean())
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
        memory = memory.detach()
    return final(run, model, memory=run.mean(memory.mean()))


@program("PPG: a policy phase, then an auxiliary phase with another optimizer of the value network")
def two_phases(run: Run) -> Values:
    policy, value = perceptron(6, 3), perceptron(6, 1)
    policy, policy_steps = run.wrap(policy, adam(policy))
    value, value_steps = run.wrap(value, adam(value, lr=0.02))
    for _ in range(2):
        kept = []
        for states, _ in run.pairs(2):
            kept.append(states)
            policy_steps.zero_grad()
            policy(states).log_softmax(-1)[:, 0].mean().backward()
            policy_steps.step()
        with torch.no_grad():
            before = [run.module(policy)(states).log_softmax(-1) for states in kept]
        for states, fixed in zip(kept, before, strict=True):
            value_steps.zero_grad()
            mse(value(states), states[:, :1]).backward()
            value_steps.step()
            policy_steps.zero_grad()
            functional.kl_div(policy(states).log_softmax(-1), fixed, log_target=True, reduction="batchmean").backward()
            policy_steps.step()
    return final(run, policy) | {"value": final(run, value)}


@program("Dreamer: three models with a clipping of each, one of which learns through another that is frozen meanwhile")
def world_model(run: Run) -> Values:
    world, actor, critic = perceptron(8, 6), perceptron(6, 2), perceptron(6, 1)
    world, world_steps = run.wrap(world, adam(world))
    actor, actor_steps = run.wrap(actor, adam(actor))
    critic, critic_steps = run.wrap(critic, adam(critic))
    norms = []

    def update(loss: torch.Tensor, model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()

    for states, _ in run.pairs(3):
        actions, following = run.normal(4, 2), run.normal(4, 6)
        update(mse(world(torch.cat([states, actions], -1)), following), world, world_steps)
        frozen = [*world.parameters(), *critic.parameters()]
        for parameter in frozen:
            parameter.requires_grad_(requires_grad=False)
        imagined = states
        for _ in range(2):
            imagined = run.module(world)(torch.cat([imagined, torch.tanh(run.module(actor)(imagined))], -1))
        imagined = run.module(world)(torch.cat([imagined, torch.tanh(actor(imagined.detach()))], -1))
        loss = -run.module(critic)(imagined).mean()
        update(loss, actor, actor_steps)
        for parameter in frozen:
            parameter.requires_grad_()
        update(mse(critic(imagined.detach()), states[:, :1]), critic, critic_steps)
    return final(run, world) | {"actor": final(run, actor), "critic": final(run, critic), "norms": norms}


@program("distributional bootstraps: heads of which each sample trains some, by masks, and a prior that is not trained")
def bootstrapped_heads(run: Run) -> Values:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(perceptron(6, 1) for _ in range(3))
            self.prior = perceptron(6, 1).requires_grad_(requires_grad=False)

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return torch.cat([head(states) + self.prior(states) for head in self.heads], dim=-1)

    model = Heads()
    model, optimizer = run.wrap(model, adam(model))
    for states, targets in run.pairs(4):
        mask = (run.integers(2, 4, 3) > 0).double()
        optimizer.zero_grad()
        ((model(states) - targets[:, :1]).square() * mask).mean().backward()
        optimizer.step()
    return final(run, model)


@program("CLIP: negatives of all ranks, gathered by a function whose backward pass averages", has_union=False)
def negatives_of_all_ranks(run: Run) -> Values:
    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, own: torch.Tensor) -> torch.Tensor:
            ctx.size = len(own)
            everything = own.new_zeros(run.world, *own.shape)
            everything[run.rank] = own
            return run.mean(everything).flatten(0, 1) * run.world

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return run.mean(gradient).unflatten(0, (run.world, ctx.size))[run.rank] * run.world

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.images, self.texts = nn.Linear(6, 4), nn.Linear(5, 4)
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, images: torch.Tensor, texts: torch.Tensor) -> tuple[torch.Tensor, ...]:
            first, second = functional.normalize(self.images(images)), functional.normalize(self.texts(texts))
            return first, second, self.scale.exp()

    model = Towers()
    model, optimizer = run.wrap(model, adam(model, lr=0.05))
    losses = []
    for _ in range(4):
        first, second, scale = model(run.normal(3, 6), run.normal(3, 5))
        scores = scale * Gathered.apply(first) @ Gathered.apply(second).t()
        labels = torch.arange(len(scores))
        loss = (functional.cross_entropy(scores, labels) + functional.cross_entropy(scores.t(), labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            run.module(model).scale.clamp_(0, 1.2)
        losses.append(float(loss))
    return final(run, model, losses=losses)


@program("StyleGAN2: a penalty every third step in a pass of its own, path lengths averaged, an EMA of the generator")
def lazy_penalty(run: Run) -> Values:
    generator, critic = perceptron(4, 6), perceptron(6, 1)
    average = copy.deepcopy(generator).requires_grad_(requires_grad=False)
    generator, generator_steps = run.wrap(generator, adam(generator, betas=(0.0, 0.99)))
    critic, critic_steps = run.wrap(critic, adam(critic, betas=(0.0, 0.99)))
    path = torch.zeros(())
    for step in range(4):
        real = run.normal(4, 6)
        critic_steps.zero_grad()
        fake = generator(run.normal(4, 4)).detach()
        (functional.softplus(critic(fake)) + functional.softplus(-critic(real))).mean().backward()
        critic_steps.step()
        if step % 3 == 0:
            real = real.requires_grad_()
            critic_steps.zero_grad()
            scores = critic(real)
            (slopes,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
            (3 * slopes.square().sum(1).mean() + 0 * scores.mean()).backward()
            critic_steps.step()
        generator_steps.zero_grad()
        noise = run.normal(4, 4).requires_grad_()
        made = generator(noise)
        (slopes,) = torch.autograd.grad((made * 0.3).sum(), noise, create_graph=True)
        length = slopes.square().sum(1).sqrt()
        path = path.lerp(run.mean(length.mean()), 0.1)
        (functional.softplus(-critic(made)).mean() + 0.1 * (length - path).square().mean()).backward()
        generator_steps.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), generator.parameters(), strict=True):
                slow.copy_(fast.lerp(slow, 0.8))
    return final(run, generator) | {"critic": final(run, critic), "average": average.state_dict(), "path": path}


@program("CycleGAN: a pool of earlier images, both generators in one optimizer, rates that fall linearly")
def image_pool(run: Run) -> Values:
    models = [perceptron(6, 6), perceptron(6, 6)]
    critics = [perceptron(6, 1), perceptron(6, 1)]
    models, steps = run.wrap_together(
        models, torch.optim.Adam(itertools.chain.from_iterable(m.parameters() for m in models), lr=0.01)
    )
    critics, critic_steps = run.wrap_together(
        critics, torch.optim.Adam(itertools.chain.from_iterable(c.parameters() for c in critics), lr=0.01)
    )
    schedulers = [torch.optim.lr_scheduler.LambdaLR(one, lambda epoch: 1 - epoch / 5) for one in (steps, critic_steps)]
    pool: list[torch.Tensor] = []
    for real, other in ((run.normal(4, 6), run.normal(4, 6)) for _ in range(3)):
        for parameter in itertools.chain.from_iterable(critic.parameters() for critic in critics):
            parameter.requires_grad_(requires_grad=False)
        fakes = models[0](real), models[1](other)
        loss = mse(models[1](fakes[0]), real) + mse(models[0](fakes[1]), other)
        loss = loss + sum(functional.softplus(-run.module(c)(f)).mean() for c, f in zip(critics, fakes, strict=True))
        steps.zero_grad()
        loss.backward()
        steps.step()
        for parameter in itertools.chain.from_iterable(critic.parameters() for critic in critics):
            parameter.requires_grad_()
        pool.append(fakes[0].detach())
        critic_steps.zero_grad()
        for critic, fake, true in zip(critics, (pool[0], fakes[1].detach()), (other, real), strict=True):
            (functional.softplus(critic(fake)) + functional.softplus(-critic(true))).mean().backward()
        critic_steps.step()
        for scheduler in schedulers:
            scheduler.step()
    found = {f"model{number}": final(run, one) for number, one in enumerate([*models, *critics])}
    return {**found, "rates": [group["lr"] for group in steps.param_groups]}


@program("snapshots of an ensemble: rates that restart, weights copied at each end, soup of all at last")
def snapshot_soup(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2)
    snapshots = []
    for step, (inputs, targets) in enumerate(run.pairs(6)):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        optimizer.step()
        scheduler.step()
        if step % 2:
            snapshots.append({name: one.clone() for name, one in run.module(model).state_dict().items()})
    soup = {name: torch.stack([one[name] for one in snapshots]).mean(0) for name in snapshots[0]}
    run.module(model).load_state_dict(soup)
    with torch.no_grad():
        score = float(run.mean(run.module(model)(run.normal(4, 6)).mean()))
    return final(run, model, score=score)
