"""Models as functions: torch.func, gradients of single samples, forward derivatives, own backward passes."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from declarations import program
from torch import nn
from torch.autograd import forward_ad

from programs.small import adam, final, mse, perceptron, sgd, train, trained

if TYPE_CHECKING:
    from neutral_run import Run

Values = dict[str, Any]


@program(
    "DP-SGD: gradients of single samples by vmap, clipped, averaged and put in p.grad", refused_by_sharded="AllReduce"
)
def per_sample_gradients(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    module = run.module(model)

    def loss_of(weights: dict[str, torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return mse(torch.func.functional_call(module, weights, (inputs,)), targets)

    for inputs, targets in run.pairs(3):
        weights = {name: value.detach() for name, value in module.named_parameters()}
        each = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))(weights, inputs, targets)
        norms = torch.stack([value.flatten(1).norm(dim=1) for value in each.values()]).norm(dim=0)
        factors = (0.5 / norms).clamp(max=1)
        for name, parameter in module.named_parameters():
            parameter.grad = run.mean(torch.einsum("n,n...->...", factors, each[name]) / len(inputs))
        optimizer.step()
    return final(run, model)


@program("gradients by torch.func.grad_and_value, applied by hand as in JAX; no optimizer is stepped")
def applied_by_hand(run: Run) -> Values:
    model = perceptron()
    model, _ = run.wrap(model, sgd(model))
    module = run.module(model)

    def loss_of(weights: dict[str, torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return mse(torch.func.functional_call(module, weights, (inputs,)), targets)

    losses = []
    for inputs, targets in run.pairs(4):
        found, loss = torch.func.grad_and_value(loss_of)(dict(module.named_parameters()), inputs, targets)
        steps = [run.mean(found[name]) for name, _ in module.named_parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(module.parameters()), steps, alpha=-0.1)
        losses.append(float(run.mean(loss)))
    return final(run, model, losses=losses)


@program("forward gradients: a directional derivative by dual numbers, in p.grad", refused_by_sharded="AllReduce")
def forward_gradients(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    module = run.module(model)
    generator = torch.Generator().manual_seed(4)
    for inputs, targets in run.pairs(3):
        directions = {name: torch.randn(one.shape, generator=generator) for name, one in module.named_parameters()}
        with torch.no_grad(), forward_ad.dual_level():
            dual = {name: forward_ad.make_dual(one, directions[name]) for name, one in module.named_parameters()}
            loss = mse(torch.func.functional_call(module, dual, (inputs,)), targets)
            slope = forward_ad.unpack_dual(loss).tangent
        for name, one in module.named_parameters():
            one.grad = run.mean(slope) * directions[name]
        optimizer.step()
    return final(run, model)


@program("torch.func.jvp and vjp through the model after each step, for a log")
def linearised(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    module = run.module(model)
    held = run.normal(3, 6)
    logged: list[float] = []

    def linearise(_: int) -> None:
        weights = dict(module.named_parameters())

        def outputs(values: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(module, values, (held,))

        values = {name: one.detach() for name, one in weights.items()}
        _, pushed = torch.func.jvp(outputs, (values,), ({name: torch.ones_like(one) for name, one in values.items()},))
        _, pull = torch.func.vjp(outputs, weights)
        logged.append(float(run.mean(pushed.mean())))
        logged.append(float(run.mean(pull(torch.ones_like(pushed) / len(pushed))[0]["0.weight"].mean())))

    losses = train(run, model, optimizer, steps=3, after_step=linearise)
    return final(run, model, losses=losses, logged=logged)


@program("the diagonal of the Fisher information by vmap of single gradients, then a penalty by it (EWC)")
def fisher_penalty(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    module = run.module(model)
    train(run, model, optimizer, steps=2)

    def score(weights: dict[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, weights, (inputs,)).log_softmax(-1)[0]

    anchors = {name: one.detach().clone() for name, one in module.named_parameters()}
    each = torch.func.vmap(torch.func.grad(score), (None, 0))(anchors, run.normal(4, 6))
    fisher = {name: run.mean(value.square().mean(0)) for name, value in each.items()}
    for inputs, targets in run.pairs(3):
        optimizer.zero_grad()
        far = sum((fisher[name] * (one - anchors[name]) ** 2).sum() for name, one in module.named_parameters())
        (mse(model(inputs), targets) + 10 * far).backward()
        optimizer.step()
    return final(run, model)


class Equilibrium(nn.Module):
    """A deep equilibrium model: a fixed point, whose gradient is solved for in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.inject, self.head = nn.Linear(7, 7), nn.Linear(6, 7), nn.Linear(7, 3)
        with torch.no_grad():
            self.inner.weight.mul_(0.5)

    def cell(self, state: torch.Tensor, injected: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(state) + injected)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        injected = self.inject(inputs)
        with torch.no_grad():
            state = torch.zeros_like(injected)
            for _ in range(60):
                state = self.cell(state, injected)
        state = self.cell(state, injected)
        if torch.is_grad_enabled():
            point = state.detach().requires_grad_()
            again = self.cell(point, injected.detach())

            def solve(gradient: torch.Tensor) -> torch.Tensor:
                solved = gradient
                for _ in range(60):
                    solved = torch.autograd.grad(again, point, solved, retain_graph=True)[0] + gradient
                return solved

            state.register_hook(solve)
        return self.head(state)


@program("a deep equilibrium model: a fixed point, whose gradient a hook solves for with autograd.grad")
def deep_equilibrium(run: Run) -> Values:
    model = Equilibrium()
    return trained(run, model, adam(model), steps=4)


class Adjoint(torch.autograd.Function):
    """Euler steps without a graph; the backward pass goes back through them and returns the weights' gradients."""

    @staticmethod
    def forward(ctx: Any, field: nn.Module, start: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.field, ctx.weights = field, weights
        states = [start]
        with torch.no_grad():
            for _ in range(4):
                states.append(states[-1] + 0.25 * field(states[-1]))
        ctx.states = states
        return states[-1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        totals = [torch.zeros_like(one) for one in ctx.weights]
        for state in reversed(ctx.states[:-1]):
            with torch.enable_grad():
                point = state.detach().requires_grad_()
                step = 0.25 * ctx.field(point)
                first, *others = torch.autograd.grad(step, [point, *ctx.weights], gradient)
            gradient = gradient + first
            totals = [total + one for total, one in zip(totals, others, strict=True)]
        return None, gradient, *totals


class Flow(nn.Module):
    """A neural ODE."""

    def __init__(self) -> None:
        super().__init__()
        self.field, self.head = perceptron(6, 6), nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(Adjoint.apply(self.field, inputs, *self.field.parameters()))


@program("a neural ODE by the adjoint method: weights are arguments of a Function, which returns their gradients")
def adjoint_method(run: Run) -> Values:
    model = Flow()
    return trained(run, model, adam(model), steps=4)


class Reversed(torch.autograd.Function):
    """A reversible block: inputs are computed anew from outputs, with a backward pass within the backward pass."""

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor, left: nn.Module, right: nn.Module) -> Any:
        with torch.no_grad():
            first = first + left(second)
            second = second + right(first)
        ctx.save_for_backward(first.detach(), second.detach())
        ctx.parts = left, right
        return first, second

    @staticmethod
    def backward(ctx: Any, of_first: torch.Tensor, of_second: torch.Tensor) -> Any:
        left, right = ctx.parts
        first, second = (one.clone().requires_grad_() for one in ctx.saved_tensors)
        with torch.enable_grad():
            moved = right(first)
        torch.autograd.backward(moved, of_second)
        of_first = of_first + first.grad
        before = (second.detach() - moved.detach()).requires_grad_()
        with torch.enable_grad():
            moved = left(before)
        torch.autograd.backward(moved, of_first)
        return of_first, of_second + before.grad, None, None


class Reversible(nn.Module):
    """RevNet: two streams."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 10), nn.Linear(10, 3)
        self.left, self.right = (
            nn.ModuleList(nn.Linear(5, 5) for _ in range(2)),
            nn.ModuleList(nn.Linear(5, 5) for _ in range(2)),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        first, second = self.stem(inputs).chunk(2, dim=-1)
        for left, right in zip(self.left, self.right, strict=True):
            first, second = Reversed.apply(first, second, left, right)
        return self.head(torch.cat([first, second], dim=-1))


@program("a reversible network: a Function whose backward runs backward passes of its own")
def reversible(run: Run) -> Values:
    model = Reversible()
    return trained(run, model, adam(model), steps=4)


@program(
    "DARTS: architecture weights by a finite difference along the gradient, weights moved and put back", has_union=False
)
def architecture_search(run: Run) -> Values:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.choices = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

        def forward(self, inputs: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
            return sum(part * torch.tanh(one(inputs)) for part, one in zip(mix.softmax(-1), self.choices, strict=True))

    model = Mixed()
    mix = torch.zeros(3, requires_grad=True)
    mixer = torch.optim.Adam([mix], lr=0.05)
    model, optimizer = run.wrap(model, sgd(model))
    weights = list(model.parameters())
    for inputs, targets in run.pairs(3):
        held, wanted = run.normal(4, 6), run.normal(4, 3)
        direct, *along = torch.autograd.grad(mse(run.module(model)(held, mix), wanted), [mix, *weights])
        along = [run.mean(one) for one in along]
        size = 0.01 / float(torch.cat([one.flatten() for one in along]).norm())
        ends = []
        for sign in (1, -2):
            for weight, one in zip(weights, along, strict=True):
                weight.data.add_(one, alpha=sign * size)
            ends += torch.autograd.grad(mse(run.module(model)(inputs, mix), targets), [mix])
        for weight, one in zip(weights, along, strict=True):
            weight.data.add_(one, alpha=size)
        mix.grad = run.mean(direct - 0.1 * (ends[0] - ends[1]) / (2 * size))
        mixer.step()
        optimizer.zero_grad()
        mse(model(inputs, mix), targets).backward()
        optimizer.step()
    return final(run, model, mix=mix)


class Hyper(nn.Module):
    """Makes the weights of another network of a description."""

    def __init__(self) -> None:
        super().__init__()
        self.task = nn.Parameter(torch.randn(5))
        self.maker = nn.Linear(5, 6 * 3 + 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        made = self.maker(torch.tanh(self.task))
        return nn.functional.linear(inputs, made[:18].view(3, 6), made[18:])


@program("a hypernetwork, whose outputs are the weights of the network that is trained")
def hypernetwork(run: Run) -> Values:
    model = Hyper()
    return trained(run, model, adam(model))


@program("saved tensors packed into half the bytes by hooks of the graph", tolerance=1e-5)
def packed_graph(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))

    def pack(saved: torch.Tensor) -> Any:
        return saved if isinstance(saved, nn.Parameter) else saved.float()

    for inputs, targets in run.pairs(3):
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.double()):
            loss = mse(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return final(run, model)


@program("saved tensors moved by save_on_cpu, and a hook on several gradients at once")
def several_hooks(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    seen = []
    watched = [one for one in model.parameters() if one.ndim > 1]
    handle = torch.autograd.graph.register_multi_grad_hook(watched, lambda found: seen.append(len(found)))
    for inputs, targets in run.pairs(3):
        optimizer.zero_grad()
        with torch.autograd.graph.save_on_cpu():
            loss = mse(model(inputs), targets)
        loss.backward()
        optimizer.step()
    handle.remove()
    return final(run, model, seen=seen)


@program("Hessian-free curvature: Hutchinson's trace by a second derivative of the weights, for a log")
def curvature_logged(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    generator = torch.Generator().manual_seed(3)
    traces = []
    for inputs, targets in run.pairs(3):
        weights = list(model.parameters())
        slopes = torch.autograd.grad(mse(run.module(model)(inputs), targets), weights, create_graph=True)
        signs = [torch.randint(2, one.shape, generator=generator) * 2.0 - 1 for one in weights]
        products = torch.autograd.grad(slopes, weights, signs)
        traces.append(float(run.mean(sum((v * hv).sum() for v, hv in zip(signs, products, strict=True)))))
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        optimizer.step()
    return final(run, model, traces=traces)


class Ensemble(nn.Module):
    """Several networks whose parameters are stacked, and which vmap calls at once."""

    def __init__(self, members: int) -> None:
        super().__init__()
        networks = [perceptron() for _ in range(members)]
        stacked, _ = torch.func.stack_module_state(networks)
        self.stacked = nn.ParameterDict({name.replace(".", "_"): nn.Parameter(one) for name, one in stacked.items()})
        self.names = list(stacked)
        self.__dict__["plan"] = copy.deepcopy(networks[0]).to("meta")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weights = {name: self.stacked[name.replace(".", "_")] for name in self.names}
        return torch.func.vmap(lambda one: torch.func.functional_call(self.plan, one, (inputs,)))(weights)


@program("an ensemble in stacked parameters, called by vmap of functional_call")
def stacked_ensemble(run: Run) -> Values:
    model = Ensemble(3)
    batches = [(inputs, targets.expand(3, -1, -1)) for inputs, targets in run.pairs(4)]
    return trained(run, model, adam(model), batches=batches)
