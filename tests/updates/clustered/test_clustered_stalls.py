"""A rank that lives, but whose training thread hangs, is left behind by its cluster and by the others."""

import threading

import pytest
import torch
from clustered_training import batch

from small_regression import loss_of, make_model, make_sgd, parameters_of
from syncline.errors import SynclineError
from syncline.pytorch.distribute import distribute
from syncline.updates import AllReduce
from syncline.updates.clustered.driver import ClusterDriver
from syncline.updates.clustered.rule import Clustered
from thread_fleets import run_fleets

NUM_RANKS = 5
CLUSTERS = ((0, 1, 2), (3,), (4,))
NUM_STEPS = 8


@pytest.mark.parametrize("hangs", [0, 1, 2, 3])
def test_who_hangs_is_left_behind_and_told_when_it_wakes(hangs: int) -> None:
    """Members and temporary servers of a cluster, and a whole cluster of one."""
    fleets = {}
    all_are_there, others_are_done = threading.Barrier(NUM_RANKS), threading.Event()
    done = []

    def hang() -> None:
        for rank, fleet in fleets.items():
            fabric = fleet.communicator._fabric
            for passed_s in (0.0, 30.0) if rank != hangs else ():
                fabric._network.loop.call_soon(fabric.stalls.tick, passed_s, {hangs: 4})
        assert others_are_done.wait(60)

    def body(fleet):
        fleets[fleet.rank] = fleet
        fleet.communicator._fabric.stalls.limit_s = 0.2
        model = make_model()
        rule = Clustered(period=2, reelect_every=2, clusters=CLUSTERS)
        model, optimizer = distribute(model, make_sgd(model.parameters()), rule, fleet=fleet)
        all_are_there.wait(60)
        for step in range(NUM_STEPS):
            if (fleet.rank, step) == (hangs, 3):
                hang()
            loss_of(model, *batch(fleet.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        done.append(fleet.rank)
        if len(done) == NUM_RANKS - 1:
            others_are_done.set()
        return parameters_of(model), optimizer.statistics().dead

    results = run_fleets(NUM_RANKS, body, accept=SynclineError)
    survivors = [results[rank] for rank in range(NUM_RANKS) if rank != hangs]
    for parameters, dead in survivors:
        assert torch.equal(parameters, survivors[0][0])
        assert dead == (hangs,)
    assert "its training thread hung, and the job went on without it" in str(results[hangs])


def test_who_has_a_part_in_collectives_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where these make the means of a cluster; the others have looked for it when it goes on."""
    fleets, all_are_there, others_have_looked = {}, threading.Barrier(NUM_RANKS), threading.Event()
    leave_behind = ClusterDriver._leave_behind

    def look(driver: ClusterDriver) -> None:
        leave_behind(driver)
        others_have_looked.set()

    monkeypatch.setattr(ClusterDriver, "_leave_behind", look)

    def body(fleet):
        fleets[fleet.rank] = fleet
        fleet.communicator._fabric.stalls.limit_s = 0.2
        model = make_model()
        rule = Clustered(period=2, clusters=CLUSTERS, within=AllReduce())
        model, optimizer = distribute(model, make_sgd(model.parameters()), rule, samples="batch", fleet=fleet)
        all_are_there.wait(60)
        for step in range(NUM_STEPS):
            if (fleet.rank, step) == (3, 3):
                for other in fleets.values():
                    fabric = other.communicator._fabric
                    for passed_s in (0.0, 30.0) if other is not fleet else ():
                        fabric._network.loop.call_soon(fabric.stalls.tick, passed_s, {3: 4})
                assert others_have_looked.wait(60)
            loss_of(model, *batch(fleet.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return parameters_of(model)

    first, *others = run_fleets(NUM_RANKS, body)
    assert all(torch.equal(first, other) for other in others)


def test_a_fault_on_the_loop_ends_every_rank_that_has_it() -> None:
    """In memory all ranks share a loop; none waits until its deadline."""

    def fault() -> None:
        raise ValueError("a fault")

    def body(fleet):
        model = make_model()
        rule = Clustered(period=2, reelect_every=2, clusters=CLUSTERS)
        model, optimizer = distribute(model, make_sgd(model.parameters()), rule, fleet=fleet)
        for step in range(NUM_STEPS):
            if (fleet.rank, step) == (1, 3):
                optimizer.training.updater._driver._port.call_soon(fault)
            loss_of(model, *batch(fleet.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    for rank, error in enumerate(run_fleets(NUM_RANKS, body, accept=SynclineError, timeout_s=30.0)):
        assert str(error) == f"the communication loop of rank {rank} (host memory) failed: ValueError('a fault')"


def test_who_has_more_batches_than_the_others_is_told_who_ended_and_when() -> None:
    def body(fleet):
        model = make_model()
        rule = Clustered(period=2, clusters=((0, 1, 2),))
        model, optimizer = distribute(model, make_sgd(model.parameters()), rule, fleet=fleet)
        for step in range(5 if fleet.rank == 1 else 3):
            loss_of(model, *batch(fleet.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    first, error, last = run_fleets(3, body, accept=SynclineError, timeout_s=1.0)
    assert (first, last) == (None, None)
    assert str(error).startswith(
        "rank 0 (host memory) and rank 2 (host memory) ended the training before rank 1 (host memory) did: rank 1 "
        "(host memory) waited 1 s, awaiting the mean of batch 4, for which "
    )
    assert "give all ranks the same number of batches" in str(error)
    assert error.ranks_at_fault == (0, 2)
