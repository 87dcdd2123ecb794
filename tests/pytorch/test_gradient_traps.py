"""What training loops do to gradients: accumulate, clip, scale, drop, recompute, leave out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle_models import CASES, copies, loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from syncline.errors import SynclineWarning, UpdateError
from syncline.pytorch.control import batch_size, clip_grad_norm_, no_sync, synchronize
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.optimizer import DistributedOptimizer
from syncline.updates import AllReduce, LocalSteps, Sharded, UpdateRule

RULES: list[UpdateRule] = [Sharded(bucket_bytes=1000), AllReduce(bucket_bytes=1000)]
by_rule = pytest.mark.parametrize("rule", RULES, ids=["sharded", "all_reduce"])
Loop = Callable[[nn.Module, torch.optim.Optimizer, list[tuple[torch.Tensor, torch.Tensor]]], Any]
PARTS = [3, 5]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def check_like_one_process(
    run_fleets: Any,
    rule: UpdateRule,
    together: Loop,
    alone: Loop,
    *,
    model: nn.Module | None = None,
    make: Callable[[nn.Module], torch.optim.Optimizer] = adam,
) -> list[Any]:
    """Run ``together`` on two ranks and ``alone`` on the union of their batches, and compare the parameters."""
    template = CASES["perceptron"].make() if model is None else model
    batches = CASES["perceptron"].batches(4, sum(PARTS))
    models = copies(template, 2)
    expected = alone(template, make(template), batches)

    def body(fleet: Fleet) -> Any:
        own, optimizer = distribute(models[fleet.rank], make(models[fleet.rank]), rule, samples="batch", fleet=fleet)
        pieces = [(x.split(PARTS)[fleet.rank], y.split(PARTS)[fleet.rank]) for x, y in batches]
        result = together(own, optimizer, pieces)
        optimizer.synchronize()
        return result

    results = run_fleets(2, body)
    for other in models:
        for name, value in template.named_parameters():
            torch.testing.assert_close(other.state_dict()[name], value.detach(), rtol=1e-11, atol=1e-12, msg=name)
    assert all(result == pytest.approx(expected, rel=1e-9) for result in results if result is not None)
    return results


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for inputs, targets in batches:
        loss_of(model, inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()


class _Breaking(torch.autograd.Function):
    """Lets gradients through, or raises as a backward pass does that finds no memory."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, is_broken: bool) -> torch.Tensor:
        ctx.is_broken = is_broken
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.is_broken:
            raise MemoryError("no memory")
        return gradient, None


class _Fragile(nn.Module):
    """Raises where ``breaks`` says so: in its forward pass, or in its backward pass behind the last layer or before."""

    def __init__(self) -> None:
        super().__init__()
        layers = CASES["perceptron"].make()
        self.first, self.last = nn.Sequential(*list(layers)[:-1]), list(layers)[-1]
        self.breaks = ""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = _Breaking.apply(self.first(values), self.breaks == "middle")  # type: ignore[no-untyped-call]
        if self.breaks == "forward":
            raise MemoryError("no memory")
        return _Breaking.apply(self.last(hidden), self.breaks == "end")  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("place", ["forward", "end", "middle"])
@by_rule
def test_a_batch_that_breaks_can_be_left_out(rule: UpdateRule, place: str, run_fleets: Any) -> None:
    def together(model: Any, optimizer: torch.optim.Optimizer, batches: Any) -> None:
        # before anything was exchanged one rank alone may go on with its next batch
        if place == "middle" or len(batches[0][0]) == PARTS[0]:
            model.breaks = place
            with pytest.raises(MemoryError):
                loss_of(model, *batches[0]).backward()
            model.breaks = ""  # and what the pass has brought is dropped, without zero_grad()
        plain(model, optimizer, batches[1:])

    def alone(model: Any, optimizer: torch.optim.Optimizer, batches: Any) -> None:
        plain(model, optimizer, batches[1:])

    check_like_one_process(run_fleets, rule, together, alone, model=_Fragile().double())


@pytest.mark.parametrize(
    "rule", [Sharded(bucket_bytes=100), AllReduce(bucket_bytes=100)], ids=["sharded", "all_reduce"]
)
def test_a_backward_pass_that_breaks_when_gradients_have_left_is_told(rule: UpdateRule, run_fleets: Any) -> None:
    models = copies(_Fragile().double(), 2)
    of_both = CASES["perceptron"].batches(8, 4)

    def body(fleet: Fleet) -> None:
        batches = of_both[fleet.rank :: 2]
        model, optimizer = distribute(models[fleet.rank], adam(models[fleet.rank]), rule, samples="batch", fleet=fleet)
        plain(model, optimizer, batches[:2])
        model.breaks = "middle"
        with pytest.raises(MemoryError):
            loss_of(model, *batches[2]).backward()
        model.breaks = ""
        optimizer.zero_grad()
        for _ in range(2):
            with pytest.raises(UpdateError, match="did not come to its end"):
                loss_of(model, *batches[3]).backward()

    run_fleets(2, body)


@by_rule
def test_accumulation_under_no_sync(rule: UpdateRule, run_fleets: Any) -> None:
    def together(model: nn.Module, optimizer: DistributedOptimizer, batches: Any) -> None:
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            with no_sync(model):
                (loss_of(model, *first) / 2).backward()
            (loss_of(model, *second) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()

    def alone(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            (loss_of(model, *first) / 2).backward()
            (loss_of(model, *second) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()

    check_like_one_process(run_fleets, rule, together, alone)


@by_rule
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("how", ["optimizer", "model", "torch"])
def test_clipping(rule: UpdateRule, norm_type: float, how: str, run_fleets: Any) -> None:
    def clip(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        if how == "torch" or not isinstance(optimizer, DistributedOptimizer):
            return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
        if how == "model":
            return clip_grad_norm_(model, 0.1, norm_type)
        return optimizer.clip_grad_norm_(0.1, norm_type)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> list[float]:
        norms = []
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            norms.append(float(clip(model, optimizer)))
            optimizer.step()
        return norms

    check_like_one_process(
        run_fleets, rule, loop, loop, make=lambda model: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    )


@by_rule
def test_grad_scaler_skips_on_all_ranks_together(rule: UpdateRule, run_fleets: Any) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step, (inputs, targets) in enumerate(batches):
            loss = loss_of(model, inputs, targets)
            if step == 1 and len(inputs) != PARTS[0]:  # an infinity on one of the ranks alone
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if step == 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return scaler.get_scale()

    assert check_like_one_process(run_fleets, rule, loop, loop) == [512.0, 512.0]


@by_rule
def test_a_scaler_meets_a_parameter_without_elements(rule: UpdateRule, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> list[float]:
        model = nn.ParameterList([torch.zeros(0), torch.ones(2)])
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), rule, fleet=fleet)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(sum(one.sum() for one in model)).backward()
        scaler.step(optimizer)
        optimizer.synchronize()
        return list(map(float, model[1].detach()))

    assert run_fleets(2, body) == [[0.0, 0.0]] * 2


@by_rule
def test_the_norm_of_complex_gradients_is_real(rule: UpdateRule, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> list[torch.Tensor]:
        model = nn.ParameterList([torch.tensor([3j, 4.0])])
        distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), rule, fleet=fleet)
        (model[0].abs().square().sum() / 2).backward()
        return [model[0].grad.norm(), torch.linalg.vector_norm(model[0].grad)]

    for norms in run_fleets(2, body):
        assert [(norm.dtype, float(norm)) for norm in norms] == [(torch.float32, 5.0)] * 2


@by_rule
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_the_model(rule: UpdateRule, set_to_none: bool, run_fleets: Any) -> None:
    def together(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
        for inputs, targets in batches:
            model.zero_grad(set_to_none=set_to_none)
            loss_of(model, inputs, targets).backward()
            optimizer.step()

    check_like_one_process(run_fleets, rule, together, plain)


@by_rule
@pytest.mark.parametrize("by_model", [True, False])
def test_gradients_that_are_dropped(rule: UpdateRule, by_model: bool, run_fleets: Any) -> None:
    def together(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
        for inputs, targets in batches:
            loss_of(model, inputs + 1, targets).backward()
            model.zero_grad() if by_model else optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    check_like_one_process(run_fleets, rule, together, plain)


class Checkpointed(nn.Module):
    """Its inner layers run again in the backward pass; the shared one is used twice."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.shared, self.last = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        for _ in range(2):
            hidden = torch.tanh(checkpoint(self.shared, hidden, use_reentrant=self.use_reentrant))
        return self.last(hidden)


@by_rule
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpoints(rule: UpdateRule, use_reentrant: bool, run_fleets: Any) -> None:
    torch.manual_seed(3)
    model = Checkpointed(use_reentrant=use_reentrant).double()
    check_like_one_process(run_fleets, rule, plain, plain, model=model)


@by_rule
def test_weights_that_the_user_tells(rule: UpdateRule, run_fleets: Any) -> None:
    def together(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
        for inputs, targets in batches:
            # the padding counts as samples for the model, but not for the loss
            padded = torch.cat([inputs, torch.zeros(4, 6).double()])
            batch_size(len(inputs), model)
            ((model(padded)[: len(inputs)] - targets) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    check_like_one_process(run_fleets, rule, together, plain)


def test_samples_counted_by_a_function(run_fleets: Any) -> None:
    template = CASES["perceptron"].make()
    models = copies(template, 2)
    inputs, targets = CASES["perceptron"].batches(1, 8)[0]

    def body(fleet: Fleet) -> torch.Tensor:
        model = models[fleet.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, wrapped = distribute(model, optimizer, samples=lambda batch: 1.0, fleet=fleet)
        loss_of(model, inputs.split(PARTS)[fleet.rank], targets.split(PARTS)[fleet.rank]).backward()
        wrapped.step()
        synchronize(model)
        return next(model.parameters()).detach()

    for x, y in zip(inputs.split(PARTS), targets.split(PARTS), strict=True):
        (loss_of(template, x, y) / 2).backward()
    first = next(template.parameters())
    for found in run_fleets(2, body):
        torch.testing.assert_close(found, first.detach() - first.grad, rtol=1e-12, atol=1e-13)


@by_rule
def test_backward_of_a_penalty_does_not_begin_a_step(rule: UpdateRule, run_fleets: Any) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
        for inputs, targets in batches:
            asked = inputs.clone().requires_grad_()
            outputs = model(asked)
            (slope,) = torch.autograd.grad(outputs.sum(), asked, create_graph=True)
            (((outputs - targets) ** 2).mean() + slope.pow(2).sum(1).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

    check_like_one_process(run_fleets, rule, loop, loop)


def run_pair(
    run_fleets: Any, rule: UpdateRule, body: Callable[[nn.Module, DistributedOptimizer, torch.Tensor], Any]
) -> Any:
    """Run ``body`` on two ranks with a small model."""
    models = copies(CASES["perceptron"].make(), 2)

    def main(fleet: Fleet) -> Any:
        model, optimizer = distribute(models[fleet.rank], adam(models[fleet.rank]), rule, fleet=fleet)
        return body(model, optimizer, torch.ones(2, 6).double())

    return run_fleets(2, main)


@by_rule
def test_step_after_local_gradients_alone_is_refused(rule: UpdateRule, run_fleets: Any) -> None:
    def body(model: nn.Module, optimizer: DistributedOptimizer, inputs: torch.Tensor) -> None:
        with optimizer.no_sync():
            model(inputs).sum().backward()
        with pytest.raises(UpdateError, match="no_sync"):
            optimizer.step()

    run_pair(run_fleets, rule, body)


def test_whole_gradients_are_refused_with_a_remedy(run_fleets: Any) -> None:
    def body(model: nn.Module, optimizer: DistributedOptimizer, inputs: torch.Tensor) -> None:
        model(inputs).sum().backward()
        gradient = next(model.parameters()).grad
        assert gradient is not None
        with pytest.raises(UpdateError, match="AllReduce"):
            gradient.abs()
        assert "divided" in repr(gradient)
        optimizer.step()

    run_pair(run_fleets, RULES[0], body)


def test_gradients_of_the_users_own_are_refused_where_the_step_would_not_see_them(run_fleets: Any) -> None:
    def body(model: nn.Module, optimizer: DistributedOptimizer, inputs: torch.Tensor) -> None:
        model(inputs).sum().backward()
        first = next(model.parameters())
        first.grad = torch.zeros_like(first)
        with pytest.raises(UpdateError, match="was replaced after backward"):
            optimizer.step()
        optimizer.zero_grad()

    run_pair(run_fleets, RULES[0], body)


@by_rule
def test_a_step_without_samples_anywhere_warns(rule: UpdateRule, run_fleets: Any) -> None:
    warned: list[str] = []

    def body(model: nn.Module, optimizer: DistributedOptimizer, inputs: torch.Tensor) -> None:
        try:
            optimizer.step()
            optimizer.synchronize()
        except SynclineWarning as warning:  # which are errors in tests; not every rank warns
            warned.append(str(warning))
        raise KeyError("the end")

    with pytest.raises(KeyError):
        run_pair(run_fleets, rule, body)
    assert any("no gradient reached a parameter" in text for text in warned)


def test_graph_kept_over_a_step_is_refused_by_autograd(run_fleets: Any) -> None:
    def body(model: nn.Module, optimizer: DistributedOptimizer, inputs: torch.Tensor) -> None:
        outputs = model(inputs)
        outputs.sum().backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            outputs.sum().backward()
        raise KeyError("the end")  # a broken backward pass ends the training

    with pytest.raises(KeyError):
        run_pair(run_fleets, RULES[0], body)


def test_gradients_of_a_copy_are_its_own(run_fleets: Any) -> None:
    def body(model: nn.Module, optimizer: DistributedOptimizer, inputs: torch.Tensor) -> bool:
        twin = copy.deepcopy(model)
        twin(inputs).sum().backward()
        return all(parameter.grad is not None for parameter in twin.parameters())

    assert run_pair(run_fleets, RULES[0], body) == [True, True]


def clip_by_rows(parameter: nn.Parameter) -> None:
    """Adaptive gradient clipping: each row by its own norm, against that of the parameter's row."""
    assert parameter.grad is not None
    norms = parameter.grad.norm(dim=1, keepdim=True)
    most = parameter.detach().norm(dim=1, keepdim=True) * 0.01
    parameter.grad.detach().mul_((most / norms).clamp(max=1.0))


def clip_by_parameter(parameter: nn.Parameter) -> None:
    """Adaptive gradient clipping of whole parameters."""
    assert parameter.grad is not None
    most = parameter.detach().norm() * 0.01
    parameter.grad.detach().mul_((most / parameter.grad.norm()).clamp(max=1.0))


REFUSED_CHANGES: dict[str, Callable[[nn.Parameter], object]] = {
    "norms of rows": clip_by_rows,
    "a factor for each row": lambda p: p.grad.mul_(torch.ones(len(p), 1)),  # type: ignore[union-attr]
    "a divisor for each row": lambda p: p.grad.div_(torch.ones(len(p), 1)),  # type: ignore[union-attr]
    "a bound for each row": lambda p: p.grad.clamp_(max=torch.ones(len(p), 1)),  # type: ignore[union-attr]
    "noise": lambda p: p.grad.add_(torch.randn_like(p)),  # type: ignore[union-attr]
    "noise of its own shape": lambda p: torch.randn_like(p.grad),  # type: ignore[arg-type]
    "another gradient": lambda p: p.grad.copy_(torch.ones_like(p)),  # type: ignore[union-attr]
    "its mean": lambda p: p.grad.mean(dim=1, keepdim=True),  # type: ignore[union-attr]
    "its sign": lambda p: p.grad.sign_(),  # type: ignore[union-attr]
    "a number": lambda p: p.grad.norm().item() and p.grad.tolist(),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("change", REFUSED_CHANGES.values(), ids=REFUSED_CHANGES.keys())
def test_what_no_rank_can_do_alone_is_refused_by_name(
    change: Callable[[nn.Parameter], object], run_fleets: Any
) -> None:
    def body(fleet: Fleet) -> None:
        model = nn.Linear(3, 2, bias=False)
        model, _ = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), Sharded(), fleet=fleet)
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(UpdateError, match=r"needs a whole gradient.*Sharded\(\).*update=AllReduce\(\)"):
            change(model.weight)

    run_fleets(1, body)


def test_within_another_rule_the_remedy_keeps_that_rule(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        model = nn.Linear(3, 2, bias=False)
        rule = LocalSteps(parties=0, within=Sharded())
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), rule, fleet=fleet)
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(
            UpdateError, match=r"needs a whole gradient.* within=AllReduce\(\), if Sharded\(\) is within"
        ):
            model.weight.grad.mean()
        model.weight.grad = torch.ones(2, 3)
        with pytest.raises(UpdateError, match=r"was replaced after backward.* within=AllReduce\(\), if Sharded\(\) is"):
            optimizer.step()

    run_fleets(2, body)


@by_rule
def test_clipping_each_parameter_by_its_own_norm(rule: UpdateRule, run_fleets: Any) -> None:
    """Also what loops log: the norms of parameters, and torch's total norm, as they are with whole gradients."""

    def body(fleet: Fleet) -> list[float]:
        model = nn.Linear(3, 2, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.arange(6.0).view(2, 3))
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), rule, fleet=fleet)
        model(torch.ones(2, 3) * (1 + fleet.rank)).square().sum().backward()
        assert model.weight.grad is not None
        norms = [float(norm) for norm in (model.weight.grad.norm(), torch.norm(model.weight.grad))]
        norms.append(float(torch.nn.utils.get_total_norm([model.weight.grad])))
        clip_by_parameter(model.weight)
        optimizer.step()
        return [*norms, *model.weight.detach().flatten().tolist()]

    plain = torch.arange(6.0).view(2, 3).requires_grad_()
    sum((torch.ones(2, 3) * (1 + rank) @ plain.T).square().sum() for rank in range(2)).div(2).backward()  # type: ignore[union-attr]
    assert plain.grad is not None
    norm = plain.grad.norm()
    wanted = plain.detach() - plain.grad * (plain.detach().norm() * 0.01 / norm)
    for found in run_fleets(2, body):
        assert found == pytest.approx([*[float(norm)] * 3, *wanted.flatten().tolist()], rel=1e-5)
