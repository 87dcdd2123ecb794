"""What a program put on its own optimizer, or on its class, is called by every rule as in one process, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from syncline.errors import UpdateError
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.updates import AllReduce, Clustered, LocalSteps, Overlapped, Sharded, UpdateRule

RULES = [Sharded(), Sharded(overlap_forward=True), AllReduce(), LocalSteps(), Overlapped(rule="swap"), Clustered()]
NAMES = ["sharded", "sharded-overlap", "all_reduce", "local_steps", "overlapped", "clustered"]
by_rule = pytest.mark.parametrize("rule", RULES, ids=NAMES)
Put = Callable[[torch.optim.Optimizer, list[str]], None]
NUM_STEPS = 3


def perceptron() -> nn.Module:
    """The same on every rank; ranks are threads, which share torch's generator."""
    model, values = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=values) / 2)
    return model


def loop(model: nn.Module, optimizer: Any, calls: list[str], part: tuple[int, int] = (0, 1)) -> list[torch.Tensor]:
    """Train on ``part`` of each batch: its number, and of how many."""
    place, of = part
    for number in range(NUM_STEPS):
        calls.append(f"pass {number}")
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
        model(batch.chunk(of)[place]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def check(rule: UpdateRule, put: Put, run_fleets: Any, *, after: bool = False, num_ranks: int = 1) -> None:
    """The loop calls what ``put`` put there, and gives the parameters, that it gives without Syncline."""

    def body(fleet: Fleet) -> None:
        model, alone, seen, expected = perceptron(), perceptron(), list[str](), list[str]()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
        if not after:
            put(inner, seen)
        model, optimizer = distribute(model, inner, rule, fleet=fleet)
        put(plain, expected)
        if after:
            put(inner, seen)
        wanted = loop(alone, plain, expected)
        for value, right in zip(loop(model, optimizer, seen, (fleet.rank, num_ranks)), wanted, strict=True):
            torch.testing.assert_close(value, right)
        assert seen == expected
        assert len(seen) > NUM_STEPS

    run_fleets(num_ranks, body)


def replaced_step(optimizer: torch.optim.Optimizer, calls: list[str]) -> None:
    old = optimizer.step

    def step(*arguments: Any, **named: Any) -> Any:
        calls.append("before")
        optimizer.param_groups[0]["lr"] *= 0.5
        loss = old(*arguments, **named)
        calls.append("after")
        return loss

    optimizer.step = step  # type: ignore[method-assign]


def skipping_step(optimizer: torch.optim.Optimizer, calls: list[str]) -> None:
    """A step that is made now and then: gradients of the others were cleared."""
    old = optimizer.step

    def step() -> None:
        if len(calls) > 1:
            calls.append("stepped")
            old()

    optimizer.step = step  # type: ignore[assignment, method-assign]


def hooked_step(optimizer: torch.optim.Optimizer, calls: list[str]) -> None:
    optimizer.register_step_pre_hook(lambda one, *_: calls.append(f"pre {type(one).__name__}"))
    optimizer.register_step_post_hook(lambda one, *_: calls.append(f"post {type(one).__name__}"))


def scheduler_and_replaced_step(optimizer: torch.optim.Optimizer, calls: list[str]) -> None:
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    replaced_step(optimizer, calls)


def replaced_zero_grad(optimizer: torch.optim.Optimizer, calls: list[str]) -> None:
    old = optimizer.zero_grad

    def zero_grad(*arguments: Any, **named: Any) -> None:
        calls.append("cleared")
        old(*arguments, **named)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


@by_rule
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "put", [replaced_step, skipping_step, hooked_step, scheduler_and_replaced_step, replaced_zero_grad]
)
def test_what_is_put_on_an_optimizer_is_called(rule: UpdateRule, put: Put, after: bool, run_fleets: Any) -> None:
    check(rule, put, run_fleets, after=after)


@pytest.mark.parametrize("rule", RULES[:3], ids=NAMES[:3])
def test_it_is_called_on_every_rank(rule: UpdateRule, run_fleets: Any) -> None:
    check(rule, replaced_step, run_fleets, num_ranks=2)


@pytest.mark.parametrize("rule", RULES[:3], ids=NAMES[:3])
def test_a_zero_grad_that_keeps_gradients_lets_them_add_up(rule: UpdateRule, run_fleets: Any) -> None:
    def put(optimizer: torch.optim.Optimizer, calls: list[str]) -> None:
        optimizer.zero_grad = lambda: calls.append("kept")  # type: ignore[assignment, method-assign, misc]

    check(rule, put, run_fleets)


@by_rule
def test_hooks_on_all_optimizers_are_called_once_a_step(rule: UpdateRule, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        model, calls = perceptron(), list[str]()
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), rule, fleet=fleet)
        handles = [
            register_optimizer_step_pre_hook(lambda *_: calls.append("pre")),
            register_optimizer_step_post_hook(lambda *_: calls.append("post")),
        ]
        try:
            loop(model, optimizer, calls)
        finally:
            for handle in handles:
                handle.remove()
        assert calls == [what for number in range(NUM_STEPS) for what in (f"pass {number}", "pre", "post")]

    run_fleets(1, body)


@pytest.mark.parametrize("rule", RULES[:3], ids=NAMES[:3])
def test_a_closure_gives_its_loss_through_a_replaced_step(rule: UpdateRule, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        model, calls = perceptron(), list[str]()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        replaced_step(inner, calls)
        model, optimizer = distribute(model, inner, rule, fleet=fleet)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(NUM_STEPS)]
        assert losses == sorted(losses, reverse=True)
        assert calls == ["before", "after"] * NUM_STEPS

    run_fleets(1, body)


@pytest.mark.parametrize("rule", RULES[:3], ids=NAMES[:3])
def test_the_state_goes_through_what_was_replaced_and_hooked(rule: UpdateRule, run_fleets: Any) -> None:
    """Also where a wrapper that was made before ``distribute()`` asks the optimizer that it holds."""

    def body(fleet: Fleet) -> None:
        model = perceptron()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        old_state, old_load, seen = inner.state_dict, inner.load_state_dict, []
        inner.state_dict = lambda: {**old_state(), "mine": 7}  # type: ignore[method-assign]

        def load_state_dict(state: Any) -> None:
            seen.append(state["mine"])
            old_load({key: value for key, value in state.items() if key != "mine"})

        inner.load_state_dict = load_state_dict  # type: ignore[assignment, method-assign]
        inner.register_state_dict_post_hook(lambda _, state: {**state, "size": len(state["state"])})
        model, optimizer = distribute(model, inner, rule, fleet=fleet)
        loop(model, optimizer, [], (fleet.rank, 2))
        state = copy.deepcopy(optimizer.state_dict())
        assert (state["mine"], state["size"]) == (7, 4)
        assert state["state"][0]["momentum_buffer"].shape == (5, 4)
        torch.testing.assert_close(inner.state_dict()["state"], state["state"])
        loop(model, optimizer, [], (fleet.rank, 2))
        optimizer.load_state_dict(state)
        torch.testing.assert_close(optimizer.state_dict()["state"], state["state"])
        assert seen == [7]

    run_fleets(2, body)


def test_a_step_of_a_class_of_the_users_that_was_replaced_on_the_instance_is_refused(run_fleets: Any) -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    def body(fleet: Fleet) -> None:
        model = perceptron()
        inner = Own(model.parameters(), lr=0.1)
        model, optimizer = distribute(model, inner, Sharded(align="parameter"), fleet=fleet)
        replaced_step(inner, [])
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(UpdateError, match=r"replaced on this Own.*put the change into the class.*AllReduce\(\)"):
            optimizer.step()

    run_fleets(1, body)


@pytest.mark.parametrize("after", [False, True])
def test_a_step_that_was_replaced_on_a_class_is_refused_by_sharded(
    after: bool, monkeypatch: pytest.MonkeyPatch, run_fleets: Any
) -> None:
    old = torch.optim.SGD.step

    def body(fleet: Fleet) -> None:
        model = perceptron()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        if not after:
            monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure=None: old(self, closure))
            with pytest.raises(UpdateError, match=r"SGD.step was replaced on its class.*AllReduce\(\)"):
                distribute(model, inner, Sharded(), fleet=fleet)
            return
        model, optimizer = distribute(model, inner, Sharded(), fleet=fleet)
        monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure=None: old(self, closure))
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(UpdateError, match=r"SGD.step was replaced after distribute\(\).*AllReduce\(\)"):
            optimizer.step()
        monkeypatch.undo()

    run_fleets(1, body)


@pytest.mark.parametrize("put", [replaced_step, hooked_step])
def test_steps_in_backward_refuse_what_they_cannot_call_in_time(put: Put, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        model = perceptron()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        put(inner, [])
        model, optimizer = distribute(model, inner, Sharded(step_in_backward=True), fleet=fleet)
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(UpdateError, match=r"step_in_backward=True\) cannot call .* use Sharded\(\)"):
            optimizer.step()

    run_fleets(1, body)


def test_steps_in_backward_go_beside_a_process_group_which_watches_all_optimizers(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> torch.Tensor:
        model = perceptron()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = distribute(model, inner, Sharded(step_in_backward=True), fleet=fleet)
        before = next(model.parameters()).detach().clone()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return next(model.parameters()).detach() - before

    dist.init_process_group("syncline", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()  # what watches stays
    (moved,) = run_fleets(1, body)
    assert moved.any()


@by_rule
def test_a_wrapper_from_before_distribute_is_refused_with_how_to_make_it(rule: UpdateRule, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        model = perceptron()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        replaced_step(inner, [])
        distribute(model, inner, rule, fleet=fleet)
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(UpdateError, match=r"this rank alone.*A wrapper .* after distribute\(\)"):
            inner.step()

    run_fleets(1, body)
