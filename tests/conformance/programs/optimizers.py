"""Every optimizer of torch.optim in the plain loop, and what people do with parameter groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from declarations import program
from torch import nn, optim

from programs.small import adam, final, mse, perceptron, sgd, train, trained

if TYPE_CHECKING:
    from neutral_run import Run

Values = dict[str, Any]
WHOLE = 'align="parameter"'


@program("SGD", worlds=(2, 3))
def sgd_plain(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, sgd(model))


@program("SGD with momentum, weight decay and dampening", worlds=(2, 3))
def sgd_momentum(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, sgd(model, momentum=0.9, weight_decay=0.01, dampening=0.1))


@program("SGD with Nesterov momentum")
def sgd_nesterov(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, sgd(model, momentum=0.9, nesterov=True))


@program("SGD that maximises")
def sgd_maximize(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, sgd(model, lr=0.01, maximize=True))


@program("Adam", worlds=(2, 3))
def adam_plain(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, adam(model))


@program("Adam with amsgrad and weight decay")
def adam_amsgrad(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, adam(model, amsgrad=True, weight_decay=0.01))


@program("AdamW")
def adamw(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1))


@program("RMSprop, centred, with momentum")
def rmsprop(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9, centered=True))


@program("Adagrad")
def adagrad(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, optim.Adagrad(model.parameters(), lr=0.05, lr_decay=0.01))


@program("NAdam")
def nadam(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, optim.NAdam(model.parameters(), lr=0.01))


@program("RAdam")
def radam(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, optim.RAdam(model.parameters(), lr=0.01), steps=9)


@program("Adadelta")
def adadelta(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, optim.Adadelta(model.parameters()))


@program("Adamax")
def adamax(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, optim.Adamax(model.parameters(), lr=0.01))


@program("ASGD")
def asgd(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, optim.ASGD(model.parameters(), lr=0.05, t0=2))


@program("Rprop")
def rprop(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, optim.Rprop(model.parameters(), lr=0.01))


@program("Adafactor, which looks at whole matrices", refused_by_sharded=WHOLE)
def adafactor(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, optim.Adafactor(model.parameters(), lr=0.01))


@program("Muon for matrices and AdamW for the rest: two optimizers of one model", refused_by_sharded=WHOLE)
def muon(run: Run) -> Values:
    model = perceptron()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    model, optimizers = run.wrap(model, [optim.Muon(matrices, lr=0.01), optim.AdamW(others, lr=0.01)])
    for inputs, targets in run.pairs(5):
        for one in optimizers:
            one.zero_grad()
        mse(model(inputs), targets).backward()
        for one in optimizers:
            one.step()
    return final(run, model)


@program("LBFGS with a closure, no line search", refused_by_sharded="AllReduce", has_union=True)
def lbfgs(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, optim.LBFGS(model.parameters(), lr=0.1, max_iter=4))
    losses = []
    for inputs, targets in run.pairs(3):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = mse(model(inputs), targets)  # noqa: B023 - called within this turn of the loop
            loss.backward()
            return loss

        losses.append(float(run.mean(optimizer.step(closure))))
    return final(run, model, losses=losses)


@program("LBFGS with a strong Wolfe line search; the closure averages its loss", refused_by_sharded="AllReduce")
def lbfgs_wolfe(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(
        model, optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
    )
    for inputs, targets in run.pairs(2, size=12):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = mse(model(inputs), targets)  # noqa: B023
            loss.backward()
            return run.mean(loss)

        optimizer.step(closure)
    return final(run, model)


@program("SGD with a closure given to step()")
def sgd_closure(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model, momentum=0.9))
    losses = []
    for inputs, targets in run.pairs(4):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = mse(model(inputs), targets)  # noqa: B023
            loss.backward()
            return loss

        losses.append(float(run.mean(optimizer.step(closure))))
    return final(run, model, losses=losses)


@program("SparseAdam on a sparse embedding", refused_by_sharded="AllReduce")
def sparse_adam(run: Run) -> Values:
    model = nn.Embedding(13, 5, sparse=True)
    model, optimizer = run.wrap(model, optim.SparseAdam(model.parameters(), lr=0.05))
    for _ in range(4):
        optimizer.zero_grad()
        model(run.integers(13, 6)).square().mean().backward()
        optimizer.step()
    return {"weight": run.module(model).weight}


@program("parameter groups with rates and weight decays of their own, none for biases", worlds=(2, 3))
def parameter_groups(run: Run) -> Values:
    model = perceptron()
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
    return trained(run, model, optim.AdamW(groups, lr=0.01))


@program("a group for each parameter, with rates that fall by layer")
def rate_by_layer(run: Run) -> Values:
    model = perceptron()
    groups = [{"params": [one], "lr": 0.1 * 0.8**number} for number, one in enumerate(model.parameters())]
    return trained(run, model, optim.SGD(groups, lr=0.1, momentum=0.5))


@program("rates of groups changed by hand in the middle")
def rates_changed_by_hand(run: Run) -> Values:
    model = perceptron()
    groups = [{"params": model[0].parameters()}, {"params": [*model[2].parameters(), *model[4].parameters()]}]
    model, optimizer = run.wrap(model, optim.Adam(groups, lr=0.01))

    def change(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
        optimizer.param_groups[1]["betas"] = (0.9 - 0.1 * step / 6, 0.99)

    return final(run, model, losses=train(run, model, optimizer, after_step=change))


@program("rates changed on the user's own optimizer object")
def rates_changed_on_the_old_optimizer(run: Run) -> Values:
    model = perceptron()
    own = sgd(model, momentum=0.9)
    model, optimizer = run.wrap(model, own)

    def change(step: int) -> None:
        for group in own.param_groups:
            group["lr"] = 0.1 / (step + 1)

    return final(run, model, losses=train(run, model, optimizer, after_step=change))


@program("a learning rate of 0")
def rate_zero(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, sgd(model, lr=0.0, momentum=0.9), steps=3)


@program("a learning rate that is a tensor")
def rate_as_tensor(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, adam(model, lr=torch.tensor(0.01), foreach=False), steps=4)


@program("foreach=True")
def foreach(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, adam(model, foreach=True))


@program("fused=True")
def fused(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, adam(model, fused=True))


class SignDescent(optim.Optimizer):
    """An optimizer of the user's own: the sign of a moving average."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 0.3)
                parameter.sub_(average.sign(), alpha=group["lr"])


@program("an optimizer of the user's own", refused_by_sharded=WHOLE)
def own_optimizer(run: Run) -> Values:
    model = perceptron()
    return trained(run, model, SignDescent(model.parameters(), lr=0.01))


@program("an optimizer whose state is read by parameter after training", refused_by_sharded="AllReduce")
def state_by_parameter(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    train(run, model, optimizer, steps=3)
    first = next(iter(run.module(model).parameters()))
    return final(run, model, moment=optimizer.state[first]["exp_avg"] * 1.0)


@program("two optimizers, each with its own part of the model")
def two_optimizers(run: Run) -> Values:
    model = perceptron()
    parts = [adam(model[0]), optim.SGD([*model[2].parameters(), *model[4].parameters()], lr=0.1)]
    model, optimizers = run.wrap(model, parts)
    for inputs, targets in run.pairs(5):
        mse(model(inputs), targets).backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
    return final(run, model)


@program("two optimizers that take turns: generator-like alternation on one model", has_union=True)
def two_optimizers_take_turns(run: Run) -> Values:
    model = perceptron()
    parts = [sgd(model[0]), optim.SGD([*model[2].parameters(), *model[4].parameters()], lr=0.1)]
    model, optimizers = run.wrap(model, parts)
    for step, (inputs, targets) in enumerate(run.pairs(6)):
        model.zero_grad()
        mse(model(inputs), targets).backward()
        optimizers[step % 2].step()
    return final(run, model)


@program("param_groups printed, counted and searched while training")
def groups_are_read(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    counts = []

    def count(_: int) -> None:
        counts.append(sum(one.numel() for group in optimizer.param_groups for one in group["params"]))
        assert "lr" in repr(optimizer)

    train(run, model, optimizer, steps=3, after_step=count)
    return final(run, model, counts=counts)
