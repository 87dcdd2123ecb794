"""What may be set on the optimizer of ``distribute()``: it counts, or is refused; nothing is ignored."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from syncline.errors import UpdateError
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.optimizer import DistributedOptimizer
from syncline.updates import AllReduce, Clustered, LocalSteps, Overlapped, Sharded, UpdateRule

RULES = [Sharded(), AllReduce(), LocalSteps(), Overlapped(), Clustered()]
by_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)


def on_one_rank(
    rule: UpdateRule, act: Callable[[nn.Module, DistributedOptimizer], None], run_fleets: Any, num_ranks: int = 1
) -> None:
    def body(fleet: Fleet) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        groups = [{"params": [one]} for one in model.parameters()]
        act(*distribute(model, torch.optim.Adam(groups, lr=0.1), rule, fleet=fleet))

    run_fleets(num_ranks, body)


def one_step(model: nn.Module, optimizer: DistributedOptimizer) -> None:
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@by_rule
@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("state", defaultdict(dict), r"load_state_dict\(\.\.\.\), on every rank"),
        ("param_groups", [], r'param_groups\[0\]\["lr"\] = 0\.1'),
        ("defaults", {}, "optimizer.param_groups"),
    ],
)
def test_what_nobody_would_read_cannot_be_set(
    rule: UpdateRule, name: str, value: object, remedy: str, run_fleets: Any
) -> None:
    def act(model: nn.Module, optimizer: DistributedOptimizer) -> None:
        one_step(model, optimizer)
        before = list(getattr(optimizer, name))
        with pytest.raises(UpdateError, match=rf"optimizer\.{name} cannot be set .*{remedy}"):
            setattr(optimizer, name, value)
        assert all(one is other for one, other in zip(getattr(optimizer, name), before, strict=True))
        one_step(model, optimizer)

    on_one_rank(rule, act, run_fleets)


@pytest.mark.parametrize("rule", [Sharded(), Sharded(align="parameter")], ids=lambda rule: rule.align)
def test_state_that_another_rank_has_is_refused_with_a_remedy(rule: Sharded, run_fleets: Any) -> None:
    def act(model: nn.Module, optimizer: DistributedOptimizer) -> None:
        assert not optimizer.state
        one_step(model, optimizer)
        for parameter in model.parameters():
            with pytest.raises(UpdateError, match=r"'exp_avg' of .* optimizer\.state_dict\(\) returns it whole"):
                optimizer.state[parameter]["exp_avg"]
            with pytest.raises(UpdateError, match=r"cannot be changed with Sharded\(\).*load_state_dict"):
                optimizer.state[parameter]["mine"] = 1

    on_one_rank(rule, act, run_fleets, num_ranks=2)


@by_rule
def test_groups_and_defaults_are_the_inner_optimizers_own(rule: UpdateRule, run_fleets: Any) -> None:
    """Also after the inner one has replaced its list of groups, as ``load_state_dict`` does."""

    def act(model: nn.Module, optimizer: DistributedOptimizer) -> None:
        inner = optimizer.inner
        optimizer.param_groups[0]["lr"] = 0.5
        assert inner.param_groups[0]["lr"] == 0.5
        inner.load_state_dict(inner.state_dict())
        optimizer.param_groups[0]["lr"] = 0.25
        assert inner.param_groups[0]["lr"] == 0.25
        assert optimizer.defaults is inner.defaults
        assert isinstance(optimizer, torch.optim.Optimizer)

    on_one_rank(rule, act, run_fleets)


@by_rule
def test_a_copy_is_refused_since_it_would_train_alone(rule: UpdateRule, run_fleets: Any) -> None:
    def act(model: nn.Module, optimizer: DistributedOptimizer) -> None:
        for clone in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(UpdateError, match="not copied or pickled"):
                clone(optimizer)

    on_one_rank(rule, act, run_fleets)


@by_rule
def test_hooks_on_the_state_are_called(rule: UpdateRule, run_fleets: Any) -> None:
    """What a hook returns takes the place of what it was given, as with any optimizer of torch."""

    def act(model: nn.Module, optimizer: DistributedOptimizer) -> None:
        called: list[str] = []
        one_step(model, optimizer)
        optimizer.register_state_dict_pre_hook(lambda _: called.append("save"))
        optimizer.register_state_dict_post_hook(lambda _, state: state | {"mark": 7})
        optimizer.register_load_state_dict_pre_hook(lambda _, state: {k: v for k, v in state.items() if k != "mark"})
        optimizer.register_load_state_dict_post_hook(lambda _: called.append("loaded"))
        saved = optimizer.state_dict()
        assert saved["mark"] == 7
        optimizer.load_state_dict(saved)
        assert saved["mark"] == 7
        assert called == ["save", "loaded"]

    on_one_rank(rule, act, run_fleets)


def test_a_parameter_that_leaves_its_group_is_not_stepped_in_silence(run_fleets: Any) -> None:
    def sharded(model: nn.Module, optimizer: DistributedOptimizer) -> None:
        del optimizer.param_groups[0]["params"][0]
        with pytest.raises(UpdateError, match=r"changed after distribute\(\)"):
            one_step(model, optimizer)

    def whole(model: nn.Module, optimizer: DistributedOptimizer) -> None:
        (first, *others), before = list(model.parameters()), [one.detach().clone() for one in model.parameters()]
        del optimizer.param_groups[0]["params"][0]
        one_step(model, optimizer)
        assert torch.equal(first, before[0])
        assert not any(torch.equal(one, old) for one, old in zip(others, before[1:], strict=True))

    on_one_rank(Sharded(), sharded, run_fleets)
    on_one_rank(AllReduce(), whole, run_fleets)


@pytest.mark.parametrize(
    "change",
    [
        lambda state, _: state.clear(),
        lambda state, parameter: state.pop(parameter),
        lambda state, parameter: state.__setitem__(parameter, {}),
        lambda state, parameter: state[parameter].__setitem__("mine", 1),
        lambda state, parameter: state[parameter].setdefault("mine", 1),
        lambda state, parameter: state[parameter].update(mine=1),
        lambda state, parameter: state.__ior__({parameter: {}}),
        lambda state, _: state[nn.Parameter(torch.ones(1))].__setitem__("mine", 1),
    ],
    ids=["clear", "pop", "set", "set-within", "setdefault", "update", "union", "without-state"],
)
def test_state_that_nobody_would_read_is_not_changed(change: Callable[[Any, Any], None], run_fleets: Any) -> None:
    """Each had an error of Python's own, as "'mappingproxy' object has no attribute 'clear'"."""

    def act(model: nn.Module, optimizer: DistributedOptimizer) -> None:
        one_step(model, optimizer)
        parameter = next(model.parameters())
        before = list(optimizer.state)
        with pytest.raises(UpdateError, match=r"cannot be changed with Sharded\(\).*load_state_dict.*AllReduce\(\)"):
            change(optimizer.state, parameter)
        assert list(optimizer.state) == before

    on_one_rank(Sharded(), act, run_fleets)
