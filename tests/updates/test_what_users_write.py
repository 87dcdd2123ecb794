"""What a user does between steps holds with every rule: where ranks see the same data, one process is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import syncline
from small_regression import batch, loss_of, make_adam, make_model, make_sgd, parameters_of
from syncline.errors import UpdateError
from syncline.testing import run_ranks

RULES: dict[str, Callable[[], Any]] = {
    "all-reduce": syncline.AllReduce,
    "local steps": lambda: syncline.LocalSteps(period=2),
    "clusters": lambda: syncline.Clustered(period=4, clusters=2),
    "overlapped": lambda: syncline.Overlapped(period=64, max_staleness=0),
}


def fill(model: torch.nn.Module, _: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)


def fill_by_data(model: torch.nn.Module, _: Any) -> None:
    for parameter in model.parameters():
        parameter.data.fill_(0.25)


def clamp(model: torch.nn.Module, _: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.2, 0.2)


def load(model: torch.nn.Module, _: Any) -> None:
    model.load_state_dict({name: torch.full_like(value, 0.75) for name, value in model.state_dict().items()})


def load_optimizer(_: torch.nn.Module, optimizer: Any) -> None:
    state = optimizer.state_dict()
    for held in state["state"].values():
        held["step"].fill_(1000)
    optimizer.load_state_dict(state)


def train(model: Any, optimizer: Any, write: Callable[[Any, Any], None], *, ends: bool = False) -> torch.Tensor:
    for step in range(6):
        loss_of(model, *batch(0, step, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, 2, 4):
            write(model, optimizer)
        if ends:
            optimizer.end_period()
    return parameters_of(model).clone()


def train_ranks(rule: Callable[[], Any], make: Any, write: Callable[[Any, Any], None], *, ends: bool = False) -> Any:
    def body(fleet: syncline.Fleet) -> torch.Tensor:
        model = make_model()
        optimizer: Any = make(model.parameters())
        model, optimizer = syncline.distribute(model, optimizer, rule(), samples="batch", fleet=fleet)
        train(model, optimizer, write, ends=ends)
        optimizer.end_period()
        return parameters_of(model).clone()

    return run_ranks(2, body)


@pytest.mark.filterwarnings("ignore:Ranks 0 and 1 were given the same first batches")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("write", [fill, fill_by_data, clamp, load, load_optimizer])
def test_writes_between_steps_stay(rule: str, write: Callable[[Any, Any], None]) -> None:
    model = make_model()
    expected = train(model, make_adam(model.parameters()), write)
    for found in train_ranks(RULES[rule], make_adam, write):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rule", [name for name in RULES if name != "all-reduce"])
@pytest.mark.parametrize("make", [make_sgd, make_adam])
def test_an_end_of_a_period_is_no_step(rule: str, make: Any) -> None:
    model = make_model()
    expected = train(model, make(model.parameters()), lambda *_: None)
    for found in train_ranks(RULES[rule], make, lambda *_: None, ends=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def train_by_hand(model: Any, optimizer: Any, *, passes: bool) -> torch.Tensor:
    """Step on gradients that are put in the place of those of a pass, or written without one; twice on the last."""
    for step in range(5):
        if passes:
            loss_of(model, *batch(0, step, 4)).backward()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, step - 1.5)
        optimizer.step()
    optimizer.step()
    return parameters_of(model).clone()


BY_HAND: dict[str, Callable[[], Any]] = {
    **RULES,
    "clusters, all-reduce": lambda: syncline.Clustered(period=4, clusters=2, within=syncline.AllReduce()),
    "clusters of two": lambda: syncline.Clustered(period=4, clusters=1),
}


@pytest.mark.filterwarnings("ignore:Ranks 0 and 1 were given the same first batches")
@pytest.mark.parametrize("rule", BY_HAND)
@pytest.mark.parametrize("passes", [False, True])
def test_gradients_that_are_written_are_stepped_on(rule: str, passes: bool) -> None:
    model = make_model()
    expected = train_by_hand(model, make_sgd(model.parameters()), passes=passes)

    def body(fleet: syncline.Fleet) -> torch.Tensor:
        model = make_model()
        optimizer: Any = make_sgd(model.parameters())
        model, optimizer = syncline.distribute(model, optimizer, BY_HAND[rule](), samples="batch", fleet=fleet)
        train_by_hand(model, optimizer, passes=passes)
        optimizer.end_period()
        return parameters_of(model).clone()

    for found in run_ranks(2, body):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rule", [syncline.LocalSteps(), syncline.Overlapped()])
def test_complex_parameters_are_refused_where_differences_are_of_real_numbers(rule: Any) -> None:
    def body(fleet: syncline.Fleet) -> None:
        model = torch.nn.Linear(4, 2, dtype=torch.complex64)
        with pytest.raises(UpdateError, match=r"\(2, 4\) is torch.complex64; use update=AllReduce\(\) or Sharded\(\)"):
            syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), rule, fleet=fleet)

    run_ranks(2, body)


class Counting(torch.optim.Optimizer):
    """Counts its steps in its group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0})

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["k"] += 1


def test_steps_that_cannot_be_redone_in_part_are_refused() -> None:
    optimizer = Counting([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(UpdateError, match=r"does not suit Counting: its step\(\) changes k of .*; use rule=\"swap\""):
        syncline.Overlapped().check(optimizer)
    syncline.Overlapped(rule="swap").check(optimizer)
