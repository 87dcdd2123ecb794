"""Every model, optimizer, topology and rule: equal to one process that trains on the union of the batches."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle_models import CASES, Batch, Case, copies, loss_of, train_alone
from torch import nn

from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.topology import Topology
from syncline.updates import AllReduce, Sharded, UpdateRule

pytestmark = pytest.mark.usefixtures("small_slices")

TWO_AND_THREE = """
topology: two-racks-2-3
switch: core
children:
  - switch: rack-a
    uplink: 200 Mbit/s
    children: [{host: "a[1-2]", uplink: 1 Gbit/s}]
  - switch: rack-b
    uplink: 300 Mbit/s
    children: [{host: "b[1-3]", uplink: 1 Gbit/s}]
"""
DEEP = """
topology: deep
switch: core
children:
  - {host: h0, uplink: 500 Mbit/s}
  - switch: row
    uplink: 400 Mbit/s
    children:
      - {host: h1, uplink: 1 Gbit/s, ranks: 2}
      - switch: rack
        uplink: {up: 100 Mbit/s, down: 200 Mbit/s}
        children: [{host: "h[2-3]", uplink: 1 Gbit/s}]
"""
TOPOLOGIES = {
    "flat": Topology.flat(3),
    "one_and_three": Topology.load("demo-1-3"),
    "two_and_three": Topology.parse(TWO_AND_THREE),
    "deep": Topology.parse(DEEP),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1),
}
RULES: dict[str, UpdateRule] = {
    "sharded": Sharded(bucket_bytes=4000),
    "whole_parameters": Sharded(align="parameter", bucket_bytes=6000),
    "all_reduce": AllReduce(bucket_bytes=4000),
}
NUM_STEPS = 4
SIZE = 23


def shares_of(num_ranks: int, num_steps: int) -> list[list[int]]:
    """Divide each batch unequally and differently each time; at one point the last rank has nothing."""
    shares = []
    for step in range(num_steps):
        sizes = [2 + (3 * rank + step) % 4 for rank in range(num_ranks)]
        if step == num_steps // 2:
            sizes[-1] = 0
        shares.append(sizes)
    return shares


def digest(model: nn.Module) -> str:
    state = hashlib.sha256()
    for parameter in model.parameters():
        state.update(parameter.detach().double().contiguous().numpy().tobytes())
    return state.hexdigest()


def train_together(
    case: Case,
    topology: Topology,
    rule: UpdateRule,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    batches: list[Batch],
    run_fleets: Callable[..., list[Any]],
    *,
    with_state: bool = False,
) -> tuple[list[dict[str, Any]], nn.Module]:
    """Train on all ranks and alone; return what each rank ended with, and the reference."""
    shares = shares_of(topology.num_ranks, len(batches))
    used = [(x[: sum(sizes)], y[: sum(sizes)]) for (x, y), sizes in zip(batches, shares, strict=True)]
    reference = case.make()
    models = copies(reference, topology.num_ranks)
    train_alone(case, reference, make_optimizer(case.groups(reference)), used, shares)

    def body(fleet: Fleet) -> dict[str, Any]:
        model = models[fleet.rank]
        model, optimizer = distribute(model, make_optimizer(case.groups(model)), rule, samples="batch", fleet=fleet)
        hashes = []
        for (inputs, targets), sizes in zip(used, shares, strict=True):
            own = inputs.split(sizes)[fleet.rank], targets.split(sizes)[fleet.rank]
            if sizes[fleet.rank] or not case.is_batchwise:  # BatchNorm refuses an empty batch; others make NaN of it
                loss_of(model, *own).backward()
            optimizer.step()
            optimizer.zero_grad()
            if len(hashes) < 2:
                optimizer.synchronize()
                hashes.append(digest(model))
        optimizer.synchronize()
        return {
            "hashes": [*hashes, digest(model)],
            "state": {name: value.clone() for name, value in model.state_dict().items()},
            "state_bytes": optimizer.num_state_bytes,
            "optimizer": optimizer.state_dict() if with_state else None,
        }

    return run_fleets(topology, body), reference


def check_equal(results: list[dict[str, Any]], reference: nn.Module, tolerance: float) -> None:
    expected = reference.state_dict()
    for result in results:
        assert result["hashes"] == results[0]["hashes"], "ranks differ from each other"
        assert result["state"].keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                result["state"][name],
                value,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, name=name: f"{name}: {text}",
            )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("model", CASES)
def test_sharded_equals_one_process(model: str, topology: str, optimizer: str, run_fleets: Any) -> None:
    case = CASES[model]
    results, reference = train_together(
        case, TOPOLOGIES[topology], RULES["sharded"], OPTIMIZERS[optimizer], case.batches(NUM_STEPS, SIZE), run_fleets
    )
    check_equal(results, reference, case.tolerance)


@pytest.mark.parametrize("rule", ["all_reduce", "whole_parameters"])
@pytest.mark.parametrize("model", CASES)
def test_other_rules_equal_one_process(model: str, rule: str, run_fleets: Any) -> None:
    case = CASES[model]
    results, reference = train_together(
        case, TOPOLOGIES["one_and_three"], RULES[rule], OPTIMIZERS["adamw"], case.batches(NUM_STEPS, SIZE), run_fleets
    )
    check_equal(results, reference, case.tolerance)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fifty_steps_in_single_precision(optimizer: str, run_fleets: Any) -> None:
    base = CASES["perceptron"]
    case = Case(build=base.build, batch=lambda n, g: tuple(t.float() for t in base.batch(n, g)), dtype=torch.float32)
    results, reference = train_together(
        case, TOPOLOGIES["two_and_three"], RULES["sharded"], OPTIMIZERS[optimizer], case.batches(50, SIZE), run_fleets
    )
    check_equal(results, reference, 1e-5)
    whole = torch.cat([value.reshape(-1) for value in reference.state_dict().values()])
    ours = torch.cat([value.reshape(-1) for value in results[0]["state"].values()])
    assert float((ours - whole).norm() / whole.norm()) < 1e-5


def test_state_is_kept_for_owned_elements_alone(run_fleets: Any) -> None:
    case = CASES["perceptron"]
    results, reference = train_together(
        case,
        TOPOLOGIES["two_and_three"],
        RULES["sharded"],
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        case.batches(2, SIZE),
        run_fleets,
    )
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in reference.parameters())
    assert sum(result["state_bytes"] for result in results) == num_bytes
    portions = [result["state_bytes"] / num_bytes for result in results]
    assert max(portions) < 0.35, portions


@pytest.mark.parametrize("topology", ["flat", "deep"])
def test_consolidated_state_is_that_of_one_process(topology: str, run_fleets: Any) -> None:
    case = CASES["sometimes_unused"]
    shape = TOPOLOGIES[topology]
    batches = case.batches(NUM_STEPS, SIZE)
    results, _ = train_together(case, shape, RULES["sharded"], OPTIMIZERS["adam"], batches, run_fleets, with_state=True)
    alone = case.make()
    optimizer = OPTIMIZERS["adam"](case.groups(alone))
    shares = shares_of(shape.num_ranks, NUM_STEPS)
    used = [(x[: sum(s)], y[: sum(s)]) for (x, y), s in zip(batches, shares, strict=True)]
    train_alone(case, alone, optimizer, used, shares)
    expected = optimizer.state_dict()
    for result in results:
        found = result["optimizer"]
        assert found["param_groups"] == expected["param_groups"]
        assert found["state"].keys() == expected["state"].keys()
        for number, state in expected["state"].items():
            assert found["state"][number].keys() == state.keys()
            for key, value in state.items():
                torch.testing.assert_close(found["state"][number][key], value, rtol=1e-11, atol=1e-13)


def test_golden_trajectory(run_fleets: Any) -> None:
    """The losses of a fixed run, so that a change of arithmetic is noticed."""
    inputs = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(6, 2)
    targets = inputs.sum(1, keepdim=True) ** 2
    template = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        for number, parameter in enumerate(template.parameters()):
            parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).reshape(parameter.shape) + 0.1 * number)
    models = copies(template, 3)

    def body(fleet: Fleet) -> list[float]:
        model = models[fleet.rank]
        model, optimizer = distribute(
            model, torch.optim.AdamW(model.parameters(), lr=0.1), samples="batch", fleet=fleet
        )
        losses = []
        for _ in range(5):
            parts = [1, 2, 3]
            loss_of(model, inputs.split(parts)[fleet.rank], targets.split(parts)[fleet.rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses.append(float(loss_of(model, inputs, targets)))
        return losses

    for losses in run_fleets(3, body):
        assert losses == pytest.approx(GOLDEN_LOSSES, rel=1e-12)


GOLDEN_LOSSES = [2.7414141132991343, 2.057790509647609, 1.8208927729594733, 1.9627511021280537, 2.1123797408773015]


def test_copy_is_a_plain_model(run_fleets: Any) -> None:
    models = copies(CASES["perceptron"].make(), 2)

    def body(fleet: Fleet) -> bool:
        model, _ = distribute(models[fleet.rank], torch.optim.SGD(models[fleet.rank].parameters(), lr=0.1), fleet=fleet)
        twin = copy.deepcopy(model)
        loss_of(twin, torch.zeros(2, 6).double(), torch.zeros(2, 3).double()).backward()
        return all(parameter.grad is not None for parameter in twin.parameters())

    assert all(run_fleets(2, body))


@pytest.mark.parametrize("rule", ["sharded", "all_reduce"])
def test_bfloat16_equals_one_process_to_its_precision(rule: str, run_fleets: Any) -> None:
    base = CASES["perceptron"]
    case = Case(
        build=base.build, batch=lambda n, g: tuple(t.bfloat16() for t in base.batch(n, g)), dtype=torch.bfloat16
    )
    results, reference = train_together(
        case, TOPOLOGIES["flat"], RULES[rule], OPTIMIZERS["adamw"], case.batches(NUM_STEPS, SIZE), run_fleets
    )
    for result in results:
        assert result["hashes"] == results[0]["hashes"]
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(result["state"][name], value, rtol=0.05, atol=0.02, msg=name)
