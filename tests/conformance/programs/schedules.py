"""Learning-rate schedules, made before or after the training is distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from declarations import program
from torch.optim import lr_scheduler

from programs.small import adam, final, mse, perceptron, sgd, train

if TYPE_CHECKING:
    from neutral_run import Run

Values = dict[str, Any]


def scheduled(run: Run, make: Any, *, steps: int = 6, optimizer_of: Any = sgd) -> Values:
    """Train with the scheduler that ``make`` returns for the distributed optimizer, stepped after each step."""
    model = perceptron()
    model, optimizer = run.wrap(model, optimizer_of(model))
    scheduler = make(optimizer)
    rates = []

    def after_step(_: int) -> None:
        scheduler.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))

    losses = train(run, model, optimizer, steps=steps, after_step=after_step)
    return final(run, model, losses=losses, rates=rates, last=[float(rate) for rate in scheduler.get_last_lr()])


@program("StepLR")
def step_lr(run: Run) -> Values:
    return scheduled(run, lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5))


@program("MultiStepLR and ExponentialLR, chained")
def chained_schedulers(run: Run) -> Values:
    return scheduled(
        run,
        lambda optimizer: lr_scheduler.ChainedScheduler(
            [lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        ),
    )


@program("OneCycleLR, which changes momentum too")
def one_cycle(run: Run) -> Values:
    return scheduled(
        run,
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=8),
        optimizer_of=lambda model: sgd(model, momentum=0.9),
    )


@program("OneCycleLR with Adam, which changes betas")
def one_cycle_adam(run: Run) -> Values:
    return scheduled(
        run, lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=8), optimizer_of=adam
    )


@program("CyclicLR")
def cyclic(run: Run) -> Values:
    return scheduled(
        run,
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2),
        optimizer_of=lambda model: sgd(model, momentum=0.5),
    )


@program("CosineAnnealingLR")
def cosine(run: Run) -> Values:
    return scheduled(run, lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=5), optimizer_of=adam)


@program("CosineAnnealingWarmRestarts")
def warm_restarts(run: Run) -> Values:
    return scheduled(run, lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3))


@program("LambdaLR")
def lambda_lr(run: Run) -> Values:
    return scheduled(run, lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)))


@program("SequentialLR: linear warm-up, then cosine")
def sequential(run: Run) -> Values:
    def make(optimizer: Any) -> Any:
        warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
        return lr_scheduler.SequentialLR(
            optimizer, [warm_up, lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)], milestones=[3]
        )

    return scheduled(run, make)


@program("ReduceLROnPlateau, told the loss averaged over ranks")
def reduce_on_plateau(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model, lr=1.0))
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    rates = []
    for inputs, targets in run.pairs(8):
        optimizer.zero_grad()
        loss = mse(model(inputs), targets)
        loss.backward()
        optimizer.step()
        scheduler.step(float(run.mean(loss)))
        rates.append(optimizer.param_groups[0]["lr"])
    return final(run, model, rates=rates)


@program("a scheduler made with the plain optimizer, before distributing")
def scheduler_before(run: Run) -> Values:
    model = perceptron()
    optimizer = adam(model)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    model, optimizer = run.wrap(model, optimizer)
    return final(
        run,
        model,
        losses=train(run, model, optimizer, after_step=lambda _: scheduler.step()),
        last=scheduler.get_last_lr(),
    )


@program("a scheduler's state saved and loaded into a new one")
def scheduler_state(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, sgd(model))
    first = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    losses = train(run, model, optimizer, steps=3, after_step=lambda _: first.step())
    second = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    second.load_state_dict(first.state_dict())
    losses += train(run, model, optimizer, steps=3, after_step=lambda _: second.step())
    return final(run, model, losses=losses, last=second.get_last_lr())


@program("rates by a function of the step, written into the groups before each step")
def rates_by_function(run: Run) -> Values:
    model = perceptron()
    model, optimizer = run.wrap(model, adam(model))
    for step, (inputs, targets) in enumerate(run.pairs(6)):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1.0, (step + 1) / 4)
        mse(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return final(run, model)
