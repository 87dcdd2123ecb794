"""Training whose smallest bucket moves through a segment: the parameters of training without one, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import syncline
from syncline.pytorch.fleet import Fleet
from syncline.runtime.shared_memory.opening import can_share
from syncline.topology import Topology
from syncline.updates import UpdateRule

pytestmark = pytest.mark.skipif(not can_share(2), reason="this platform has no segment")

NUM_STEPS = 6
BUCKET_BYTES = 1 << 14
RULES: dict[str, UpdateRule] = {
    "all-reduce": syncline.AllReduce(bucket_bytes=BUCKET_BYTES),
    "sharded": syncline.Sharded(bucket_bytes=BUCKET_BYTES),
    "whole parameters": syncline.Sharded(bucket_bytes=BUCKET_BYTES, align="parameter"),
    "under the next forward pass": syncline.Sharded(bucket_bytes=BUCKET_BYTES, overlap_forward=True),
    "in the backward pass": syncline.Sharded(bucket_bytes=BUCKET_BYTES, step_in_backward=True),
    "replicas of all": syncline.Sharded(bucket_bytes=BUCKET_BYTES, replicate=0),
}


def train(fleet: Fleet, rule: UpdateRule) -> tuple[list[torch.Tensor], int]:
    """Return the parameters after some steps, and how many calls of buckets were made in a segment."""
    model = torch.nn.Sequential(*(torch.nn.Linear(48, 48) for _ in range(4)))
    source = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=source) / 7)
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = syncline.distribute(model, inner, rule, fleet=fleet)
    inputs = torch.Generator().manual_seed(fleet.rank)
    for step in range(NUM_STEPS):
        model(torch.randn(5, 48, generator=inputs)).square().mean().backward()
        if step % 2 and rule is not RULES["in the backward pass"]:
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    syncline.synchronize(model)
    num_made = sum(
        sum(made.num_calls.values()) for stream, made in fleet.communicator._shared_memory.items() if stream != 0
    )
    return [parameter.detach().clone() for parameter in model.parameters()], num_made


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", list(RULES))
def test_parameters_are_those_without_a_segment(name: str, num_ranks: int, run_fleets: Any) -> None:
    rule = RULES[name]

    def with_segment(fleet: Fleet) -> tuple[list[torch.Tensor], int]:
        assert fleet.communicator.open_segment()
        return train(fleet, rule)

    is_engine_needed = name == "whole parameters" and num_ranks == 3  # to add in the order of the bucket's in-trees
    made = NUM_STEPS * (1 if name == "all-reduce" or is_engine_needed else 2)
    expected = run_fleets(num_ranks, lambda fleet: train(fleet, rule))
    for (ours, num_ours), (theirs, num_theirs) in zip(run_fleets(num_ranks, with_segment), expected, strict=True):
        assert (num_ours, num_theirs) == (made, 0)
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_network_that_is_tried_out_on_one_machine_is_kept_to(run_fleets: Any) -> None:
    def with_segment(fleet: Fleet) -> int:
        assert fleet.communicator.open_segment()
        return train(fleet, RULES["all-reduce"])[1]

    assert run_fleets(Topology.flat(2, rate=1e9), with_segment) == [0, 0]


def test_a_rank_that_is_lost_in_a_step_ends_the_others(run_fleets: Any) -> None:
    """The others wait in shared memory, on the training thread or on the one that updates."""

    def body(fleet: Fleet) -> None:
        assert fleet.communicator.open_segment()
        model = torch.nn.Linear(48, 48)
        inner = torch.optim.Adam(model.parameters(), lr=0.01)
        model, optimizer = syncline.distribute(model, inner, RULES["sharded"], fleet=fleet)
        for step in range(NUM_STEPS):
            model(torch.ones(1, 48)).sum().backward()
            if step == 2 and fleet.rank == 1:
                fleet.communicator.abort()
                return
            optimizer.step()
            optimizer.zero_grad()

    first, second, third = run_fleets(3, body, accept=syncline.SynclineError)
    assert second is None
    for error in (first, third):
        assert isinstance(error, syncline.PeerLostError)
        assert error.rank == 1
