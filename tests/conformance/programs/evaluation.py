"""Evaluation beside training, forward passes thrown away or kept for later, work of one rank alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from declarations import program
from torch import nn

from programs.small import adam, final, mse, perceptron, sgd, train

if TYPE_CHECKING:
    from neutral_run import Run

Values = dict[str, Any]


@program("validation after each step on rank 0 alone, through the inner module")
def validation_on_one_rank(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    held, scores = torch.ones(5, 6), []

    def validate(_: int) -> None:
        if run.rank == 0:
            run.module(model).eval()
            with torch.no_grad():
                scores.append(run.module(model)(held).sum())
            run.module(model).train()

    train(run, model, optimizer, after_step=validate)
    return final(run, model, scores=scores)


@program("validation on all ranks under no_grad, every second step, batches of another size", worlds=(2, 3))
def validation_on_all_ranks(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    scores = []

    def validate(step: int) -> None:
        if step % 2:
            model.eval()
            with torch.no_grad():
                scores.append(float(run.mean(model(run.normal(9, 6)).square().mean())))
            model.train()

    train(run, model, optimizer, after_step=validate)
    return final(run, model, scores=scores)


@program("validation under inference_mode")
def inference_mode(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    scores = []

    def validate(_: int) -> None:
        with torch.inference_mode():
            scores.append(float(model(torch.ones(3, 6)).square().mean()))

    train(run, model, optimizer, after_step=validate)
    return final(run, model, scores=scores)


@program("validation between backward and step")
def validation_before_step(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    scores = []
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        with torch.no_grad():
            scores.append(float(model(torch.ones(7, 6)).mean()))
        optimizer.step()
    return final(run, model, scores=scores)


@program("rank 0 throws away a large forward pass made with gradients", has_union=False, worlds=(2, 3))
def discarded_forward(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    for inputs, targets in run.pairs(4):
        if run.rank == 0:
            run.module(model)(torch.zeros(100, 6)).detach()
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        optimizer.step()
    return final(run, model)


@program("REINFORCE: log-probabilities of a rollout are kept, one backward pass at its end")
def rollout(run: Run) -> Values:
    model = perceptron(outputs=2)
    model, optimizer = run.wrap(model, adam(model))
    returns = []
    for _ in range(3):
        state, kept, rewards = run.normal(4, 6), [], []
        for _ in range(4):
            log_probabilities = torch.log_softmax(model(state), dim=1)
            action = log_probabilities.detach().argmax(1)
            kept.append(log_probabilities.gather(1, action[:, None]).squeeze(1))
            state = torch.tanh(state + 0.1 * (action[:, None] * 2 - 1))
            rewards.append(state.mean(1))
        gains = torch.stack(rewards).flip(0).cumsum(0).flip(0)
        optimizer.zero_grad()
        (-torch.stack(kept) * gains).mean().backward()
        optimizer.step()
        returns.append(float(run.mean(gains[0].mean())))
    return final(run, model, returns=returns)


@program("a rollout whose length differs by rank, so the number of forward passes does", has_union=False, warns="batch")
def rollout_of_different_length(run: Run) -> Values:
    model = perceptron(outputs=2)
    model, optimizer = run.wrap(model, sgd(model), find_unused_parameters=False)
    for _ in range(3):
        states = [run.normal(4, 6) for _ in range(2 + run.rank)]
        run.normal(4, 6)
        optimizer.zero_grad()
        outputs = [model(state) for state in states]
        torch.stack([one.square().mean() for one in outputs]).mean().backward()
        optimizer.step()
    return final(run, model)


@program("PPO: a rollout under no_grad, then three epochs of minibatches with a clipped ratio and a value loss")
def proximal_policy(run: Run) -> Values:
    class ActorCritic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.policy, self.value = nn.Linear(6, 9), nn.Linear(9, 3), nn.Linear(9, 1)

        def forward(self, states: torch.Tensor) -> tuple[torch.distributions.Categorical, torch.Tensor]:
            hidden = torch.tanh(self.body(states))
            return torch.distributions.Categorical(logits=self.policy(hidden)), self.value(hidden).squeeze(-1)

    model = ActorCritic()
    model, optimizer = run.wrap(model, adam(model))
    for _ in range(2):
        states, actions, rewards = run.normal(8, 6), run.integers(3, 8), run.normal(8)
        with torch.no_grad():
            policy, values = model(states)
            old, advantages = policy.log_prob(actions), rewards - values
        for _ in range(2):
            optimizer.zero_grad()
            policy, values = model(states)
            ratio = (policy.log_prob(actions) - old).exp()
            clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            loss = -clipped.mean() + 0.5 * mse(values, rewards) - 0.01 * policy.entropy().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return final(run, model)


@program("DQN: a target network copied every other step, Q-values of the next state from it")
def deep_q_learning(run: Run) -> Values:
    model, target = perceptron(), perceptron()
    target.load_state_dict(model.state_dict())
    model, optimizer = run.wrap(model, torch.optim.RMSprop(model.parameters(), lr=1e-3))
    for step in range(6):
        states, following, actions = run.normal(4, 6), run.normal(4, 6), run.integers(3, 4)
        with torch.no_grad():
            wanted = 0.1 + 0.9 * target(following).max(1).values
        loss = nn.functional.smooth_l1_loss(model(states).gather(1, actions[:, None]).squeeze(1), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2:
            target.load_state_dict(run.module(model).state_dict())
    return final(run, model, target=target.state_dict())


@program("soft target updates (Polyak) with .data.copy_, as in actor-critic code")
def polyak(run: Run) -> Values:
    model, target = perceptron(), perceptron()
    target.load_state_dict(model.state_dict())
    model, optimizer = run.wrap(model, adam(model))

    def follow(_: int) -> None:
        for slow, fast in zip(target.parameters(), run.module(model).parameters(), strict=True):
            slow.data.copy_(0.05 * fast.data + 0.95 * slow.data)

    train(run, model, optimizer, after_step=follow)
    return final(run, model, target=target.state_dict())


@program("early stopping on the mean loss")
def early_stopping(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model, lr=0.5))
    best, waited, inputs, targets = float("inf"), 0, run.normal(4, 6), run.normal(4, 3)
    steps = 0
    while waited < 2 and steps < 12:
        optimizer.zero_grad()
        loss = mse(model(inputs), targets)
        loss.backward()
        optimizer.step()
        steps += 1
        mean = float(run.mean(loss))
        waited = 0 if mean < best - 0.02 else waited + 1
        best = min(best, mean)
    return final(run, model, steps=steps)


@program("the best weights kept with deepcopy of state_dict, and put back at the end")
def best_weights(run: Run) -> Values:
    import copy

    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model, lr=1.5))
    best, kept = float("inf"), None
    for inputs, targets in run.pairs(6):
        optimizer.zero_grad()
        loss = mse(model(inputs), targets)
        loss.backward()
        optimizer.step()
        mean = float(run.mean(loss))
        if mean < best:
            best, kept = mean, copy.deepcopy(run.module(model).state_dict())
    assert kept is not None
    run.module(model).load_state_dict(kept)
    return final(run, model, best=best)


@program("batches whose size differs by rank: each rank counts alike", has_union=False, warns="batch", worlds=(2, 3))
def uneven_batches(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    batches = [(run.normal(2 + 3 * run.rank, 6), run.normal(2 + 3 * run.rank, 3)) for _ in range(4)]
    return final(run, model, losses=train(run, model, optimizer, batches=batches))


@program("a last batch that is smaller, on all ranks alike")
def smaller_last_batch(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    batches = [*run.pairs(3), *run.pairs(1, size=2)]
    return final(run, model, losses=train(run, model, optimizer, batches=batches))


@program(
    "token losses weighed by hand: sum over own tokens times ranks, over all tokens", has_union=False, warns="batch"
)
def weighed_by_hand(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    for _ in range(4):
        number = 2 + 2 * run.rank
        inputs, targets = run.normal(number, 6), run.normal(number, 3)
        total = run.mean(torch.tensor(float(number))) * run.world
        optimizer.zero_grad()
        (mse(model(inputs), targets, reduction="sum") * run.world / total).backward()
        optimizer.step()
    return final(run, model)


@program("Join: loaders of different length", has_union=False, worlds=(2, 3))
def uneven_loaders(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    batches = run.pairs(5)[: 5 - 2 * run.rank]
    with run.join(model):
        for inputs, targets in batches:
            optimizer.zero_grad()
            mse(model(inputs), targets).backward()
            optimizer.step()
    return final(run, model)


@program("a rank whose loss is 0 in some steps takes part with zeros", has_union=False)
def masked_out_rank(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for step, (inputs, targets) in enumerate(run.pairs(5)):
        optimizer.zero_grad()
        (mse(model(inputs), targets) * float(step % 2 != run.rank)).backward()
        optimizer.step()
    return final(run, model)
