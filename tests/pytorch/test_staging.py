"""Parameters outside host memory: every byte that moves between ranks goes through the wire tensors, both ways.

A device that is a thread copies to and from them, beside the training: whatever forgets to copy, or does not wait for a
copy, trains on NaN or on old numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracle_models import CASES, copies, loss_of, train_alone

from syncline.errors import UpdateError
from syncline.pytorch.checkpoint import load_checkpoint, save_checkpoint
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.tensors.device_copies import CopyKind
from syncline.updates import AllReduce, Clustered, LocalSteps, Sharded, UpdateRule
from thread_device import ThreadDevice, hold_buckets

RULES: dict[str, UpdateRule] = {
    "sharded": Sharded(bucket_bytes=2000),
    "overlap_forward": Sharded(bucket_bytes=2000, overlap_forward=True),
    "step_in_backward": Sharded(bucket_bytes=2000, step_in_backward=True),
    "whole_parameters": Sharded(align="parameter", bucket_bytes=2000),
    "all_reduce": AllReduce(bucket_bytes=2000),
    "within": LocalSteps(period=2, parties=[(0, 1)], within=Sharded(bucket_bytes=2000)),  # whose rounds change nothing
    "clustered": Clustered(period=1, clusters=1),
    "clustered_within": Clustered(period=1, clusters=((0, 1), (2, 3)), within=Sharded(bucket_bytes=2000)),
}
PARTS, OF_TWO_CLUSTERS = [3, 5], [2, 3, 1, 2]
NUM_STEPS = 6


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadDevice]:
    """Give each bucket wire tensors of their own, full of NaN until something is staged."""
    yield from hold_buckets(monkeypatch)


@pytest.mark.parametrize("name", RULES)
def test_training_through_wire_tensors_is_that_of_one_process(name: str, device: ThreadDevice, run_fleets: Any) -> None:
    case = CASES["perceptron"]
    reference = case.make()
    parts = OF_TWO_CLUSTERS if name == "clustered_within" else PARTS
    models = copies(reference, len(parts))
    batches = case.batches(NUM_STEPS, sum(parts))
    train_alone(case, reference, adam(reference), batches, [parts] * NUM_STEPS)

    def body(fleet: Fleet) -> None:
        model, optimizer = distribute(
            models[fleet.rank], adam(models[fleet.rank]), RULES[name], samples="batch", fleet=fleet
        )
        for inputs, targets in batches:
            loss_of(model, inputs.split(parts)[fleet.rank], targets.split(parts)[fleet.rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()

    run_fleets(len(parts), body)
    assert min(device.num_copied.values()) >= NUM_STEPS
    for model in models:
        for key, value in model.state_dict().items():
            torch.testing.assert_close(value, reference.state_dict()[key], rtol=1e-9, atol=1e-10, msg=key)


def test_a_checkpoint_holds_what_the_model_has_and_comes_back_there(tmp_path: Any, run_fleets: Any) -> None:
    case = CASES["perceptron"]
    models = copies(case.make(), 2)
    (inputs, targets), *_ = case.batches(1, sum(PARTS))

    def body(fleet: Fleet) -> None:
        model, optimizer = distribute(
            models[fleet.rank], adam(models[fleet.rank]), RULES["sharded"], samples="batch", fleet=fleet
        )

        def step() -> None:
            loss_of(model, inputs.split(PARTS)[fleet.rank], targets.split(PARTS)[fleet.rank]).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        save_checkpoint(tmp_path / "checkpoint", model, optimizer)
        step()
        after = {name: value.clone() for name, value in model.state_dict().items()}
        load_checkpoint(tmp_path / "checkpoint", model, optimizer)
        step()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, after[name], rtol=0, atol=0, msg=name)

    run_fleets(2, body)


def test_backward_waits_for_no_copy_and_nothing_is_sent_before_its_own(device: ThreadDevice, run_fleets: Any) -> None:
    """Copies to the host are held until both ranks have come back from backward(): what was sent by then were NaN."""
    case = CASES["perceptron"]
    models = copies(case.make(), 2)
    (inputs, targets), *_ = case.batches(1, sum(PARTS))

    def body(fleet: Fleet) -> None:
        model, optimizer = distribute(
            models[fleet.rank], adam(models[fleet.rank]), RULES["sharded"], samples="batch", fleet=fleet
        )
        fleet.barrier()
        num_copied = device.num_copied[CopyKind.TO_HOST]
        device.hold(CopyKind.TO_HOST)
        fleet.barrier()
        loss_of(model, inputs.split(PARTS)[fleet.rank], targets.split(PARTS)[fleet.rank]).backward()
        fleet.barrier()
        assert device.num_copied[CopyKind.TO_HOST] == num_copied
        fleet.barrier()
        device.let_go(CopyKind.TO_HOST)
        optimizer.step()
        optimizer.synchronize()

    run_fleets(2, body)
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        assert first.isfinite().all()
        assert torch.equal(first, second)


def test_a_model_that_a_cuda_graph_replays_is_refused_before_its_parameters_move(run_fleets: Any) -> None:
    def make_graphed_callables(module: torch.nn.Module) -> None:  # as torch.cuda's, of which the name shows
        def forward(inputs: torch.Tensor) -> torch.Tensor:
            return inputs

        module.forward = forward

    def body(fleet: Fleet) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        make_graphed_callables(model[0])
        where = model[0].weight.data_ptr()
        with pytest.raises(UpdateError, match=r"Module '0' went through .* call distribute\(\) first"):
            distribute(model, adam(model), Sharded(), fleet=fleet)
        assert model[0].weight.data_ptr() == where

    run_fleets(2, body)
