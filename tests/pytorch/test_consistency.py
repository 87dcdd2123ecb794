"""Ranks that begin to differ are told on every rank: who, what, both values, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle_models import CASES, copies, loss_of

from syncline.errors import ConfigurationError, PeerLostError, SynclineWarning, UpdateError
from syncline.pytorch.consistency import describe_hyperparameters
from syncline.pytorch.control import join
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.updates import AllReduce, Overlapped, Sharded, UpdateRule

CASE = CASES["perceptron"]
RULES: list[UpdateRule] = [Sharded(bucket_bytes=1000), AllReduce(bucket_bytes=1000)]
by_rule = pytest.mark.parametrize("rule", RULES, ids=["sharded", "all_reduce"])
EVERY = 3
Trouble = Callable[[Any, Any, int], bool | None]
"""What one rank does with model and optimizer before the step of this number; whether it skips that step."""


def train(
    run_fleets: Any, rule: UpdateRule, trouble: Trouble, *, who: int = 1, world: int = 3, every: int | None = EVERY
) -> list[tuple[str | None, int]]:
    """Train for 3 * EVERY steps; return for each rank what it was told, and after how many backward passes."""
    models, batches = copies(CASE.make(), world), CASE.batches(3 * EVERY, 2 * world)

    def body(fleet: Fleet) -> tuple[str | None, int]:
        inner = torch.optim.AdamW(models[fleet.rank].parameters(), lr=0.01)
        model, optimizer = distribute(models[fleet.rank], inner, rule, fleet=fleet, check_every=every)
        for number, (inputs, targets) in enumerate(batches):
            loss = loss_of(model, inputs.chunk(world)[fleet.rank], targets.chunk(world)[fleet.rank])
            try:
                loss.backward()
            except UpdateError as error:
                return str(error), number
            optimizer.synchronize()
            if not (fleet.rank == who and trouble(model, optimizer, number)):
                optimizer.step()
            optimizer.zero_grad()
        return None, len(batches)

    return run_fleets(world, body)


def change_rate(_: Any, optimizer: Any, number: int) -> None:
    if number == 1:
        optimizer.param_groups[0]["lr"] = 0.02


def skip(_: Any, __: Any, number: int) -> bool:
    return number == 1


def write(model: Any, _: Any, number: int) -> None:
    if number == 1:
        with torch.no_grad():
            model[2].weight[3, 4] += 1e-9


@by_rule
def test_equal_ranks_are_told_nothing(rule: UpdateRule, run_fleets: Any) -> None:
    assert train(run_fleets, rule, lambda *_: None, every=1) == [(None, 3 * EVERY)] * 3


@by_rule
def test_another_learning_rate(rule: UpdateRule, run_fleets: Any) -> None:
    for told, number in train(run_fleets, rule, change_rate):
        assert number == EVERY
        assert told is not None
        assert told.startswith("The ranks differ after 3 synchronised backward passes: rank 1: it has 'lr of parameter")
        assert "group 0 is 0.02', rank 0 has 'lr of parameter group 0 is 0.01'" in told
        assert "let the same scheduler set them" in told


def test_a_skipped_step(run_fleets: Any) -> None:
    for told, number in train(run_fleets, AllReduce(bucket_bytes=1000), skip):
        assert number == EVERY
        assert told is not None
        assert "rank 1: it has 'parameter 0.weight: norm" in told
        assert "rank 0 has 'parameter 0.weight: norm" in told
        assert "(the first of 6 differences)" in told
        assert "must call step() after the same backward passes" in told


def test_the_rank_that_differs_from_most_is_named(run_fleets: Any) -> None:
    told, _ = train(run_fleets, AllReduce(bucket_bytes=1000), skip, who=0)[0]
    assert told is not None
    assert "rank 0: it has 'parameter 0.weight" in told
    assert "rank 1 has 'parameter 0.weight" in told
    assert "rank 2" not in told


def test_a_loss_during_the_comparison_is_told_with_the_pass(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        linear = torch.nn.Linear(3, 2)
        inner = torch.optim.SGD(linear.parameters(), lr=0.1)
        model, optimizer = distribute(linear, inner, AllReduce(), fleet=fleet, check_every=2)
        for number in range(3):
            if (fleet.rank, number) == (1, 2):
                fleet.communicator.abort()
                return
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    error, _ = run_fleets(2, body, accept=PeerLostError)
    assert "during checksums of parameters before backward pass 3" in str(error)


def test_a_write_into_one_element(run_fleets: Any) -> None:
    """AdamW spreads it: the parameter stays different, and no other one, as gradients are the same on all ranks."""
    for told, number in train(run_fleets, AllReduce(bucket_bytes=1000), write):
        assert number == EVERY
        assert told is not None
        assert "rank 1: it has 'parameter 2.weight: norm" in told
        assert "the first of" not in told


def test_sharded_compares_what_all_have_when_parameters_are_final(run_fleets: Any) -> None:
    """What one rank writes is overwritten by the owner; what it writes before every pass is seen."""

    def add(layer: Any, _: Any) -> None:
        layer.bias.data.add_(1e-9)

    def write_always(model: Any, _: Any, number: int) -> None:
        if number == 1:
            model[0].register_forward_pre_hook(add)

    for told, number in train(run_fleets, Sharded(bucket_bytes=1000), write_always):
        assert number == EVERY
        assert told is not None
        assert "rank 1: it has 'parameter 0.bias: norm" in told


@by_rule
def test_ranks_that_join_have_the_rate_of_the_last_step(rule: UpdateRule, run_fleets: Any) -> None:
    """A rank that is done follows hyper-parameters step by step; another scheduler of its own does not matter."""
    models, batches = copies(CASE.make(), 2), CASE.batches(8, 2)

    def body(fleet: Fleet) -> None:
        inner = torch.optim.SGD(models[fleet.rank].parameters(), lr=0.1)
        model, optimizer = distribute(models[fleet.rank], inner, rule, fleet=fleet, check_every=1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        with join(model):
            for batch in batches[fleet.rank : 6 : 1 + fleet.rank]:
                loss_of(model, *batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()

    run_fleets(2, body)


@pytest.mark.parametrize("every", [None, 0])
def test_it_can_be_left_out(every: int | None, run_fleets: Any) -> None:
    assert [told for told, _ in train(run_fleets, AllReduce(), write, every=every)] == [None] * 3


def test_rules_that_let_ranks_differ_are_not_checked(run_fleets: Any) -> None:
    rule = Overlapped(period=100, max_staleness=None)
    with pytest.warns(SynclineWarning, match="check_every= is ignored by Overlapped"):
        told = train(run_fleets, rule, write, every=1)
    assert [error for error, _ in told] == [None] * 3


@by_rule
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lr": [0.1, 0.2]}, "rank 1: it has 'lr of parameter group 0 is 0.2', rank 0 has"),
        ({"momentum": [0.9, 0.8]}, "rank 1: it has 'momentum of parameter group 0 is 0.8', rank 0 has"),
        ({"nesterov": [True, False], "momentum": [0.9, 0.9]}, "it has 'nesterov of parameter group 0 is False'"),
    ],
    ids=["lr", "momentum", "nesterov"],
)
def test_hyperparameters_are_compared_when_training_is_set_up(
    rule: UpdateRule, options: dict[str, Any], told: str, run_fleets: Any
) -> None:
    models = copies(CASE.make(), 2)

    def body(fleet: Fleet) -> None:
        own = {"lr": 0.1, **{name: values[fleet.rank] for name, values in options.items()}}
        distribute(models[fleet.rank], torch.optim.SGD(models[fleet.rank].parameters(), **own), rule, fleet=fleet)

    for error in run_fleets(2, body, accept=UpdateError):
        assert told in str(error)


def test_at_the_start_too_the_rank_that_differs_from_most_is_named(run_fleets: Any) -> None:
    models = copies(CASE.make(), 3)

    def body(fleet: Fleet) -> None:
        inner = torch.optim.SGD(models[fleet.rank].parameters(), lr=0.1 if fleet.rank else 0.2)
        distribute(models[fleet.rank], inner, fleet=fleet)

    for error in run_fleets(3, body, accept=UpdateError):
        assert "but they differ: rank 0: it has 'lr of parameter group 0 is 0.2', rank 1 has" in str(error)
        assert "rank 2" not in str(error)


def test_ranks_check_at_the_same_passes(run_fleets: Any) -> None:
    models = copies(CASE.make(), 2)

    def body(fleet: Fleet) -> None:
        inner = torch.optim.SGD(models[fleet.rank].parameters(), lr=0.1)
        distribute(models[fleet.rank], inner, fleet=fleet, check_every=10 + fleet.rank)

    for error in run_fleets(2, body, accept=UpdateError):
        assert "rank 1: it has 'check_every=11'" in str(error)


def test_a_negative_period_is_refused(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        model = CASE.make()
        with pytest.raises(ConfigurationError, match="check_every must be a whole number from 0 up, or None, not -1"):
            distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), fleet=fleet, check_every=-1)

    run_fleets(1, body)


def test_equal_hyperparameters_read_the_same() -> None:
    """Objects without a value are told by type: their addresses differ from rank to rank."""
    parameter = torch.nn.Parameter(torch.zeros(2))

    def lines(**more: Any) -> list[str]:
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        optimizer.param_groups[0].update(more)
        return describe_hyperparameters(optimizer)

    assert lines(lr=1) == lines(lr=1.0) == lines(lr=torch.tensor(1.0, dtype=torch.float64))
    assert lines(extra=lambda: 1) == lines(extra=lambda: 2)
    assert lines(betas=(0.9, 0.99)) == lines(betas=[0.9, 0.99]) != lines(betas=(0.9, 0.999))
    assert lines(extra={"a": 1}) != lines(extra={"a": 2})
    assert not any("params" in line for line in lines())
