"""Gradients that a rank was sent: the steps are those of one process over the union of all samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gateway_models import hosts_of_2_3_1
from oracle_models import CASES, copies, loss_of, train_alone
from torch import nn

from syncline.errors import ConfigurationError, UpdateError
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.updates import AllReduce, Grace, LocalSteps, Overlapped, Sharded, UpdateRule

RULES: dict[str, UpdateRule] = {
    "sharded": Sharded(bucket_bytes=300),
    "overlapped_forward": Sharded(bucket_bytes=300, overlap_forward=True),
    "all_reduce": AllReduce(bucket_bytes=300),
}
by_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
CASE = CASES["sometimes_unused"]
SIZES = (4, 2, 3, 5)
"""Of rank 0, of two processing units behind rank 1, and of rank 2."""
STEPS = 4


def make(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.Adam(trained, lr=0.02)


def gradients_of(unit: nn.Module, parameters: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
    """Let a processing unit compute gradients for these parameters."""
    with torch.no_grad():
        for own, given in zip(unit.parameters(), parameters, strict=True):
            own.copy_(given)
    unit.zero_grad()
    loss_of(unit, inputs, targets).backward()
    return {name: parameter.grad for name, parameter in unit.named_parameters() if parameter.grad is not None}


def train(fleet: Fleet, model: nn.Module, unit: nn.Module, rule: UpdateRule, *, mixes: bool) -> None:
    """Rank 1 is fed by two units; where it ``mixes``, the second one's batch is its own."""
    model, optimizer = distribute(model, make(model), rule, samples="batch", fleet=fleet)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for inputs, targets in CASE.batches(STEPS, sum(SIZES)):
        first, *units, last = zip(inputs.split(SIZES), targets.split(SIZES), strict=True)
        for place, part in enumerate(units if fleet.rank == 1 else ()):
            if mixes and place == 1:
                loss_of(model, *part).backward()
                continue
            optimizer.synchronize()
            gradients = gradients_of(unit, model.parameters(), *part)
            in_order = [gradients.get(name) for name in trained]
            optimizer.contribute(in_order if place else gradients, len(part[0]))
        if fleet.rank != 1:
            loss_of(model, *(last if fleet.rank else first)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("mixes", [False, True])
@by_rule
def test_steps_are_those_of_one_process_over_the_union(rule: UpdateRule, mixes: bool, run_fleets: Any) -> None:
    reference = CASE.make()
    models, units = copies(reference, 3), copies(reference, 3)
    run_fleets(3, lambda fleet: train(fleet, models[fleet.rank], units[fleet.rank], rule, mixes=mixes))
    train_alone(CASE, reference, make(reference), CASE.batches(STEPS, sum(SIZES)), [SIZES] * STEPS)
    for model in models:
        for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=CASE.tolerance)


def test_helpers_contribute_in_a_loop_of_their_own(run_fleets: Any) -> None:
    models = copies(nn.Linear(1, 1, bias=False).double(), 6)

    def body(fleet: Fleet) -> float:
        model = models[fleet.rank]
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = distribute(model, optimizer, samples="batch", fleet=fleet)
        if optimizer.is_server:
            optimizer.contribute({"weight": torch.full((1, 1), float(fleet.rank)).double()}, samples=10)
        else:
            model(torch.ones(5, 1).double()).mean().backward()
        optimizer.step()
        optimizer.synchronize()
        return model.weight.item()

    mean = (0 * 10 + 2 * 10 + 4 * 5 * 1.0) / 40
    assert run_fleets(hosts_of_2_3_1("helper"), body) == [pytest.approx(-mean)] * 6


def test_a_sum_in_a_narrow_type_does_not_overflow(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> float:
        model = nn.Linear(1, 1, bias=False).half()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = distribute(model, optimizer, samples="batch", fleet=fleet)
        optimizer.contribute([torch.full((1, 1), 100.0).half()], samples=1e4)
        optimizer.step()
        return model.weight.item()

    assert run_fleets(2, body) == [-100.0, -100.0]


WRONG: dict[str, tuple[Any, float, str]] = {
    "unknown": ({"wieght": torch.zeros(1, 2)}, 1, "'wieght' is no parameter .* its parameters are weight, bias"),
    "shape": ({"bias": torch.zeros(1), "weight": torch.zeros(2, 1)}, 1, r"shape \(1, 2\) .* not \(2, 1\)"),
    "type": ({"weight": torch.zeros(1, 2).double()}, 1, "number type torch.float32, not .* torch.float64"),
    "sparse": ({"weight": torch.zeros(1, 2).to_sparse()}, 1, "is a dense tensor, not one of layout torch.sparse_coo"),
    "no tensor": ({"weight": [0.0, 0.0]}, 1, "gradients must be a mapping from a string to a Tensor"),
    "too few": ([torch.zeros(1, 2)], 1, "one gradient for each of the 2 parameters .* not 1"),
    "negative": ({"bias": torch.ones(1)}, -1, "at least 0 and finite, not -1"),
}


@pytest.mark.parametrize(("gradients", "samples", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_taken_is_an_error_and_nothing_of_it_is(
    gradients: Any, samples: float, message: str, run_fleets: Any
) -> None:
    def body(fleet: Fleet) -> float:
        model = nn.Linear(2, 1)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = distribute(model, optimizer, samples="batch", fleet=fleet)
        with pytest.raises((UpdateError, ConfigurationError), match=message):
            optimizer.contribute(gradients, samples)
        optimizer.contribute({"bias": torch.full((1,), 3.0)}, 2)
        optimizer.contribute({"weight": torch.full((1, 2), 9e9)}, 0)
        optimizer.step()
        return model.bias.item()

    assert run_fleets(2, body) == [-3.0, -3.0]


def test_when_it_cannot_be_called(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        model = nn.Linear(1, 1)
        _, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), samples="batch", fleet=fleet)
        model(torch.ones(1, 1)).sum().backward()
        with pytest.raises(UpdateError, match="came after the backward pass that it belongs to"):
            optimizer.contribute({}, 1)
        for how, rule, message in (
            (None, None, 'every rank that runs a backward pass counts 1; write .* samples="batch"'),
            ("batch", LocalSteps(pace=Grace()), r"every step, not LocalSteps\(\); use AllReduce\(\) or Sharded\(\)"),
            (
                "batch",
                Overlapped(),
                r"for rules in which every rank makes every step, not Overlapped\(\); use AllReduce",
            ),
        ):
            model = nn.Linear(1, 1)
            plain = torch.optim.SGD(model.parameters(), lr=1.0)
            _, other = distribute(model, plain, rule, samples=how, fleet=fleet)
            with pytest.raises(UpdateError, match=message):
                other.contribute({}, 1)

    run_fleets(2, body)
