"""A rank that lives, but whose training thread hangs, is left behind; when it wakes it is told."""

import threading

import pytest
import torch
from overlapped_training import one_step, sites, start

from small_regression import make_adam, parameters_of
from syncline.errors import UpdateError
from syncline.topology import Topology
from syncline.updates import Overlapped
from thread_fleets import run_fleets

PERIOD = 8
HANGS, HANGS_AT = 2, 11
NUM_RANKS = 4
LIMIT_S = 0.2


class Hang:
    """Lets one rank stop in a step, and its heartbeats say so to the others, until these have come to their end."""

    def __init__(self) -> None:
        self.fleets = {}
        self._all_are_there = threading.Barrier(NUM_RANKS)
        self._others_are_done = threading.Event()
        self._num_done = 0

    def begin(self, fleet) -> None:
        self.fleets[fleet.rank] = fleet
        fleet.communicator._fabric.stalls.limit_s = LIMIT_S
        self._all_are_there.wait(60)

    def hang(self) -> None:
        for rank, fleet in self.fleets.items():
            if rank != HANGS:
                fabric = fleet.communicator._fabric
                for passed_s in (0.0, 30.0):
                    fabric._network.loop.call_soon(fabric.stalls.tick, passed_s, {HANGS: 4})
        assert self._others_are_done.wait(60)

    def done(self) -> None:
        self._num_done += 1
        if self._num_done == NUM_RANKS - 1:
            self._others_are_done.set()


FLAT, IN_SITES = Topology.flat(NUM_RANKS), sites(NUM_RANKS - 2, 2)


@pytest.mark.parametrize(
    ("topology", "options"),
    [
        (FLAT, {"quorum": NUM_RANKS - 1}),
        (FLAT, {}),
        (FLAT, {"quorum": 2, "max_staleness": None}),
        (IN_SITES, {}),
        (IN_SITES, {"bucket_bytes": 4096}),
    ],
)
def test_who_hangs_is_left_behind_and_told_when_it_wakes(topology: Topology, options: dict) -> None:
    """In sites it is the relay of the far one, for some buckets or the only one."""
    hang = Hang()

    def body(fleet):
        rule = Overlapped(**{"period": PERIOD, "max_staleness": 4, "bucket_bytes": 128, **options})
        model, optimizer = start(fleet, rule, make_adam)
        hang.begin(fleet)
        step = 0
        while optimizer.iteration < 3 * PERIOD:
            if (fleet.rank, step) == (HANGS, HANGS_AT):
                hang.hang()
            one_step(model, optimizer, fleet.rank, step)
            step += 1
        hang.done()
        return parameters_of(model), optimizer.statistics()

    results = run_fleets(topology, body, accept=UpdateError)
    survivors = [results[rank] for rank in range(NUM_RANKS) if rank != HANGS]
    for parameters, statistics in survivors:
        assert torch.equal(parameters, survivors[0][0])
        assert statistics.num_periods == 3
        assert HANGS in statistics.lost
    assert f"rank {HANGS} (host memory) was left behind: rank " in str(results[HANGS])
    assert "takes this rank for hung" in str(results[HANGS])


def test_who_is_slow_but_not_waited_for_is_not_left_behind() -> None:
    """Rank 2 hangs at the very end of a period, when all others have gone; nobody waits, and it ends its own step."""
    hang = Hang()

    def body(fleet):
        rule = Overlapped(period=PERIOD, quorum=3, max_staleness=None, bucket_bytes=128)
        model, optimizer = start(fleet, rule, make_adam)
        hang.begin(fleet)
        for step in range(4):
            if (fleet.rank, step) == (HANGS, 3):
                hang.hang()
            one_step(model, optimizer, fleet.rank, step)
        lost = optimizer.statistics().lost
        hang.done()
        hang.fleets[fleet.rank].communicator._fabric.stalls.limit_s = 1e9
        return lost

    assert run_fleets(NUM_RANKS, body) == [()] * NUM_RANKS
