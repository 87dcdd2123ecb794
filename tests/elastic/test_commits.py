"""Losses at the commit of a pass: what not every member is known to have counts nowhere."""

import threading

import pytest
import torch
from mortal_fleets import DiedError

import syncline
from syncline.updates.elastic_calls import ElasticControlStream
from thread_fleets import run_fleets

WAIT_S = 60.0
RULES = {"all-reduce": syncline.AllReduce(), "sharded": syncline.Sharded(spares=1)}


@pytest.mark.parametrize("name", RULES)
def test_a_pass_that_is_not_committed_is_made_again_without_the_lost_rank(name, monkeypatch):
    """Rank 1 has sent its gradients and dies before it commits, when rank 0 has them and has begun to commit."""
    start_commit, is_begun = ElasticControlStream.start_commit, threading.Event()
    fleets = {}

    def start_or_die(self, make, label):
        if self.rank == 1:
            assert is_begun.wait(WAIT_S)
            fleets[1].base.abort()
            raise DiedError
        call = start_commit(self, make, label)
        is_begun.set()
        return call

    monkeypatch.setattr(ElasticControlStream, "start_commit", start_or_die)

    def body(fleet):
        fleets[fleet.rank] = fleet
        model = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = syncline.distribute(model, optimizer, RULES[name], elastic=True, fleet=fleet)
        model(torch.full((1, 4), 1.0 + 2.0 * fleet.rank)).sum().backward()  # 1 on rank 0, and 2 in the mean of both
        optimizer.step()
        return model.weight.flatten().tolist(), fleet.members

    lived, died = run_fleets(2, body, accept=DiedError)
    assert isinstance(died, DiedError)
    assert lived == ([-1.0] * 4, (0,))
