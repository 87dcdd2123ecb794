"""``train()`` and ``eval()`` of schedule-free optimizers, on the optimizer that ``distribute()`` returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from syncline.errors import UpdateError
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.updates import AllReduce, Clustered, LocalSteps, Overlapped, Sharded, UpdateRule

OTHERS = [
    LocalSteps(period=2),
    LocalSteps(within=Sharded(align="parameter")),
    Overlapped(period=2, rule="swap"),
    Clustered(period=2),
    Clustered(clusters=1, within=Sharded(align="parameter")),
]


class Halving(torch.optim.SGD):
    """Has half of the parameters in evaluation, which is exact both ways, and steps in training alone."""

    is_training = True

    def train(self) -> None:
        self._switch(is_training=True, factor=2.0)

    def eval(self) -> None:
        self._switch(is_training=False, factor=0.5)

    @torch.no_grad()
    def _switch(self, *, is_training: bool, factor: float) -> None:
        if self.is_training != is_training:
            self.is_training = is_training
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(factor)

    def step(self, closure: Any = None) -> Any:
        assert self.is_training
        return super().step(closure)


def train(fleet: Fleet, *, evaluates: bool) -> torch.Tensor:
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = distribute(model, Halving(model.parameters(), lr=0.1), AllReduce(), fleet=fleet)
    switches: Any = optimizer
    for number in range(6):
        model(torch.tensor([[1.0, 2.0, number + fleet.rank]])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluates:
            before = model.weight.detach().clone()
            switches.eval()
            assert torch.equal(model.weight, 0.5 * before)
            switches.train()
    return model.weight.detach().clone()


def test_a_whole_optimizer_that_is_alike_on_all_ranks_has_its_modes(run_fleets: Any) -> None:
    with_modes = run_fleets(2, lambda fleet: train(fleet, evaluates=True))
    without = run_fleets(2, lambda fleet: train(fleet, evaluates=False))
    assert all(map(torch.equal, with_modes, without))
    assert torch.equal(*with_modes)


DIVIDED = [Sharded(align="parameter"), Sharded(align="parameter", step_in_backward=True)]


@pytest.mark.parametrize("rule", [*DIVIDED, *OTHERS], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_where_ranks_have_other_states_they_are_refused(rule: UpdateRule, mode: str, run_fleets: Any) -> None:
    name = type(rule).__name__
    has = "a part of it" if isinstance(rule, Sharded) else "one of its own"

    def body(fleet: Fleet) -> None:
        model = nn.Linear(3, 1)
        _, optimizer = distribute(model, Halving(model.parameters(), lr=0.1), rule, fleet=fleet)
        with pytest.raises(
            UpdateError,
            match=rf"{mode}\(\) of Halving .* with {name}\(\) each rank has {has}.*use update=AllReduce\(\)",
        ):
            getattr(optimizer, mode)()

    run_fleets(2, body)


def test_others_have_none(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        model = nn.Linear(3, 1)
        _, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), AllReduce(), fleet=fleet)
        assert not hasattr(optimizer, "train")
        with pytest.raises(AttributeError, match="'DistributedOptimizer' object has no attribute 'eval'"):
            _ = optimizer.eval  # type: ignore[attr-defined]

    run_fleets(1, body)
