"""Rounds that go on without late parties, against a replay of what each rank did in one process: the same bits."""

import itertools
import threading
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from test_local_steps import mean

from small_racks import TWO_SITES
from small_regression import batch, loss_of, make_adam, make_model, make_sgd, parameters_of
from syncline.errors import ConfigurationError, PeerLostError, UpdateError
from syncline.pytorch.checkpoint import load_checkpoint, save_checkpoint
from syncline.pytorch.distribute import distribute
from syncline.runtime.worker_thread import WorkerThread
from syncline.topology import Topology
from syncline.updates import AllReduce, Grace, LocalSteps, Nesterov, Sharded
from syncline.updates.attendance import Attendance
from syncline.updates.late_parties import Decisions, GraceLocalStepsUpdater
from thread_fleets import run_fleets, run_over_tcp

WITHIN = AllReduce(bucket_bytes=160)
DEADLINE_S = 60.0


def start(fleet, rule, make=make_adam, **options):
    model = make_model()
    return distribute(model, make(model.parameters()), rule, samples="batch", fleet=fleet, **options)


def size_of(rank: int) -> int:
    return 3 + rank


def one_step(model, optimizer, rank: int, step: int) -> None:
    loss_of(model, *batch(rank, step, size_of(rank))).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> dict[int, list]:
    """What each rank's training thread did, in order: steps, rounds that it sent, and rounds taken over until then."""
    events: dict[int, list] = defaultdict(list)
    send, take_over, begin = GraceLocalStepsUpdater._send, GraceLocalStepsUpdater._take_over, Attendance.decide

    def note_send(self, *, ends):
        events[self.collectives.rank].append(
            ("send" if self._overlaps and not ends else "send and wait", self._num_taken)
        )
        send(self, ends=ends)

    def note_take_over(self, sent):
        was_in = take_over(self, sent)
        events[self.collectives.rank].append(("take", self._num_global))
        return was_in

    def note_decided(self, now_s):
        number, left_out = self.number, begin(self, now_s)
        if left_out is not None:
            assert len(events["decided"]) == number
            events["decided"].append(left_out)
        return left_out

    monkeypatch.setattr(GraceLocalStepsUpdater, "_send", note_send)
    monkeypatch.setattr(GraceLocalStepsUpdater, "_take_over", note_take_over)
    monkeypatch.setattr(Attendance, "decide", note_decided)
    return events


class Replay:
    """All ranks' training in one process: each rank is a party, and a round is of the whole model."""

    def __init__(self, history, num_ranks: int, rule: LocalSteps, make) -> None:
        self.history, self.rule = history, rule
        self.decided = history["decided"]
        self.models = [make_model() for _ in range(num_ranks)]
        self.optimizers = [make(model.parameters()) for model in self.models]
        self.globals = [parameters_of(self.models[0])]
        """Before each round."""
        self.velocity = torch.zeros_like(self.globals[0])
        self.sent = defaultdict(dict)
        """By round and rank, its parameters and the samples behind them."""

    def run(self) -> list[torch.Tensor]:
        under_way = {self.train(rank) for rank in range(len(self.models))}
        while under_way:
            under_way = {one for one in under_way if next(one, "ended") != "ended"}
            self.make_global()
        return [parameters_of(model) for model in self.models]

    def train(self, rank: int):
        """Do what the rank did, and yield where it waits for a round."""
        model, taken, samples, last, waits = self.models[rank], 0, 0, None, False
        for what, number in self.history[rank]:
            if what == "step":
                one_step(model, self.optimizers[rank], rank, number)
                samples, waits = samples + size_of(rank), False
            elif what.startswith("send"):
                waits = what != "send"
                last, self.sent[number][rank], samples = number, (parameters_of(model), samples), 0
            elif number > taken:
                while number >= len(self.globals):
                    yield
                now, new, since = parameters_of(model), self.globals[number], self.globals[taken]
                is_in = last is not None and rank not in self.decided[last]
                if is_in:
                    since = self.sent[last][rank][0]
                elif last is not None:
                    samples += self.sent[last][rank][1]
                moved = new.clone() if is_in and waits else now + (new - since)
                torch.nn.utils.vector_to_parameters(moved, model.parameters())
                taken, last = number, None

    def make_global(self) -> None:
        """Make all rounds to which everyone that was in has sent its moves."""
        while (number := len(self.globals) - 1) < len(self.decided):
            start, ranks = self.globals[number], range(len(self.models))
            absent = [(start, 0) if rank in self.decided[number] else None for rank in ranks]
            brought = [absent[rank] or self.sent[number].get(rank) for rank in ranks]
            if None in brought:
                return
            values, samples = zip(*brought, strict=True)
            new = mean(values, samples, start)
            if self.rule.outer is not None and sum(samples):
                rule, difference = self.rule.outer, start - new
                self.velocity = self.velocity * rule.momentum + difference
                change = torch.add(difference, self.velocity, alpha=rule.momentum)
                new = torch.add(start, change, alpha=-rule.learning_rate)
            self.globals.append(new)


@pytest.mark.parametrize("overlap", [True, False], ids=["under steps", "in turn"])
@pytest.mark.parametrize("outer", [None, Nesterov()], ids=["average", "momentum"])
@pytest.mark.parametrize("make", [make_adam, make_sgd])
def test_whoever_is_late_training_equals_a_replay(overlap: bool, outer, make, history) -> None:
    """With no grace at all most rounds go on without somebody: threads come as they come."""
    rule = LocalSteps(period=2, fragments=1, overlap=overlap, outer=outer, pace=Grace(seconds=0.0, quorum=1))
    num_steps = [14, 9, 11]

    def body(fleet):
        model, optimizer = start(fleet, rule, make)
        for step in range(num_steps[fleet.rank]):
            history[fleet.rank].append(("step", step))
            one_step(model, optimizer, fleet.rank, step)
        optimizer.end_period()
        return parameters_of(model), optimizer.statistics()

    results = run_fleets(3, body)
    alone = Replay(history, 3, rule, make).run()
    for rank, (parameters, statistics) in enumerate(results):
        assert torch.equal(parameters, alone[rank]), f"rank {rank}"
        assert torch.equal(parameters, results[0][0])
        assert statistics.num_rounds == results[0][1].num_rounds
        decided = history["decided"][: statistics.num_rounds]
        assert statistics.num_left_out == sum(rank in left_out for left_out in decided)


@pytest.mark.parametrize(
    "rule",
    [
        LocalSteps(period=4, within=WITHIN),
        LocalSteps(period=5, fragments=3, within=WITHIN, outer=Nesterov()),
        LocalSteps(period=4, fragments=2, overlap=False, within=WITHIN),
    ],
    ids=["fragments", "momentum", "in turn"],
)
@pytest.mark.parametrize("parties", [None, "auto"], ids=["ranks", "parties"])
def test_where_nobody_is_late_it_trains_as_without_a_window(rule: LocalSteps, parties, monkeypatch) -> None:
    monkeypatch.setattr("syncline.updates.local_steps_updater.LEAST_BYTES", 1)

    def body(fleet, rule):
        model, optimizer = start(fleet, rule)
        seen = []
        for step in range(11):
            one_step(model, optimizer, fleet.rank, step)
            seen.append(parameters_of(model))
        optimizer.end_period()
        return [*seen, parameters_of(model)], optimizer.statistics().num_left_out

    topology, rule = TWO_SITES, replace(rule, parties=parties)
    patient = run_fleets(topology, partial(body, rule=replace(rule, pace=Grace(seconds=DEADLINE_S))))
    equal = run_fleets(topology, partial(body, rule=rule))
    for (with_window, num_left_out), (without, _) in zip(patient, equal, strict=True):
        assert num_left_out == 0
        assert all(map(torch.equal, with_window, without))


@pytest.mark.parametrize("run", [run_fleets, run_over_tcp], ids=["in memory", "sockets"])
def test_others_go_on_while_one_computes_and_it_catches_up_in_one_step(run) -> None:
    """It holds one copy of the parameters for all the rounds that it has missed."""
    are_ahead, num_missed = threading.Barrier(3), 20
    rule = LocalSteps(period=4, fragments=4, within=WITHIN, pace=Grace(seconds=0.1))

    def body(fleet):
        model, optimizer = start(fleet, rule)
        updater = optimizer.training.updater
        one_step(model, optimizer, fleet.rank, 0)
        begun = optimizer.statistics().num_rounds
        if fleet.rank == 2:
            are_ahead.wait(DEADLINE_S)
            while updater._num_global < num_missed:
                with updater._decisions.changed:
                    updater._decisions.changed.wait_for(lambda: updater._num_begun > num_missed, DEADLINE_S)
            num_kept = sum(len(values) for means in updater._ahead.values() for values in means)
            assert num_kept <= sum(bucket.plan.num_elements for bucket in updater.buckets)
        else:
            while optimizer.statistics().num_rounds < num_missed + 2:
                one_step(model, optimizer, fleet.rank, optimizer.iteration)
            are_ahead.wait(DEADLINE_S)
        one_step(model, optimizer, fleet.rank, 100)
        counts = optimizer.statistics()
        one_step(model, optimizer, fleet.rank, 101)
        assert optimizer.statistics().waited_s > counts.waited_s, "it comes to the next round as all do"
        optimizer.end_period()
        return counts, begun, parameters_of(model)

    (_, _, first), (_, _, second), (late, begun, third) = run(Topology.flat(3), body)
    assert late.num_left_out >= num_missed - 2
    assert late.num_rounds - begun >= num_missed
    assert torch.equal(first, third)
    assert torch.equal(first, second)
    assert f"{late.num_left_out} without this party" in str(late)


def test_who_has_caught_up_does_not_wait_for_rounds_that_nobody_begins() -> None:
    """All meet after as many steps: the others begin no round there, and it comes with some steps still to make."""
    are_ahead, meet = threading.Barrier(3), threading.Barrier(3)
    rule = LocalSteps(period=1, within=WITHIN, pace=Grace(seconds=0.1))

    def body(fleet):
        model, optimizer = start(fleet, rule)
        for step in range(12):
            one_step(model, optimizer, fleet.rank, step)
            if step == (0 if fleet.rank == 2 else 7):
                are_ahead.wait(DEADLINE_S)
            if step == 7:
                meet.wait(DEADLINE_S)
        optimizer.end_period()
        return parameters_of(model)

    first, second, third = run_fleets(3, body)
    assert torch.equal(first, second)
    assert torch.equal(first, third)


@pytest.mark.parametrize("within", [AllReduce(), Sharded()], ids=["all-reduce", "divided"])
def test_the_ranks_of_a_late_party_stay_equal_in_every_step(within) -> None:
    """Its ranks hear of decisions at different times, and take over as many rounds all the same."""
    rule = LocalSteps(period=2, fragments=2, within=within, pace=Grace(seconds=0.0, quorum=1))

    def body(fleet):
        model, optimizer = start(fleet, rule)
        seen = []
        for step in range(20 + 10 * (fleet.rank < 2)):
            one_step(model, optimizer, fleet.rank, step)
            seen.append(parameters_of(model))
        optimizer.end_period()
        return seen, parameters_of(model), optimizer.statistics().num_left_out

    results = run_fleets(TWO_SITES, body)
    for one, other in ((0, 1), (2, 3)):
        assert all(map(torch.equal, results[one][0], results[other][0]))
        assert results[one][2] == results[other][2]
    assert all(torch.equal(parameters, results[0][1]) for _, parameters, _ in results)


def test_a_checkpoint_ends_the_period_of_all_and_training_goes_on_from_it(tmp_path: Path) -> None:
    rule = LocalSteps(period=4, fragments=2, within=WITHIN, pace=Grace(seconds=0.0, quorum=1))

    def first(fleet):
        model, optimizer = start(fleet, rule)
        for step in range(7 + fleet.rank):
            one_step(model, optimizer, fleet.rank, step)
        save_checkpoint(tmp_path / "saved", model, optimizer)
        return parameters_of(model)

    def second(fleet):
        model, optimizer = start(fleet, rule)
        one_step(model, optimizer, fleet.rank, 77)
        load_checkpoint(tmp_path / "saved", model, optimizer)
        loaded = parameters_of(model)
        for step in range(5):
            one_step(model, optimizer, fleet.rank, step)
        optimizer.end_period()
        return loaded, parameters_of(model)

    saved = run_fleets(3, first)
    results = run_fleets(3, second)
    assert all(torch.equal(loaded, saved[0]) for loaded, _ in results)
    assert all(torch.equal(ended, results[0][1]) for _, ended in results)
    assert not torch.equal(results[0][1], saved[0])


class DeathError(Exception):
    """This rank dies here."""


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("rounds", [{"period": 2}, {"period": 8, "fragments": 1}], ids=["in a round", "between two"])
def test_a_rank_that_dies_is_named_and_not_taken_for_late(victim: int, rounds) -> None:
    """Rank 0 decides about rounds: without it none begins that would wait for anybody."""
    rule = LocalSteps(**rounds, pace=Grace(seconds=0.0))

    def body(fleet):
        model, optimizer = start(fleet, rule)
        for step in itertools.count():
            if fleet.rank == victim and step == 3:
                raise DeathError
            one_step(model, optimizer, fleet.rank, step)

    errors = run_fleets(3, body, accept=(DeathError, PeerLostError))
    assert isinstance(errors.pop(victim), DeathError)
    assert [error.rank for error in errors] == [victim, victim]


def test_who_has_just_begun_the_last_round_ends_it_though_rank_0_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rank 0 needs of it may arrive there before the thread has noted that it has begun."""
    num_begun, rule = [0, 0], LocalSteps(period=2, fragments=1, pace=Grace(seconds=DEADLINE_S))
    begin, asks = GraceLocalStepsUpdater._begin_round, threading.Event()
    raise_failure, close = Decisions.raise_failure, WorkerThread.close
    last = None

    def note(self, number, moves, **options):
        flight, rank = begin(self, number, moves, **options), self.collectives.rank
        num_begun[rank] += 1
        if rank == 1 and num_begun[rank] == last:
            self._decisions.fail(PeerLostError("rank 0 left", rank=0, host="h0"))
            assert asks.wait(DEADLINE_S)  # until the training thread has heard of it
        return flight

    def body(fleet):
        model, optimizer = start(fleet, rule)
        for step in range(4):
            one_step(model, optimizer, fleet.rank, step)
        return model

    monkeypatch.setattr(GraceLocalStepsUpdater, "_begin_round", note)
    ended = [parameters_of(model) for model in run_fleets(2, body)]
    last, num_begun[:] = num_begun[1], (0, 0)
    monkeypatch.setattr(Decisions, "raise_failure", lambda self: (asks.set(), raise_failure(self)))
    monkeypatch.setattr(WorkerThread, "close", lambda self, **how: (asks.set(), close(self, **how)))
    assert all(map(torch.equal, ended, map(parameters_of, run_fleets(2, body))))


def test_what_does_not_go_with_a_window_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="lets them not wait"):
        LocalSteps(period="auto", pace=Grace())

    def body(fleet):
        with pytest.raises(ConfigurationError, match="more than there are parties: 1"):
            start(fleet, LocalSteps(pace=Grace(quorum=2)))
        with pytest.raises(UpdateError, match=r"elastic=True does not go with LocalSteps\(\), with pace=Grace\(\)"):
            start(fleet, LocalSteps(pace=Grace()), elastic=True)

    run_fleets(1, body)
