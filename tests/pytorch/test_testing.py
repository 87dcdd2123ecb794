"""``syncline.testing``: what a test of training code sees of all ranks in one process."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import syncline
import syncline.testing
from syncline.pytorch.fleet import Fleet


def train(fleet: Fleet) -> torch.Tensor:
    generator = torch.Generator().manual_seed(fleet.rank)
    linear = nn.Linear(4, 1)
    model, optimizer = syncline.distribute(linear, torch.optim.SGD(linear.parameters(), lr=0.1), fleet=fleet)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    return model.weight.detach().clone()


@pytest.mark.parametrize("ranks", [3, "demo-1-3", syncline.Topology.flat(2)], ids=["number", "name", "topology"])
def test_all_ranks_train_one_model(ranks: int | str | syncline.Topology) -> None:
    first, *others = syncline.testing.run_ranks(ranks, train, seed=7)
    assert others
    assert all(torch.equal(first, other) for other in others)


def test_a_rank_that_raises_is_lost_to_the_others() -> None:
    def body(fleet: Fleet) -> None:
        if fleet.rank == 1:
            raise ValueError("no data")
        fleet.barrier()

    with pytest.raises(ValueError, match="no data"):
        syncline.testing.run_ranks(2, body, catch=syncline.PeerLostError)
    caught = syncline.testing.run_ranks(2, body, catch=(ValueError, syncline.PeerLostError))
    assert [type(error) for error in caught] == [syncline.PeerLostError, ValueError]


def test_a_rank_that_does_not_end_is_shown_where_it_is() -> None:
    may_end = threading.Event()

    def body(fleet: Fleet) -> None:
        if fleet.rank == 1:
            may_end.wait(60.0)

    with pytest.raises(
        syncline.DeadlineError, match=r"rank 1 had not ended.*rank 1 is in .*body \(test_testing.py:\d+\)"
    ):
        syncline.testing.run_ranks(2, body, deadline_s=0.2)
    may_end.set()
