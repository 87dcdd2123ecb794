"""An optimizer that looks at all of its parameters is told from one that treats each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import optim

from syncline.errors import UpdateError
from syncline.updates import AllReduce, Clustered, LocalSteps, Overlapped, Sharded, UpdateRule
from syncline.updates.inner import check_divisible, make_inner, why_not_independent


class Clipped(optim.SGD):
    """Clips by the norm of all gradients, beyond a limit."""

    def __init__(self, params: Any, lr: float = 0.1, limit: float = 1.0) -> None:
        super().__init__(params, lr=lr)
        self.limit = limit

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], self.limit)
        return super().step(closure)


class Noisy(optim.SGD):
    """Adds noise to what it steps."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(torch.randn_like(parameter))
        return loss


class Counting(optim.Optimizer):
    """Counts its steps in its group, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                group["k"] += 1
                for parameter in group["params"]:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / group["k"])


@pytest.mark.parametrize(
    "make", [partial(kind, lr=0.1) for kind in (optim.Adafactor, optim.Adam, optim.AdamW, optim.Muon, Noisy, optim.SGD)]
)
def test_what_treats_each_parameter_by_itself_is_independent(make: Any) -> None:
    before = torch.get_rng_state()
    assert why_not_independent(make) is None
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("limit", [0.01, 100.0])
def test_what_clips_all_gradients_is_not(limit: float) -> None:
    why = why_not_independent(partial(Clipped, limit=limit))
    assert why is not None
    assert "depends on the other parameters" in why


def test_what_counts_in_its_group_is_not() -> None:
    optimizer = Counting([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(
        UpdateError, match=r"does not suit Counting: its step\(\) changes k of .*; use update=AllReduce"
    ):
        check_divisible(optimizer, whole_parameters=True)


def test_a_step_that_raises_is_told() -> None:
    def make(parameters: Sequence[torch.nn.Parameter]) -> optim.Optimizer:
        return optim.LBFGS(parameters)

    why = why_not_independent(make)
    assert why is not None
    assert "raised TypeError" in why


def test_another_optimizer_of_the_same_name_is_told_from_the_one_that_is_known() -> None:
    class AdamW(Noisy):
        __module__ = "elsewhere.optim"

    optimizer = AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(UpdateError, match=r"AdamW of elsewhere is not known to allow \(known: .* of torch\)"):
        check_divisible(optimizer, whole_parameters=False)


@pytest.mark.parametrize("whole", [False, True])
def test_the_error_names_the_optimizer_and_a_rule_that_serves_it(whole: bool) -> None:
    optimizer = Clipped([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(UpdateError, match=r"does not suit Clipped: .*; use update=AllReduce"):
        check_divisible(optimizer, whole_parameters=whole)


def test_what_a_class_keeps_beside_its_groups_is_not_lost() -> None:
    optimizer = Clipped([torch.nn.Parameter(torch.zeros(2))], limit=7.0)
    inner = make_inner(optimizer, 0, [torch.nn.Parameter(torch.zeros(3))])
    assert isinstance(inner, Clipped)
    assert inner.limit == 7.0


class Requiring(optim.SGD):
    """Cannot be stepped without a closure."""

    def step(self, closure: Any) -> Any:
        return super().step(closure)


class Named(optim.SGD):
    """Likewise, and calls it otherwise."""

    def step(self, *, evaluate: Any) -> Any:
        return super().step(evaluate)


class Passing(optim.SGD):
    """Takes whatever comes."""

    def step(self, *args: Any, **options: Any) -> Any:
        return super().step(*args, **options)


OTHERS = [LocalSteps(), Overlapped(), Clustered(), Sharded(), Sharded(align="parameter"), LocalSteps(within=Sharded())]


@pytest.mark.parametrize("rule", OTHERS, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize(("kind", "call"), [(Requiring, r"step\(closure\)"), (Named, r"step\(evaluate\)")])
def test_an_optimizer_that_requires_a_closure_is_refused(
    rule: UpdateRule, kind: type[optim.Optimizer], call: str
) -> None:
    optimizer = kind([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1)  # type: ignore[call-arg]
    AllReduce().check(optimizer)
    with pytest.raises(UpdateError, match=rf"{kind.__name__} evaluates the model inside {call}.* update=AllReduce\(\)"):
        rule.check(optimizer)


def test_a_step_that_can_do_without_is_served_also_under_a_scheduler() -> None:
    for kind in (Passing, optim.SGD):
        optimizer = kind([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1)
        optim.lr_scheduler.ConstantLR(optimizer)  # which wraps step()
        LocalSteps().check(optimizer)
        Overlapped().check(optimizer)


def test_within_another_rule_the_remedy_keeps_that_rule() -> None:
    optimizer = Clipped([torch.nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(
        UpdateError, match=r"use update=AllReduce\(\) \(or within=AllReduce\(\), if Sharded\(\) is within"
    ):
        LocalSteps(within=Sharded(align="parameter")).check(optimizer)
