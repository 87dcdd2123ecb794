"""Training where one rank of each host speaks for it: the same steps, no state behind gateways; helpers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gateway_models import hosts_of_2_3_1
from oracle_models import CASES, copies, loss_of, train_alone
from torch import nn

from syncline.errors import UpdateError
from syncline.pytorch.checkpoint import load_checkpoint, save_checkpoint
from syncline.pytorch.control import join
from syncline.pytorch.data import sampler
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.updates import AllReduce, Clustered, Sharded, UpdateRule

RULES: dict[str, UpdateRule] = {"sharded": Sharded(bucket_bytes=300), "all_reduce": AllReduce(bucket_bytes=300)}
by_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
WHOLE = Sharded(bucket_bytes=300, align="parameter")
CASE = CASES["perceptron"]
SIZES = (3, 1, 4, 2, 5, 2)
STEPS = 4
BEHIND = (1, 3, 4)
HELPERS = (0, 2)
TRAINERS = (1, 3, 4, 5)


def make(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02)


def train(fleet: Fleet, model: nn.Module, rule: UpdateRule) -> int:
    """Train on this rank's part of each batch; return the bytes of its state."""
    model, optimizer = distribute(model, make(model), rule, samples="batch", fleet=fleet)
    for inputs, targets in CASE.batches(STEPS, sum(SIZES)):
        loss_of(model, inputs.split(SIZES)[fleet.rank], targets.split(SIZES)[fleet.rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.num_state_bytes


def assert_equal(model: nn.Module, reference: nn.Module) -> None:
    for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=CASE.tolerance)


@pytest.mark.parametrize("rule", [*RULES.values(), WHOLE], ids=[*RULES, "whole_parameters"])
def test_steps_are_those_of_one_process_and_of_ranks_that_all_speak(rule: UpdateRule, run_fleets: Any) -> None:
    reference = CASE.make()
    gated, flat = copies(reference, 6), copies(reference, 6)
    state_bytes = run_fleets(hosts_of_2_3_1("one"), lambda fleet: train(fleet, gated[fleet.rank], rule))
    run_fleets(6, lambda fleet: train(fleet, flat[fleet.rank], rule))
    train_alone(CASE, reference, make(reference), CASE.batches(STEPS, sum(SIZES)), [SIZES] * STEPS)
    for model, other in zip(gated, flat, strict=True):
        assert_equal(model, reference)
        assert_equal(model, other)
    if isinstance(rule, Sharded):
        assert [state_bytes[rank] for rank in BEHIND] == [0, 0, 0]
        assert rule is WHOLE or all(state_bytes[rank] for rank in (0, 2, 5))


def follow(fleet: Fleet, model: nn.Module, rule: UpdateRule, folder: Path, *, serves: bool) -> tuple[int, int]:
    """Train on ranks with data, each for another number of steps; return steps and bytes of state."""
    model, optimizer = distribute(model, make(model), rule, samples="batch", fleet=fleet)
    assert optimizer.is_server == (fleet.rank in HELPERS)
    if serves and optimizer.is_server:
        optimizer.serve()
    for step, (inputs, targets) in enumerate(CASE.batches(STEPS, sum(SIZES))):
        if optimizer.is_server or step >= STEPS - (fleet.rank == 4):
            break
        loss_of(model, inputs.split(SIZES)[fleet.rank], targets.split(SIZES)[fleet.rank]).backward()
        optimizer.clip_grad_norm_(1e9)
        optimizer.step()
        optimizer.zero_grad()
        if serves and step == 1:
            save_checkpoint(folder, model, optimizer, extra={"step": step})
    return optimizer.iteration, optimizer.num_state_bytes


@pytest.mark.parametrize("serves", [True, False])
@by_rule
def test_helpers_follow_ranks_with_data(rule: UpdateRule, serves: bool, run_fleets: Any, tmp_path: Path) -> None:
    reference = CASE.make()
    models = copies(reference, 6)
    state_bytes = run_fleets(
        hosts_of_2_3_1("helper"),
        lambda fleet: follow(fleet, models[fleet.rank], rule, tmp_path / "saved", serves=serves)[1],
    )
    optimizer = make(reference)
    for step, (inputs, targets) in enumerate(CASE.batches(STEPS, sum(SIZES))):
        own = [rank for rank in TRAINERS if step < STEPS - (rank == 4)]
        loss_of(
            reference, *(torch.cat([part.split(SIZES)[rank] for rank in own]) for part in (inputs, targets))
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
        if serves and step == 1:
            loaded = CASE.make()
            assert load_checkpoint(tmp_path / "saved", loaded, make(loaded)) == {"step": 1}
            assert_equal(loaded, reference)
    for model in models:
        assert_equal(model, reference)
    if isinstance(rule, Sharded) and serves:
        assert [rank for rank in range(6) if not state_bytes[rank]] == [*BEHIND]


def test_buffers_are_those_of_the_first_rank_with_data(run_fleets: Any) -> None:
    models = copies(nn.BatchNorm1d(6), 6)

    def body(fleet: Fleet) -> None:
        model, optimizer = distribute(models[fleet.rank], make(models[fleet.rank]), fleet=fleet)
        if not optimizer.is_server:
            model(torch.full((4, 6), float(fleet.rank))).sum().backward()
            optimizer.step()

    run_fleets(hosts_of_2_3_1("helper"), body)
    for model in models:
        torch.testing.assert_close(model.running_mean, torch.full((6,), 0.1))  # of rank 1: momentum 0.1 times 1


def test_helpers_take_no_samples(run_fleets: Any) -> None:
    taken = run_fleets(hosts_of_2_3_1("helper"), lambda fleet: list(sampler(range(8), shuffle=False, fleet=fleet)))
    assert [len(samples) for samples in taken] == [0, 2, 0, 2, 2, 2]
    assert sorted(sample for samples in taken for sample in samples) == list(range(8))


def test_what_cannot_be_with_helpers_is_refused(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        model = nn.Linear(2, 1)
        with pytest.raises(UpdateError, match=r"gateway: helper does not go with Clustered\(\), in which not every"):
            distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), Clustered(clusters=1), fleet=fleet)

    run_fleets(hosts_of_2_3_1("helper"), body)

    def joins(fleet: Fleet) -> None:
        model = nn.Linear(2, 1)
        distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), fleet=fleet)
        with pytest.raises(UpdateError, match="nor with helpers in the topology"), join(model):
            pass

    run_fleets(hosts_of_2_3_1("helper"), joins)


def test_a_checkpoint_that_a_helper_cannot_know_of_is_an_error(run_fleets: Any, tmp_path: Path) -> None:
    def body(fleet: Fleet) -> None:
        model = nn.Linear(2, 1)
        _, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), fleet=fleet)
        if not optimizer.is_server:
            save_checkpoint(tmp_path / "saved", model, optimizer)

    results = run_fleets(hosts_of_2_3_1("helper"), body, accept=Exception)
    assert any("on a helper call optimizer.serve()" in str(result) for result in results)
