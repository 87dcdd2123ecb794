"""A fleet with the default quorum goes on without those who die, leave, or are cut off; at most in one place."""

import asyncio
import threading
from functools import partial

import pytest
import torch
from overlapped_training import one_step, start

from small_regression import make_adam, parameters_of
from syncline.errors import PeerLostError, UpdateError
from syncline.members import QuorumLostError
from syncline.topology import Topology
from syncline.updates import Overlapped
from syncline.updates.overlapped.link import Message, WorkerLink
from syncline.updates.overlapped.placement import Move, Succession
from syncline.updates.overlapped.server_client import ServerClient
from syncline.updates.rounds import Round
from thread_fleets import run_fleets, run_over_tcp

PERIOD = 8


class DeathError(Exception):
    """This rank dies here."""


def train(fleet, rule, *, num_iterations=40, before_step=lambda fleet, step: None):
    model, optimizer = start(fleet, rule, make_adam)
    if optimizer.is_server:
        return optimizer.serve()
    step = 0
    while optimizer.iteration < num_iterations:
        before_step(fleet, step)
        one_step(model, optimizer, fleet.rank, step)
        step += 1
    optimizer.end_period()
    return parameters_of(model), optimizer.statistics(), optimizer.iteration


def check_survivors(results, survivors, *, num_periods=5):
    for rank in survivors:
        parameters, statistics, iteration = results[rank]
        assert torch.equal(parameters, results[survivors[0]][0])
        assert (statistics.num_periods, iteration) == (num_periods, num_periods * PERIOD)


@pytest.mark.parametrize("options", [{}, {"servers": "dedicated:1"}])
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("deaths", [{1: 9}, {0: 9, 3: 17}, {2: 8, 1: 8}, {4: 6}])
def test_the_rest_go_on_after_deaths(deaths: dict[int, int], seed: int | None, options: dict) -> None:
    """Periods end by all-reduce before the first death, and through the servers after it."""

    def die(fleet, step):
        if deaths.get(fleet.rank) == step:
            raise DeathError

    rule = Overlapped(period=PERIOD, max_staleness=4, bucket_bytes=128, **options)
    num_ranks = 6 if "servers" in options else 5
    results = run_fleets(num_ranks, lambda fleet: train(fleet, rule, before_step=die), accept=DeathError, seed=seed)
    check_survivors(results, [rank for rank in range(5) if rank not in deaths])


def check_a_death_in_an_end(network, rule, victim: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five ranks the victim has taken part in the first collective of that end, and not in the others."""
    begin = Round._begin

    def begin_and_die(self):
        if self._rank == victim:
            raise DeathError
        return begin(self)

    monkeypatch.setattr(Round, "_begin", begin_and_die)
    results = run_fleets(network, lambda fleet: train(fleet, rule), accept=(DeathError, UpdateError), seed=seed)
    assert isinstance(results[victim], DeathError)
    check_survivors(results, [rank for rank in range(5) if rank != victim])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_while_a_period_ends(victim: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Overlapped(period=PERIOD, max_staleness=4, bucket_bytes=128)
    check_a_death_in_an_end(5, rule, victim, seed, monkeypatch)


@pytest.mark.parametrize("knowing", [(1,), (1, 2), (0, 1, 2)])
def test_a_mean_that_only_some_have_is_given_to_the_others(knowing: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3 dies when the collective is over on some ranks; on the others it counts as failed."""
    finish = ServerClient._sum_on_tree

    def finish_or_fail(self, *arguments):
        ends = finish(self, *arguments)
        if self._port.rank == 3:
            raise DeathError
        if self._port.rank not in knowing:
            raise PeerLostError("rank 3 died", rank=3, host="memory")
        return ends

    monkeypatch.setattr(ServerClient, "_sum_on_tree", finish_or_fail)
    rule = Overlapped(period=PERIOD, max_staleness=4, bucket_bytes=128)
    results = run_fleets(4, lambda fleet: train(fleet, rule), accept=DeathError)
    check_survivors(results, [0, 1, 2])


async def let_all_land() -> None:
    for _ in range(1000):
        await asyncio.sleep(0)


def test_a_loss_while_the_end_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 dies while rank 3, whose mean broke with rank 2's death, writes what it will send to the new servers."""
    is_writing, ending, have_mean = threading.Event(), {}, threading.Semaphore(0)
    sum_of, end, write = ServerClient._sum_on_tree, WorkerLink.end, Message.write

    def sum_or_fail(self, *arguments):
        ends = sum_of(self, *arguments)
        have_mean.release()
        if self._port.rank == 3:
            raise PeerLostError("rank 2 died", rank=2, host="memory")
        return ends

    def end_and_tell(self, parts, **arguments):
        if self._port.rank == 3 and self.server == 1:
            ending[threading.get_ident()] = self
        end(self, parts, **arguments)

    def write_slowly(self, record):
        link = ending.pop(threading.get_ident(), None)
        if link is not None:
            is_writing.set()
            with link._changed:
                assert link._changed.wait_for(lambda: link.server != 1, 60)
            link._port.run(let_all_land(), 10)
        write(self, record)

    def die(fleet, step):
        # While others still sum, rank 2's death would break their means too, and rank 1 would not come so far.
        waits = {1: lambda: is_writing.wait(60), 2: lambda: all(have_mean.acquire(timeout=60) for _ in range(5))}
        if fleet.rank in waits and step == PERIOD:
            assert waits[fleet.rank]()
            raise DeathError

    monkeypatch.setattr(ServerClient, "_sum_on_tree", sum_or_fail)
    monkeypatch.setattr(WorkerLink, "end", end_and_tell)
    monkeypatch.setattr(Message, "write", write_slowly)
    rule = Overlapped(period=PERIOD, max_staleness=4, bucket_bytes=128)
    results = run_fleets(5, lambda fleet: train(fleet, rule, before_step=die), accept=DeathError)
    check_survivors(results, [0, 3, 4])


def disconnect(some, others) -> None:
    """Let ranks lose each other, though all of them live."""
    for first in some:
        for second in others:
            for one, other in ((first, second), (second, first)):
                fabric, peer = one.communicator._fabric, other.communicator._fabric.rank
                error = UpdateError(f"the connection to rank {peer} is broken")
                fabric._network.loop.call_soon(fabric._lose, peer, error)


@pytest.mark.parametrize("options", [{"quorum": 2}, {}])
def test_a_broken_connection_costs_the_higher_rank_alone(options: dict) -> None:
    """Ranks 0 and 3 lose each other; 3 hosts shards, which everybody must move to the same successors."""

    def break_it(fleet, step):
        if fleet.rank == 0 and step == 12:
            fabric = fleet.communicator._fabric
            fleet.communicator._loop.call_soon(
                partial(fabric.on_broken, fabric._peers[3], "is cut off", must_tell=True)
            )

    rule = Overlapped(period=PERIOD, max_staleness=4, bucket_bytes=128, **options)
    train_and_break = partial(train, rule=rule, before_step=break_it)
    results = run_over_tcp(Topology.flat(4), train_and_break, accept=UpdateError)
    check_survivors(results, [0, 1, 2])
    assert isinstance(results[3], QuorumLostError)
    assert all(3 in results[rank][1].lost for rank in range(3))


@pytest.mark.parametrize("quorum", [None, 2])
def test_of_two_halves_only_the_one_with_the_lowest_rank_goes_on(quorum: int | None) -> None:
    fleets = {}

    def cut(fleet, step):
        fleets[fleet.rank] = fleet
        if fleet.rank == 1 and step == 12:
            disconnect([fleets[0], fleets[1]], [fleets[2], fleets[3]])

    rule = Overlapped(period=PERIOD, quorum=quorum, max_staleness=4, bucket_bytes=128)
    results = run_fleets(4, lambda fleet: train(fleet, rule, before_step=cut), accept=QuorumLostError)
    check_survivors(results, [0, 1])
    if quorum is None:
        for rank in (2, 3):
            assert isinstance(results[rank], QuorumLostError)
            assert "workers are in reach: rank 0 (host memory)" in str(results[rank])
    else:
        check_survivors(results, [2, 3])


def test_those_who_leave_early_are_not_waited_for() -> None:
    """Ranks 0 and 2 end after two periods, one of them in the middle of the third; the other two go on."""

    def body(fleet):
        rule = Overlapped(period=PERIOD, max_staleness=4, bucket_bytes=128)
        return train(fleet, rule, num_iterations=16 if fleet.rank in (0, 2) else 40)

    results = run_fleets(4, body)
    check_survivors(results, [0, 2], num_periods=2)
    check_survivors(results, [1, 3])


def test_all_ranks_move_buckets_to_the_same_servers_in_any_order() -> None:
    after = {}
    for order in ((1, 2), (2, 1)):
        succession, lost = Succession(Overlapped().layout(4), range(4)), set()
        moves: list[Move] = []
        for rank in order:
            lost.add(rank)
            moves += succession.moves(lost)
        after[order] = {move.position: move for move in moves}
    assert after[1, 2] == after[2, 1]
    assert [(move.server, move.epoch) for _, move in sorted(after[1, 2].items())] == [(0, 1), (3, 3), (3, 2), (3, 1)]
