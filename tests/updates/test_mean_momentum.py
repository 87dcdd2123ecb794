"""Momentum that follows the mean: its arithmetic is in the replay of local steps; here what it is for, and its limits.

Each rank is a party and pulls one number its own way. With SGD's momentum they overshoot, each to its own side.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from small_racks import TWO_SITES
from syncline.pytorch.distribute import distribute
from syncline.updates import AllReduce, LocalSteps, Nesterov, Sharded
from syncline.updates.mean_momentum import MeanMomentum
from thread_fleets import run_fleets

NUM_RANKS = 4


class OwnSGD(torch.optim.SGD):
    """Of which nobody knows how it moves."""

    def step(self, closure=None):
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["momentum_buffer"] = parameter.grad.clone()


def sgd(parameters, **settings):
    return torch.optim.SGD(parameters, **{"lr": 0.05, "momentum": 0.9, **settings})


def train(rule: LocalSteps, make=sgd, *, num_steps: int = 24, sign: float = 1.0, dtype=torch.float64):
    """Train on all ranks; return of each its number after every step, and its momentum."""

    def body(fleet):
        number = nn.Parameter(torch.ones(3, dtype=dtype))
        model = nn.ParameterList([number])
        model, optimizer = distribute(model, make(model.parameters()), rule, fleet=fleet)
        told = []
        for _ in range(num_steps):
            pull = number - torch.tensor([10.0 * fleet.rank, -float(fleet.rank), 1.0], dtype=dtype)
            (sign * 0.5 * pull.square()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append(number.detach().clone())
        state = optimizer.state_dict()["state"].get(0, {})
        return torch.stack(told), state.get("momentum_buffer")

    return run_fleets(NUM_RANKS, body)


def spread(results) -> float:
    """Return how far apart ranks are, on average over the last steps."""
    values = torch.stack([told for told, _ in results])[:, -12:]
    return float((values - values.mean(0)).abs().mean())


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MeanMomentum, "is_there", False)


@pytest.mark.parametrize(("period", "overlap"), [(1, True), (2, True), (2, False), (4, True), (4, False)])
def test_parties_that_pull_apart_stay_nearer(period: int, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = LocalSteps(period=period, overlap=overlap)
    followed = spread(train(rule))
    alone(monkeypatch)
    assert followed < 0.7 * spread(train(rule))


def test_long_periods_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = LocalSteps(period=64, fragments=4)
    followed = train(rule, num_steps=200)
    alone(monkeypatch)
    for (one, _), (other, _) in zip(followed, train(rule, num_steps=200), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=0.02)


def test_maximizing_is_minimizing_the_other_way_round() -> None:
    rule = LocalSteps(period=2)

    def maximizing(parameters):
        return sgd(parameters, maximize=True)

    for (one, momentum), (other, opposite) in zip(train(rule), train(rule, maximizing, sign=-1.0), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(momentum, opposite)  # it is of what is descended


@pytest.mark.parametrize("rate", [0.0, 1e-9])
def test_momentum_is_not_made_of_rounding_errors(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At such a rate float32 parameters do not move, or by their last bit."""

    def make(parameters):
        return sgd(parameters, lr=rate)

    rule = LocalSteps(period=2)
    followed = train(rule, make, dtype=torch.float32)
    alone(monkeypatch)
    for (_, one), (_, other) in zip(followed, train(rule, make, dtype=torch.float32), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("rule", "make"),
    [
        (LocalSteps(period=2), torch.optim.Adam),
        (LocalSteps(period=2), lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9)),
        (LocalSteps(period=2), lambda parameters: torch.optim.SGD(parameters, lr=0.05)),
        (LocalSteps(period=2), lambda parameters: OwnSGD(parameters, lr=0.05, momentum=0.9)),
        (LocalSteps(period=2, outer=Nesterov()), sgd),
    ],
    ids=["adam", "rmsprop", "no momentum", "own step", "outer optimizer"],
)
def test_what_moves_do_not_tell_of_is_left_alone(rule: LocalSteps, make, monkeypatch: pytest.MonkeyPatch) -> None:
    before = train(rule, make, num_steps=9)
    alone(monkeypatch)
    for (one, momentum), (other, again) in zip(before, train(rule, make, num_steps=9), strict=True):
        assert torch.equal(one, other)
        assert (momentum is None and again is None) or torch.equal(momentum, again)


def test_short_numbers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference of two moves in bfloat16 has hardly a digit."""
    rule = LocalSteps(period=2)
    before = train(rule, num_steps=9, dtype=torch.bfloat16)
    alone(monkeypatch)
    for (one, _), (other, _) in zip(before, train(rule, num_steps=9, dtype=torch.bfloat16), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("within", [AllReduce(), Sharded()])
def test_the_momentum_of_a_parameter_that_a_party_does_not_use_does_not_grow(within) -> None:
    """It does not fade either, as nobody steps on it: what others move it by would add up."""

    def body(fleet):
        model = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)])
        rule = LocalSteps(period=2, within=within)
        model, optimizer = distribute(model, sgd(model.parameters()), rule, fleet=fleet)
        told = []
        for step in range(80):
            used = model if step < 4 or fleet.rank > 1 else model[:1]
            sum((number - 1.0 - fleet.rank).square().sum() for number in used).backward()
            optimizer.step()
            optimizer.zero_grad()
            held = (values for view in optimizer.training.updater.state.values() for values in view.values())
            told.append([values.clone() for values in held if isinstance(values, torch.Tensor)])
        return told

    for told in run_fleets(TWO_SITES, body):
        largest = [max(float(values.abs().max()) for values in step) for step in told]
        assert max(largest[20:]) <= max(largest[:20])
