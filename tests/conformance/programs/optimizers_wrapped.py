"""Optimizers that hold, extend or share others, and what loops do to an optimizer's groups and state while training."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from declarations import program
from torch import nn

from programs.small import adam, final, mse, perceptron, sgd, train, trained

if TYPE_CHECKING:
    from neutral_run import Run

Values = dict[str, Any]


class SlowWeights:
    """Lookahead, as packages of optimizers write it: a plain object that holds the fast optimizer."""

    def __init__(self, optimizer: Any, every: int = 2, alpha: float = 0.5) -> None:
        self.optimizer, self.every, self.alpha = optimizer, every, alpha
        self.param_groups, self.count = optimizer.param_groups, 0
        self.slow: dict[Any, torch.Tensor] = {}

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()
        self.count += 1
        for parameter in itertools.chain.from_iterable(group["params"] for group in self.param_groups):
            slow = self.slow.setdefault(parameter, parameter.data.clone())
            if self.count % self.every == 0:
                slow.add_(parameter.data - slow, alpha=self.alpha)
                parameter.data.copy_(slow)


@program("Lookahead as an object around the distributed optimizer, by its groups", worlds=(2, 3))
def lookahead_around(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    return final(run, model, losses=train(run, model, SlowWeights(optimizer)))


class WarmUp:
    """The Annotated Transformer's NoamOpt: sets the rate, then steps."""

    def __init__(self, optimizer: Any, width: int, warm_up: int) -> None:
        self.optimizer, self.width, self.warm_up, self.count = optimizer, width, warm_up, 0

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.count += 1
        rate = self.width**-0.5 * min(self.count**-0.5, self.count * self.warm_up**-1.5)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()


@program("NoamOpt: an object that sets the rate before it steps the optimizer it holds")
def noam(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model, betas=(0.9, 0.98), eps=1e-9))
    return final(run, model, losses=train(run, model, WarmUp(optimizer, 16, 3)))


class ClippedSGD(torch.optim.SGD):
    """Clips all gradients in ``step``."""

    def step(self, closure: Any = None) -> Any:
        parameters = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        nn.utils.clip_grad_norm_(parameters, 0.1)
        return super().step(closure)


@program("detectron2: a class made of SGD whose step() clips first", refused_by_sharded="AllReduce")
def clipping_in_step(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, ClippedSGD(model.parameters(), lr=0.1, momentum=0.9))


class SharpnessAware(torch.optim.Optimizer):
    """SAM as an optimizer that holds another, which shares its groups."""

    def __init__(self, parameters: Any, rho: float, **options: Any) -> None:
        super().__init__(parameters, {"rho": rho, **options})
        self.base = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def _each(self) -> list[nn.Parameter]:
        return [one for group in self.param_groups for one in group["params"] if one.grad is not None]

    @torch.no_grad()
    def climb(self) -> None:
        norm = torch.stack([one.grad.norm() for one in self._each()]).norm()
        for parameter in self._each():
            self.state[parameter]["old"] = parameter.data.clone()
            parameter.add_(parameter.grad, alpha=float(self.param_groups[0]["rho"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        closure = torch.enable_grad()(closure)
        self.climb()
        closure()
        for parameter in self._each():
            parameter.data = self.state[parameter]["old"]
        self.base.step()
        self.zero_grad()


@program("SAM as an optimizer around SGD, with a closure for its second pass", refused_by_sharded="AllReduce")
def sharpness_aware_optimizer(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, SharpnessAware(model.parameters(), 0.05, lr=0.1, momentum=0.9))
    for inputs, targets in run.pairs(4):

        def backward(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            loss = mse(model(inputs), targets)
            loss.backward()
            return loss

        backward()
        optimizer.step(backward)
    return final(run, model)


class LayerScaled(torch.optim.Optimizer):
    """LARS: each parameter's rate by the norms of its weights and gradient."""

    def __init__(self, parameters: Any, lr: float, momentum: float = 0.9, trust: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        self.trust = trust

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                scale = 1.0
                if parameter.ndim > 1:
                    scale = self.trust * parameter.norm() / (parameter.grad.norm() + 1e-9)
                buffer = self.state[parameter].setdefault("mu", torch.zeros_like(parameter))
                buffer.mul_(group["momentum"]).add_(parameter.grad * scale)
                parameter.add_(buffer, alpha=-group["lr"])


@program("LARS: rates by layer from norms of weights and gradients", refused_by_sharded='align="parameter"')
def lars(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, LayerScaled(model.parameters(), lr=0.3, trust=0.05))


class DistanceAdapted(torch.optim.Optimizer):
    """As D-Adaptation does: one rate for all parameters, by what is known of the distance to the solution."""

    def __init__(self, parameters: Any, lr: float = 1.0, distance: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})
        self.distance, self.weighted = distance, 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        (group,) = self.param_groups
        norm = float(sum(one.grad.square().sum() for one in group["params"])) ** 0.5
        self.weighted += self.distance * norm
        rate = group["lr"] * self.distance / (norm + 1e-3)
        for parameter in group["params"]:
            total = self.state[parameter].setdefault("s", torch.zeros_like(parameter))
            total.add_(parameter.grad, alpha=rate)
            parameter.add_(parameter.grad, alpha=-rate)
        far = float(sum(self.state[one]["s"].square().sum() for one in group["params"])) ** 0.5
        self.distance = max(self.distance, far * 0.1 / (self.weighted + 1e-9))


@program("D-Adaptation: one rate for all parameters, from sums over all of them", refused_by_sharded="AllReduce")
def distance_adapted(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, DistanceAdapted(model.parameters()))


class Lion(torch.optim.Optimizer):
    """Lion: signs of an interpolated momentum."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            first, second = group["betas"]
            for one in filter(lambda each: each.grad is not None, group["params"]):
                momentum = self.state[one].setdefault("exp_avg", torch.zeros_like(one))
                one.data.mul_(1 - group["lr"] * group["decay"])
                one.add_((momentum * first + one.grad * (1 - first)).sign_(), alpha=-group["lr"])
                momentum.lerp_(one.grad, 1 - second)


@program("Lion in two groups, one without decay", refused_by_sharded='align="parameter"')
def lion(run: Run) -> Values:
    model = perceptron()
    weights = [one for one in model.parameters() if one.ndim > 1]
    biases = [one for one in model.parameters() if one.ndim < 2]
    groups = [{"params": weights, "decay": 0.1}, {"params": biases, "lr": 0.001}]
    return trained(run, model, Lion(groups, lr=0.004))


@program(
    "layers unfrozen one after the other, each added to the optimizer as a group of its own",
    refused="add them to the optimizer before",
)
def groups_added(run: Run) -> Values:
    model = perceptron()
    optimizer = torch.optim.Adam(model[4].parameters(), lr=0.01)
    model, optimizer = run.wrap(model, optimizer, find_unused_parameters=True)
    layers = run.module(model)
    for number in (0, 2):
        layers[number].requires_grad_(requires_grad=False)
    losses = train(run, model, optimizer, steps=2)
    for number, rate in ((2, 0.005), (0, 0.002)):
        layers[number].requires_grad_()
        optimizer.add_param_group({"params": list(layers[number].parameters()), "lr": rate})
        losses += train(run, model, optimizer, steps=2)
    return final(run, model, losses=losses)


@program("rates by layer: groups with names and lr_scale of their own, which a function reads before each step")
def scaled_groups(run: Run) -> Values:
    model = perceptron()
    groups = [
        {"params": list(layer.parameters()), "name": f"layer{number}", "lr_scale": 0.7 ** (2 - number)}
        for number, layer in enumerate((model[0], model[2], model[4]))
    ]
    model, optimizer = run.wrap(model, torch.optim.AdamW(groups, lr=0.01))
    for step, (inputs, targets) in enumerate(run.pairs(4)):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step) * group["lr_scale"]
            group["weight_decay"] = 0.1 if group["name"] == "layer2" else 0.0
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        optimizer.step()
    return final(run, model, rates={group["name"]: group["lr"] for group in optimizer.param_groups})


@program("clip_grad_norm_ of each group's parameters, taken from the optimizer's groups")
def clip_groups(run: Run) -> Values:
    model = perceptron()
    weights = [one for one in model.parameters() if one.ndim > 1]
    biases = [one for one in model.parameters() if one.ndim < 2]
    groups = [{"params": weights, "max_norm": 0.1}, {"params": biases, "max_norm": 0.02}]
    model, optimizer = run.wrap(model, torch.optim.Adam(groups, lr=0.01))
    norms = []
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        groups = optimizer.param_groups
        norms += [float(nn.utils.clip_grad_norm_(group["params"], group["max_norm"])) for group in groups]
        optimizer.step()
    return final(run, model, norms=norms)


@program(
    "one shared encoder in the groups of three optimizers, as in CURL",
    refused="give each further optimizer parameters of its own",
    has_union=False,
)
def encoder_shared(run: Run) -> Values:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.critic, self.contrast = nn.Linear(6, 9), nn.Linear(9, 1), nn.Linear(9, 9)

        def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = torch.tanh(self.encoder(inputs))
            return self.critic(hidden), self.contrast(hidden) @ hidden.T

    agent = Agent()
    optimizers = [
        torch.optim.Adam([*agent.encoder.parameters(), *agent.critic.parameters()], lr=0.01),
        torch.optim.Adam(agent.encoder.parameters(), lr=0.002),
        torch.optim.Adam(agent.contrast.parameters(), lr=0.01),
    ]
    agent, (critic, encoder, contrast) = run.wrap(agent, optimizers, find_unused_parameters=True)
    for inputs, targets in run.pairs(4):
        critic.zero_grad()
        mse(agent(inputs)[0], targets[:, :1]).backward()
        critic.step()
        encoder.zero_grad()
        contrast.zero_grad()
        nn.functional.cross_entropy(agent(inputs)[1], torch.arange(len(inputs))).backward()
        encoder.step()
        contrast.step()
    return final(run, agent)


@program(
    "Adam first, then SGD: two optimizers of the same parameters",
    refused="give each further optimizer parameters of its own",
)
def optimizer_switched(run: Run) -> Values:
    model = perceptron()
    model, (first, second) = run.wrap(model, [adam(model), sgd(model, momentum=0.9)])
    losses = train(run, model, first, steps=3)
    return final(run, model, losses=losses + train(run, model, second, steps=3))


@program(
    "the optimizer's state replaced by an empty one in the middle",
    refused="give a whole state to optimizer.load_state_dict",
)
def moments_replaced(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    losses = train(run, model, optimizer, steps=3)
    optimizer.state = defaultdict(dict)
    return final(run, model, losses=losses + train(run, model, optimizer, steps=3))


@program(
    "dead units drawn anew, with their moments set to 0, as sparse autoencoders do", refused_by_sharded="AllReduce"
)
def units_revived(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    losses = train(run, model, optimizer, steps=3)
    weight, dead = run.module(model)[0].weight, torch.tensor([1, 4, 9])
    with torch.no_grad():
        weight[dead] = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))
    for key in ("exp_avg", "exp_avg_sq"):
        optimizer.state[weight][key][dead] = 0.0
    return final(run, model, losses=losses + train(run, model, optimizer, steps=3))


@program("a rate finder: rates that rise, then model and optimizer put back to before the first step")
def rate_finder(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    module = run.module(model)
    kept = copy.deepcopy(module.state_dict()), copy.deepcopy(optimizer.state_dict())
    tried = []
    for rate in (1e-3, 1e-2, 1e-1):
        for group in optimizer.param_groups:
            group["lr"] = rate
        tried += train(run, model, optimizer, steps=1)
    module.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    return final(run, model, tried=tried, losses=train(run, model, optimizer, steps=3))


@program("a loss that jumps: model and optimizer put back to what was kept, with half the rate")
def rolled_back(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    losses = train(run, model, optimizer, steps=2)
    kept = copy.deepcopy({"model": run.module(model).state_dict(), "optimizer": optimizer.state_dict()})
    losses += train(run, model, optimizer, steps=2)
    run.module(model).load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    return final(run, model, losses=losses + train(run, model, optimizer, steps=2))


@program("population-based training: a model takes another's weights and optimizer state, both go on")
def population(run: Run) -> Values:
    members = []
    for rate in (0.01, 0.03):
        model = perceptron()
        members.append(run.wrap(model, adam(model, lr=rate)))
    (better, its_steps), (worse, others_steps) = members
    losses = [train(run, model, optimizer, steps=2) for model, optimizer in members]
    with torch.no_grad():
        for own, other in zip(worse.parameters(), better.parameters(), strict=True):
            own.data.copy_(other.data)
    others_steps.load_state_dict(copy.deepcopy(its_steps.state_dict()))
    others_steps.param_groups[0]["lr"] = 0.012
    losses += [train(run, model, optimizer, steps=2) for model, optimizer in members]
    return final(run, worse, losses=losses) | {"better": final(run, better)}


@program("two models and one optimizer over the parameters of both, as CycleGAN chains them")
def one_optimizer_of_two(run: Run) -> Values:
    first, second = perceptron(6, 6), perceptron(6, 6)
    optimizer = torch.optim.Adam(itertools.chain(first.parameters(), second.parameters()), lr=0.01, betas=(0.5, 0.999))
    (first, second), optimizer = run.wrap_together([first, second], optimizer)
    for real, _ in run.pairs(4):
        optimizer.zero_grad()
        (mse(second(first(real)), real) + 0.5 * mse(first(real), real)).backward()
        optimizer.step()
    return final(run, first) | {"second": final(run, second)}


@program("the optimizer is an attribute of the model, as in stable-baselines' policies")
def optimizer_in_model(run: Run) -> Values:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = perceptron()
            self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.net(inputs)

    policy = Policy()
    model, policy.optimizer = run.wrap(policy, policy.optimizer)
    return final(run, model, losses=train(run, model, policy.optimizer))


@program(
    "local SGD: steps on own gradients under no_sync, parameters averaged every second step",
    has_union=False,
    refused="backward pass of each step outside no_sync",
)
def local_steps(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    for step, (inputs, targets) in enumerate(run.pairs(4)):
        optimizer.zero_grad()
        with run.no_sync(model):
            mse(model(inputs), targets).backward()
        optimizer.step()
        if step % 2:
            for parameter in model.parameters():
                parameter.data.copy_(run.mean(parameter.data))
    return final(run, model)


@program(
    "master copies of a bfloat16 model in single precision, which the optimizer steps",
    refused="whose parameters the optimizer was made with",
    tolerance=0.05,
)
def master_weights(run: Run) -> Values:
    model = perceptron().bfloat16()
    masters = [nn.Parameter(one.detach().float()) for one in model.parameters()]
    model, optimizer = run.wrap(model, torch.optim.SGD(masters, lr=0.1))
    for inputs, targets in run.pairs(3):
        mse(model(inputs.bfloat16()), targets.bfloat16()).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    return final(run, model)


@program("the whole optimizer copied with deepcopy and its state compared", refused="save optimizer.state_dict()")
def optimizer_copied(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    losses = train(run, model, optimizer, steps=2)
    copied = copy.deepcopy(optimizer)
    losses += train(run, model, optimizer, steps=2)
    return final(run, model, losses=losses, copied=copied.state_dict()["state"])


@program(
    "one optimizer for each parameter, stepped in a hook of the backward pass",
    has_ddp=False,
    refused="after backward()",
)
def steps_in_hooks(run: Run) -> Values:
    model = perceptron()
    parameters = list(model.parameters())
    model, optimizers = run.wrap(model, [torch.optim.SGD([one], lr=0.1) for one in parameters])
    by_parameter = dict(zip(parameters, optimizers, strict=True))

    def step(parameter: nn.Parameter) -> None:
        by_parameter[parameter].step()
        by_parameter[parameter].zero_grad()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(step)
    for inputs, targets in run.pairs(3):
        mse(model(inputs), targets).backward()
    return final(run, model)
