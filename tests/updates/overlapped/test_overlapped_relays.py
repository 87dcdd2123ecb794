"""Workers of a site push to a relay: what crosses between sites, what follows from it, and who may die."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from overlapped_recording import record
from overlapped_replay import replay
from overlapped_training import one_step, sites, start, train_alone, wait_for_silent
from test_overlapped_oracles import make_replica
from test_overlapped_survival import PERIOD, DeathError, check_a_death_in_an_end, check_survivors, disconnect, train

from small_regression import make_adam, make_sgd, parameters_of
from syncline.members import QuorumLostError
from syncline.pytorch.distribute import distribute
from syncline.schedule.replicas import find_parties
from syncline.topology import Topology
from syncline.updates import Overlapped
from syncline.updates.overlapped.link import HostedRelay, HostedShard
from syncline.updates.overlapped.placement import place_relays, place_shards
from syncline.updates.overlapped.relay import RelayShard
from syncline.updates.overlapped.server import Fold, Forward, Push, Reply, Stop, Take
from thread_fleets import run_fleets, run_over_tcp

# --- who relays -------------------------------------------------------------------------------------------------------


def relays_of(topology: Topology, num_buckets: int, **options):
    layout = Overlapped(**options).layout(topology.num_ranks)
    num_bytes = [100] * num_buckets
    placed = place_shards(topology, layout.servers, num_bytes)
    return placed, place_relays(layout, find_parties(topology, "auto"), placed, num_bytes)


def test_each_site_without_the_server_has_a_relay_and_its_ranks_share_the_work() -> None:
    placed, relays = relays_of(sites(2, 2), 4)
    assert placed == (0, 2, 1, 3)
    assert relays == ({2: 2, 3: 2}, {0: 0, 1: 0}, {2: 3, 3: 3}, {0: 1, 1: 1})


def test_a_rank_that_is_alone_in_its_site_pushes_by_itself() -> None:
    placed, relays = relays_of(sites(3, 1), 4)
    for server, relay_of in zip(placed, relays, strict=True):
        assert set(relay_of) == (set() if server < 3 else {0, 1, 2})
    assert relays_of(Topology.flat(4), 4)[1] == ({},) * 4


@pytest.mark.parametrize("options", [{"quorum": 3}, {"quorum": 4}, {"servers": "dedicated:1"}])
def test_who_does_not_need_all_workers_that_live_has_no_relays(options: dict) -> None:
    assert relays_of(sites(2, 2), 4, **options)[1] == ({},) * 4


# --- what a relay decides ---------------------------------------------------------------------------------------------


def push(worker: int, round_number: int, *, period: int = 0, weight: float = 8.0) -> Push:
    return Push(worker=worker, period=period, round_number=round_number, iteration=round_number + worker, weight=weight)


def answer(closed: int, accepted: int, *, period: int = 0) -> Reply:
    return Reply(worker=3, period=period, closed=closed, clock=accepted, accepted=accepted)


def test_a_relay_sends_one_mean_and_hands_the_answer_on() -> None:
    relay = RelayShard(rank=3, workers=(2, 3))
    second, first = push(3, 1, weight=2.0), push(2, 1)
    assert relay.hear(second) == []
    assert relay.missing() == (2,)
    mean = Push(worker=3, period=0, round_number=1, iteration=3, weight=10.0)
    assert relay.hear(first) == [Forward(push=mean, contributions=(first, second))]
    assert relay.missing() == ()
    assert relay.sent() == []
    assert relay.answer(answer(1, 1)) == [
        Take(),
        Reply(worker=2, period=0, closed=1, clock=1, accepted=1),
        Reply(worker=3, period=0, closed=1, clock=1, accepted=1),
    ]
    assert relay.dropped == {}


def test_the_next_mean_waits_until_the_last_one_has_left() -> None:
    relay = RelayShard(rank=3, workers=(2, 3))
    relay.hear(push(2, 1))
    relay.hear(push(3, 1))
    relay.hear(push(2, 1, period=1))
    assert relay.hear(push(3, 1, period=1)) == []
    assert relay.missing() == ()
    [forward] = relay.sent()
    assert forward.push.period == 1
    assert relay.dropped == {}, "the server counts what went there"


def test_a_round_that_the_server_closed_without_this_site_drops_what_lies_here() -> None:
    relay = RelayShard(rank=3, workers=(2, 3))
    relay.hear(push(2, 1))
    assert relay.answer(answer(2, 0))[1:] == [
        Reply(worker=rank, period=0, closed=2, clock=0, accepted=0) for rank in (2, 3)
    ]
    assert relay.answer(answer(2, 0)) == []
    relay.hear(push(3, 1))  # it was on its way
    assert relay.dropped == {2: 1, 3: 1}


def test_who_stops_lets_rounds_after_its_last_be_abandoned_and_the_server_is_told_when_that_is_closed() -> None:
    relay = RelayShard(rank=3, workers=(2, 3))
    relay.hear(push(2, 1))
    relay.hear(push(3, 1))
    relay.sent()
    assert relay.stop(2, period=0, last_round=1) == []
    replied = [Reply(worker=3, period=0, closed=1, clock=1, accepted=1)]
    assert relay.answer(answer(1, 1)) == [Take(), *replied, Stop(period=0, last_round=1)]
    relay.replied(3)
    assert relay.hear(push(3, 2)) == [Reply(worker=3, period=0, closed=2, clock=1, accepted=1)]
    assert relay.stop(3, period=0, last_round=2) == []
    assert relay.dropped == {3: 1}


def test_a_round_that_lacks_a_lost_worker_goes_nowhere() -> None:
    relay = RelayShard(rank=3, workers=(1, 2, 3))
    relay.hear(push(2, 1))
    told = [*relay.lose(1), *relay.hear(push(3, 1))]
    assert not any(isinstance(one, Forward | Stop) for one in told)


# --- what crosses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "options", "copies"), [(2, {}, 1), (3, {}, 1), (3, {"quorum": 6}, 3)])
def test_between_sites_one_copy_crosses_each_way(size: int, options: dict, copies: int) -> None:
    """With as many workers as ever in M, but no relays, each worker of the other site has one of its own."""
    num_steps, num_bytes = 6, 4 * (200 * 50 + 50)

    def body(fleet):
        model = torch.nn.Linear(200, 50)
        rule = Overlapped(max_staleness=0, **options)
        model, optimizer = distribute(model, make_sgd(model.parameters()), rule, samples="batch", fleet=fleet)
        before = crossed(fleet)
        for step in range(num_steps):
            model(torch.full((2, 200), 0.1 + fleet.rank + step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        fleet.barrier()
        return [after - before for after, before in zip(crossed(fleet), before, strict=True)]

    for sent in map(sum, zip(*run_fleets(sites(size, size), body), strict=True)):
        assert copies * num_steps * num_bytes <= sent < copies * num_steps * (num_bytes + 1000) + 4000


def crossed(fleet) -> list[int]:
    """What this rank has sent out of each site."""
    counted = {str(link): num_bytes for link, num_bytes in fleet.statistics().link_bytes.items()}
    return [counted.get(f"{site} up", 0) for site in "ab"]


# --- what follows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", [sites(2, 2), sites(1, 2, 2)], ids=["2+2", "1+2+2"])
@pytest.mark.parametrize("seed", [None, 1])
def test_without_staleness_it_equals_synchronous_training(topology: Topology, seed: int | None) -> None:
    def body(fleet):
        model, optimizer = start(fleet, Overlapped(period=4, max_staleness=0, bucket_bytes=256), make_adam)
        for step in range(10):
            one_step(model, optimizer, fleet.rank, step)
        assert optimizer.statistics().share_with_global == 1.0
        return parameters_of(model)

    expected = train_alone(topology.num_ranks, range(10), make_adam)
    for result in run_fleets(topology, body, seed=seed):
        assert torch.allclose(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["swap", "rebase"])
@pytest.mark.parametrize("run", [run_fleets, run_over_tcp], ids=["memory", "tcp"])
def test_a_recorded_run_gives_the_same_bits_in_one_process(run: Callable, kind: str, dtype: torch.dtype) -> None:
    """The record tells how the pushes of a round were grouped, and what was pushed is in it or counted as dropped."""
    rule = Overlapped(period=7, max_staleness=3, bucket_bytes=128, rule=kind)

    def body(fleet):
        model, optimizer = start(fleet, rule, make_adam, dtype)
        recorder = record(optimizer.training.updater)
        fleet.barrier()  # before anybody's push may be part of a sum
        for step in range(25):
            one_step(model, optimizer, fleet.rank, step, dtype)
        optimizer.end_period()
        return model, recorder

    results = run(sites(2, 2), body)
    recorders = [recorder for _, recorder in results]
    assert any(note.what == "relay" for recorder in recorders for note in recorder.servers)
    replicas = [make_replica(rank, 128, dtype) for rank in range(4)]
    replay(recorders, replicas, rule)
    for (model, _), replica in zip(results, replicas, strict=True):
        assert torch.equal(parameters_of(model), torch.cat([bucket.parameters for bucket in replica.buckets]))


def test_periods_may_end_early_on_some_ranks() -> None:
    """Ranks make different numbers of steps, and nobody waits for a round that a site cannot bring any more."""

    def body(fleet):
        model, optimizer = start(fleet, Overlapped(period=64, max_staleness=1, bucket_bytes=128))
        for num_steps in (5 + fleet.rank, 4 + 2 * (3 - fleet.rank), 3):
            for step in range(num_steps):
                one_step(model, optimizer, fleet.rank, step)
            optimizer.end_period()
        return parameters_of(model), optimizer.iteration, optimizer.statistics().dropped

    results = run_fleets(sites(2, 2), body, seed=3)
    for parameters, iteration, _ in results:
        assert torch.equal(parameters, results[0][0])
        assert iteration == 8 + 10 + 3


def test_who_is_waited_for_is_a_worker_of_the_far_site_and_no_relay() -> None:
    told = wait_for_silent(sites(2, 2), 3)
    assert "rank 3 (host memory) did not deliver: rank 0 waited 1.5 s for newer global gradients" in told


# --- losses -----------------------------------------------------------------------------------------------------------

RULE = Overlapped(period=PERIOD, max_staleness=4, bucket_bytes=4096)
"""One bucket: of two sites of two and three ranks rank 0 is the server, 2 the relay, and the others neither."""
SITES = sites(2, 3)


def test_who_is_what() -> None:
    def body(fleet):
        _, optimizer = start(fleet, RULE)
        return [type(one) for one in optimizer.training.updater.client.hosted.values()]

    assert run_fleets(SITES, body) == [[HostedShard], [], [HostedRelay], [], []]


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("deaths", [{0: 11}, {2: 11}, {3: 11}, {1: 8}, {2: 16}, {0: 9, 2: 12}, {2: 10, 4: 10}])
def test_the_rest_go_on_after_deaths(deaths: dict[int, int], seed: int | None) -> None:
    def die(fleet, step):
        if deaths.get(fleet.rank) == step:
            raise DeathError

    results = run_fleets(SITES, lambda fleet: train(fleet, RULE, before_step=die), accept=DeathError, seed=seed)
    check_survivors(results, [rank for rank in range(5) if rank not in deaths])


@pytest.mark.parametrize("instruction", [Fold, Forward, Take, Reply, Push])
@pytest.mark.parametrize("seed", range(3))
def test_a_server_or_relay_is_cut_off_at_any_moment(
    instruction: type, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the moment when it does for the 9th (or a later) time what it is told, or hears of a push."""
    host = HostedRelay if instruction in (Forward, Take) else HostedShard
    fleets, num_done = {}, 0

    def cut_off(port) -> None:
        nonlocal num_done
        num_done += 1
        victim = fleets.get(port.rank)
        if num_done == 9 + seed and victim is not None:
            disconnect([victim], [fleet for fleet in fleets.values() if fleet is not victim])

    do, hear = host._do, HostedShard._on_message

    def do_and_die(self, told):
        if isinstance(told, instruction):
            cut_off(self._messages.port)
        do(self, told)

    def hear_and_die(self, worker, message):
        if instruction is Push:
            cut_off(self._messages.port)
        hear(self, worker, message)

    monkeypatch.setattr(host, "_do", do_and_die)
    monkeypatch.setattr(HostedShard, "_on_message", hear_and_die)

    def body(fleet):
        fleets[fleet.rank] = fleet
        fleet.barrier()
        return train(fleet, RULE)

    results = run_fleets(SITES, body, accept=QuorumLostError, seed=seed)
    lost = [rank for rank, result in enumerate(results) if isinstance(result, QuorumLostError)]
    assert len(lost) == 1
    check_survivors(results, [rank for rank in range(5) if rank not in lost])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("victim", [0, 2, 3])
def test_a_death_while_a_period_ends(victim: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_a_death_in_an_end(SITES, RULE, victim, seed, monkeypatch)


@pytest.mark.parametrize("leaving", [(0,), (2,), (2, 3)])
def test_those_who_leave_early_are_not_waited_for(leaving: tuple[int, ...]) -> None:
    def body(fleet):
        return train(fleet, RULE, num_iterations=16 if fleet.rank in leaving else 40)

    results = run_fleets(SITES, body)
    check_survivors(results, leaving, num_periods=2)
    check_survivors(results, [rank for rank in range(5) if rank not in leaving])
