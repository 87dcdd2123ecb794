"""Local steps, against a replay in one process that is written from their description: the same bits."""

import itertools
import math
import queue
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from small_racks import TWO_SITES
from small_regression import batch, loss_of, make_adam, make_model, make_sgd, parameters_of
from syncline.errors import ConfigurationError, PeerLostError, TopologyError, UpdateError
from syncline.pytorch.checkpoint import load_checkpoint, save_checkpoint
from syncline.pytorch.control import join
from syncline.pytorch.distribute import distribute
from syncline.pytorch.flatten import plan_model, trained_parameters
from syncline.schedule.period import AutomaticPeriod
from syncline.updates import AllReduce, LocalSteps, Nesterov
from syncline.updates.flat import shares
from syncline.updates.local_steps_updater import LEAST_BYTES
from syncline.updates.rounds import Round, exponent_for, from_steps, largest_move, to_steps
from thread_fleets import run_fleets

BUCKET_BYTES = 160
"""Of the small regression it makes five buckets."""
WITHIN = AllReduce(bucket_bytes=BUCKET_BYTES)
DEADLINE_S = 60.0


def size_of(rank: int, step: int) -> int:
    return 3 + rank + step % 2


def start(fleet, rule, make=make_adam, model=None, **options):
    model = make_model() if model is None else model
    return distribute(model, make(model.parameters()), rule, samples="batch", fleet=fleet, **options)


def one_step(model, optimizer, rank: int, step: int) -> None:
    loss_of(model, *batch(rank, step, size_of(rank, step))).backward()
    optimizer.step()
    optimizer.zero_grad()


class Alone:
    """All ranks' training in one process, a step of every rank at a time."""

    def __init__(self, rule: LocalSteps, num_ranks: int, make, least_bytes: int = LEAST_BYTES) -> None:
        self.rule, self.least_bytes = rule, least_bytes
        self.num_fragments = min(rule.fragments, rule.period)
        self.models = [make_model() for _ in range(num_ranks)]
        self.optimizers = [make(model.parameters()) for model in self.models]
        named = trained_parameters(self.models[0], self.optimizers[0])
        plans = plan_model(named, bucket_bytes=rule.bucket_bytes)
        place = {name: number for number, (name, _) in enumerate(self.models[0].named_parameters())}
        self.buckets = [[place[slot.name] for slot in plan.slots] for plan in plans]
        self.fragments = self.divide([plan.num_elements for plan in plans])
        self.starts = [self.values(0, number) for number in range(len(plans))]
        self.velocities = [torch.zeros_like(values) for values in self.starts]
        self.samples = torch.zeros(self.num_fragments, num_ranks, dtype=torch.float64)
        self.num_made = torch.zeros(self.num_fragments, num_ranks, dtype=torch.float64)
        self.steps = [0] * num_ranks
        self.flight = None
        self.num_rounds = 0

    def divide(self, sizes: list[int]) -> list[list[tuple[int, slice]]]:
        """Cut buckets where a fragment ends, but for a sixteenth of one; a piece belongs where its middle lies."""
        total, before = sum(sizes), 0
        count = min(self.num_fragments, math.ceil(4 * total / self.least_bytes))
        fragments = [[] for _ in range(self.num_fragments)]
        for bucket, size in enumerate(sizes):
            ends = [total * number // count - before for number in range(1, count)]
            cuts = [end for end in ends if total / count < 16 * min(end, size - end)]
            for start, stop in itertools.pairwise([0, *cuts, size]):
                middle = before + (start + stop) / 2
                fragments[int(middle * self.num_fragments / total)].append((bucket, slice(start, stop)))
            before += size
        return fragments

    def values(self, rank: int, bucket: int) -> torch.Tensor:
        parameters = list(self.models[rank].parameters())
        return torch.cat([parameters[place].detach().reshape(-1) for place in self.buckets[bucket]])

    def write(self, rank: int, bucket: int, values: torch.Tensor) -> None:
        parameters, before = list(self.models[rank].parameters()), 0
        for place in self.buckets[bucket]:
            part = values[before : before + parameters[place].numel()]
            parameters[place].data.copy_(part.view_as(parameters[place]))
            before += parameters[place].numel()

    def step(self, num_steps: list[int], step: int) -> None:
        """Make step ``step`` on each rank that makes as many; the others follow."""
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            if step < num_steps[rank]:
                loss_of(model, *batch(rank, step, size_of(rank, step))).backward()
                optimizer.step()
                optimizer.zero_grad()
                self.samples[:, rank] += size_of(rank, step)
                self.num_made[:, rank] += 1
        sends = [number * self.num_fragments // self.rule.period for number in (step, step + 1)]
        if sends[1] > sends[0]:
            self.land()
            self.send()
            if not self.rule.overlap:
                self.land()

    def end(self) -> None:
        self.land()
        for _ in range(self.num_fragments):
            self.send()
            self.land()

    def send(self) -> None:
        fragment = self.num_rounds % self.num_fragments
        self.num_rounds += 1
        ranks = range(len(self.models))
        sent = [[self.values(rank, one)[part] for rank in ranks] for one, part in self.fragments[fragment]]
        self.flight = self.fragments[fragment], sent, self.samples[fragment].tolist(), self.num_made[fragment].clone()
        self.samples[fragment], self.num_made[fragment] = 0, 0

    def land(self) -> None:
        if self.flight is None:
            return
        (pieces, sent, samples, num_made), self.flight = self.flight, None
        for (bucket, part), values in zip(pieces, sent, strict=True):
            start, velocity = self.starts[bucket][part], self.velocities[bucket][part]
            new = mean(values, samples, start)
            if self.rule.outer is None and sum(samples):
                mean_made = float((num_made * torch.tensor(samples)).sum() / sum(samples))
                for rank, own in enumerate(values):
                    if samples[rank]:
                        share = mean_made / float(num_made[rank])
                        lag = own - new if share == 1.0 else (own - start) * share - (new - start)
                        self.follow(rank, bucket, part, lag * (float(lag.abs().max()) > 1e-14), mean_made)
            if self.rule.outer is not None and sum(samples):
                rule, difference = self.rule.outer, start - new
                velocity.copy_(velocity * rule.momentum + difference)
                change = torch.add(difference, velocity, alpha=rule.momentum)
                new = torch.add(start, change, alpha=-rule.learning_rate)
            for rank, own in enumerate(values):
                whole = self.values(rank, bucket)
                now = whole[part]
                whole[part] = new if torch.equal(now, own) else now + (new - own)
                self.write(rank, bucket, whole)
            start.copy_(new)

    def follow(self, rank: int, bucket: int, part: slice, lag: torch.Tensor, num_made: float) -> None:
        """Add to the momentum of a rank what others moved further by, as far as it is left by now."""
        group, before = self.optimizers[rank].param_groups[0], 0
        parameters = list(self.models[rank].parameters())
        for place in self.buckets[bucket]:
            state, size = self.optimizers[rank].state[parameters[place]], parameters[place].numel()
            if "momentum_buffer" in state:
                mine = slice(max(part.start, before) - before, max(0, min(part.stop, before + size) - before))
                change = lag[max(0, before - part.start) :][: max(0, mine.stop - mine.start)]
                scale = group["momentum"] ** num_made / num_made / group["lr"]
                state["momentum_buffer"].view(-1)[mine].add_(change, alpha=scale)
            before += size


def mean(values, weights, start: torch.Tensor) -> torch.Tensor:
    out = start.clone()
    largest = [largest_move(one, start) for one in values]
    if any(largest):
        exponent = exponent_for(largest, start.dtype)
        pairs = zip(values, shares(weights), strict=True)
        total = torch.stack([to_steps(one, start, share=share, exponent=exponent) for one, share in pairs]).sum(0)
        from_steps(total, start, exponent=exponent, out=out)
    return out


@pytest.mark.parametrize(
    ("rule", "num_steps"),
    [
        (LocalSteps(period=4, within=WITHIN), [11, 11, 11]),
        (LocalSteps(period=5, fragments=3, within=WITHIN, outer=Nesterov()), [13, 9, 10]),
        (LocalSteps(period=3, fragments=1), [7, 7, 7]),
        (LocalSteps(period=3, fragments=1, overlap=False, outer=Nesterov()), [7, 6, 3]),
        (LocalSteps(period=4, fragments=2, overlap=False, within=WITHIN), [0, 6, 9]),
    ],
    ids=["fragments", "momentum", "whole", "in turn", "no data"],
)
@pytest.mark.parametrize("make", [make_adam, make_sgd])
@pytest.mark.parametrize("least_bytes", [1, LEAST_BYTES], ids=["cut", "uncut"])
def test_training_equals_a_replay_in_one_process(
    rule: LocalSteps, num_steps: list[int], make, least_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that make fewer steps follow the others, and the last rounds make all equal; also of buckets in pieces."""
    monkeypatch.setattr("syncline.updates.local_steps_updater.LEAST_BYTES", least_bytes)

    def body(fleet):
        model, optimizer = start(fleet, rule, make)
        before = []
        for step in range(num_steps[fleet.rank]):
            one_step(model, optimizer, fleet.rank, step)
            before.append(parameters_of(model))
        optimizer.end_period()
        return before, parameters_of(model), optimizer.iteration, optimizer.statistics()

    results = run_fleets(3, body)
    alone = Alone(rule, 3, make, least_bytes)
    for step in range(max(num_steps)):
        alone.step(num_steps, step)
        for rank, (before, *_) in enumerate(results):
            if step < num_steps[rank]:
                assert torch.equal(before[step], parameters_of(alone.models[rank])), f"rank {rank} in step {step}"
    alone.end()
    for model, (_, ended, iteration, statistics) in zip(alone.models, results, strict=True):
        assert torch.equal(ended, parameters_of(model))
        assert iteration == max(num_steps)
        assert statistics.num_rounds == alone.num_rounds
        told = f"{alone.num_rounds} rounds in {statistics.num_steps} steps, period {rule.period}, "
        assert str(statistics).startswith(told)


@pytest.mark.parametrize("rule", [LocalSteps(period=4), LocalSteps(period=4, fragments=1, outer=Nesterov())])
def test_training_goes_on_from_a_checkpoint_to_the_bit(rule: LocalSteps, tmp_path: Path) -> None:
    """Saving ends a period, so the run that is not interrupted saves too; each rank has Adam's state of its own."""

    def first(fleet):
        model, optimizer = start(fleet, rule)
        for step in range(6):
            one_step(model, optimizer, fleet.rank, step)
        save_checkpoint(tmp_path / "saved", model, optimizer)
        return go_on(fleet, model, optimizer)

    def second(fleet):
        model, optimizer = start(fleet, rule)
        one_step(model, optimizer, fleet.rank, 77)
        load_checkpoint(tmp_path / "saved", model, optimizer)
        return go_on(fleet, model, optimizer)

    def go_on(fleet, model, optimizer):
        assert optimizer.iteration == 6
        for step in range(6, 13):
            one_step(model, optimizer, fleet.rank, step)
        own = optimizer.state_dict()["state"][0]["exp_avg"].clone()
        optimizer.end_period()
        return parameters_of(model), own

    whole, resumed = run_fleets(3, first), run_fleets(3, second)
    for (parameters, own), (again, own_again) in zip(whole, resumed, strict=True):
        assert torch.equal(parameters, again)
        assert torch.equal(own, own_again)
    assert not torch.equal(whole[0][1], whole[1][1])

    def with_another_rule(fleet):
        model, optimizer = start(fleet, AllReduce())
        load_checkpoint(tmp_path / "saved", model, optimizer)
        return {key for values in optimizer.state_dict()["state"].values() for key in values}

    (keys,) = run_fleets(1, with_another_rule)
    assert {"exp_avg", "exp_avg_sq", "step"} <= keys <= {"exp_avg", "exp_avg_sq", "step", "outer_velocity"}


@pytest.mark.parametrize("parties", [None, "auto"])
def test_between_two_sites_a_period_carries_the_parameters_once(parties) -> None:
    num_bytes = 4 * (200 * 50 + 50)

    def body(fleet):
        model = torch.nn.Linear(200, 50)
        rule = LocalSteps(period=4, within=AllReduce(bucket_bytes=8000), parties=parties)
        model, optimizer = distribute(model, make_sgd(model.parameters()), rule, samples="batch", fleet=fleet)
        before = sent_up(fleet)
        for _ in range(8):
            model(torch.full((2, 200), 0.001 + fleet.rank)).square().mean().backward()
            optimizer.step()
        fleet.barrier()
        return sent_up(fleet) - before

    sent = sum(run_fleets(TWO_SITES, body))
    assert 7 / 4 * num_bytes <= sent < 2 * num_bytes + 8000  # the last fragment's sums may not have begun


def sent_up(fleet) -> int:
    counted = fleet.statistics().link_bytes
    return sum(num_bytes for link, num_bytes in counted.items() if str(link) == "a up")


def test_ranks_of_a_party_train_as_with_an_all_reduce() -> None:
    """Of one party the parameters are those of ``AllReduce``; of two, what each has before the round is."""

    def body(fleet, rule, steps=6):
        model, optimizer = start(fleet, rule)
        for step in range(steps):
            one_step(model, optimizer, fleet.rank, step)
        before = parameters_of(model)
        optimizer.end_period()
        return before, parameters_of(model)

    together = run_fleets(2, lambda fleet: body(fleet, AllReduce()))
    one = run_fleets(2, lambda fleet: body(fleet, LocalSteps(period=100, parties=[(0, 1)])))
    assert torch.equal(one[0][0], together[0][0])
    topology = TWO_SITES
    (a0, end_a), (a1, _), (b0, end_b), (b1, _) = run_fleets(topology, lambda fleet: body(fleet, LocalSteps(period=100)))
    assert torch.equal(a0, together[0][0])
    assert torch.equal(a0, a1)
    assert torch.equal(b0, b1)
    assert not torch.equal(a0, b0)
    assert torch.equal(end_a, end_b)


CHOSEN = (4, 20, 1, 8, 2)
"""Periods that are chosen one after the other, in place of what times say."""


def choose_in_turn(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[float]]:
    """Let each rank choose these; return what it hears: for what parts of the time rounds held up steps."""
    heard = {}

    def judge(self, held_up):
        told = heard.setdefault(id(self), [])
        self.num_steps = CHOSEN[len(told) % len(CHOSEN)]
        told.append(held_up)
        return True

    monkeypatch.setattr(AutomaticPeriod, "judge", judge)
    monkeypatch.setattr("syncline.updates.local_steps_updater.LEAST_BYTES", 1)
    return heard


@pytest.mark.parametrize("fragments", [16, 5, 1])
def test_each_step_counts_once_while_periods_are_chosen(fragments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a gradient that does not depend on parameters, their mean is that of all ranks' steps."""
    heard, num_steps = choose_in_turn(monkeypatch), 44

    def pushes(rank, step):
        return torch.randn(4, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))

    def body(fleet):
        model = nn.Linear(10, 4, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        rule = LocalSteps(period="auto", fragments=fragments)
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), rule, fleet=fleet)
        periods = []
        for step in range(num_steps):
            (model(torch.eye(10, dtype=torch.float64)).T * pushes(fleet.rank, step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            periods.append(optimizer.statistics().period)
        optimizer.end_period()
        return periods, model.weight.detach().clone()

    results = run_fleets(3, body)
    everything = sum(pushes(rank, step) for rank in range(3) for step in range(num_steps)) / 3
    for periods, ended in results:
        assert set(periods) == set(CHOSEN), "each was in force"
        assert periods == results[0][0], "on all ranks from the same step on"
        assert torch.allclose(ended, -everything, rtol=0, atol=1e-9)
    told = list(heard.values())
    assert len(told) == 3
    assert all(each == told[0] and all(0 <= part <= 1 for part in each) for each in told)


def test_ranks_that_end_follow_whatever_period_was_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And go on together afterwards, also from a checkpoint."""
    heard = choose_in_turn(monkeypatch)

    def body(fleet):
        model, optimizer = start(fleet, LocalSteps(period="auto", fragments=4))
        ended = []
        for step in range(3):
            for batch_number in range(7 + 3 * step + 2 * fleet.rank):
                one_step(model, optimizer, fleet.rank, batch_number)
            save_checkpoint(tmp_path / f"{step}", model, optimizer)
            ended.append((optimizer.iteration, parameters_of(model)))
        model, optimizer = start(fleet, LocalSteps(period="auto", fragments=4))
        load_checkpoint(tmp_path / "2", model, optimizer)
        ended.append((optimizer.iteration, parameters_of(model)))
        for step in range(9):
            one_step(model, optimizer, fleet.rank, step)
        optimizer.end_period()
        return [*ended, (optimizer.iteration, parameters_of(model))]

    results = run_fleets(3, body)
    for iterations in zip(*results, strict=True):
        numbers, values = zip(*iterations, strict=True)
        assert len(set(numbers)) == 1
        assert all(torch.equal(each, values[0]) for each in values)
    assert torch.equal(results[0][2][1], results[0][3][1])
    assert all(heard.values())


def test_a_period_that_is_chosen_wants_rounds_under_steps() -> None:
    for options in ({"overlap": False}, {"outer": Nesterov()}):
        with pytest.raises(ConfigurationError, match=r'period="auto" is the shortest .*; give a number of steps'):
            LocalSteps(period="auto", **options)


def test_a_rank_may_be_a_party_beside_one_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.updates.local_steps_updater.LEAST_BYTES", 1)
    topology = TWO_SITES.restricted((0, 2, 3))

    def body(fleet):
        model, optimizer = start(fleet, LocalSteps(period=4, within=WITHIN))
        for step in range(5):
            one_step(model, optimizer, fleet.rank, step)
        before = parameters_of(model)
        optimizer.end_period()
        return before, parameters_of(model), optimizer.statistics().parties

    (alone, end, parties), (first, _, _), (second, also, _) = run_fleets(topology, body)
    assert parties == ((0,), (1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(alone, first)
    assert torch.equal(end, also)


def test_buffers_become_rank_0s_when_a_period_is_ended() -> None:
    def body(fleet):
        model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
        model, optimizer = distribute(model, make_sgd(model.parameters()), LocalSteps(period=2), fleet=fleet)
        for step in range(3 + fleet.rank):
            model(batch(fleet.rank, step, 4, torch.float32)[0]).square().mean().backward()
            optimizer.step()
        own = model[0].running_mean.clone()
        optimizer.end_period()
        return own, model[0].running_mean.clone()

    (first, equal), (second, also) = run_fleets(2, body)
    assert not torch.equal(first, second)
    assert torch.equal(equal, first)
    assert torch.equal(also, first)


def test_parameters_that_are_not_finite_are_told_by_rank_on_every_rank() -> None:
    def body(fleet):
        model, optimizer = start(fleet, LocalSteps(within=WITHIN))
        one_step(model, optimizer, fleet.rank, 0)
        if fleet.rank == 1:
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))
        optimizer.end_period()

    for error in run_fleets(3, body, accept=UpdateError):
        assert "Parameters of rank 1 are not finite" in str(error)


def test_a_round_begins_and_ends_while_training_threads_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """They call nothing between a step and the next: the sum begins elsewhere, and no step waits for it."""
    begun = [queue.SimpleQueue() for _ in range(3)]
    begin = Round._begin_early

    def note(self, *arguments):
        begin(self, *arguments)
        begun[self._rank].put(self)

    monkeypatch.setattr(Round, "_begin_early", note)

    def body(fleet):
        model, optimizer = start(fleet, LocalSteps(period=1))
        for step in range(5):
            one_step(model, optimizer, fleet.rank, step)
            assert optimizer.statistics().num_rounds == step
            under_way = begun[fleet.rank].get(timeout=DEADLINE_S)
            under_way.wait()
            assert under_way.is_over
        return optimizer.statistics().num_waits

    assert run_fleets(3, body) == [0, 0, 0]


class DeathError(Exception):
    """This rank dies here."""


@pytest.mark.parametrize("begins", [False, True], ids=["told", "summing"])
def test_a_rank_that_is_lost_within_a_round_is_named(begins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All have told: its own sum has begun, or has not."""
    have_told = threading.Event()
    begin = Round._begin_early

    def begin_or_not(self, *arguments):
        if self._rank != 1 or begins:
            begin(self, *arguments)
        if self._rank == 1:
            have_told.set()

    monkeypatch.setattr(Round, "_begin_early", begin_or_not)

    def body(fleet):
        model, optimizer = start(fleet, LocalSteps(period=1))
        one_step(model, optimizer, fleet.rank, 0)
        if fleet.rank == 1:
            assert have_told.wait(DEADLINE_S)
            raise DeathError
        for step in range(1, 4):
            one_step(model, optimizer, fleet.rank, step)

    first, _, third = run_fleets(3, body, accept=(DeathError, PeerLostError))
    for error in (first, third):
        assert isinstance(error, PeerLostError)
        assert error.rank == 1


def test_a_rank_that_is_lost_is_named() -> None:
    def body(fleet):
        model, optimizer = start(fleet, LocalSteps(period=2))
        for step in range(20):
            if fleet.rank == 1 and step == 3:
                raise DeathError
            one_step(model, optimizer, fleet.rank, step)

    first, _, third = run_fleets(3, body, accept=(DeathError, PeerLostError))
    for error in (first, third):
        assert isinstance(error, PeerLostError)
        assert error.rank == 1


def test_who_leaves_a_party_because_of_a_loss_elsewhere_is_not_blamed() -> None:
    """Rank 1 waits for its party's rank 0, which hears of the loss of rank 2, of the other party, and leaves."""
    has_left = threading.Event()

    def body(fleet):
        model, optimizer = start(fleet, LocalSteps(period=4))
        one_step(model, optimizer, fleet.rank, 0)
        if fleet.rank == 2:
            raise DeathError
        if fleet.rank == 0:
            with pytest.raises(PeerLostError):
                fleet.communicator.barrier().wait()
            has_left.set()
            return
        if fleet.rank == 1:
            assert has_left.wait(DEADLINE_S)
        for step in range(1, 4):
            one_step(model, optimizer, fleet.rank, step)

    errors = run_fleets(TWO_SITES, body, accept=(DeathError, PeerLostError))
    for rank in (1, 3):
        assert isinstance(errors[rank], PeerLostError)
        assert errors[rank].rank == 2


def test_what_does_not_go_with_local_steps_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="period must be a whole number from 1 up"):
        LocalSteps(period=0)

    def body(fleet):
        with pytest.raises(
            UpdateError, match=r"elastic=True does not go with LocalSteps\(\), with compress, whose codes"
        ):
            start(fleet, LocalSteps(compress="int8"), elastic=True)
        with pytest.raises(TopologyError, match=r"or parties, is .* not 7"):
            start(fleet, LocalSteps(parties=7))
        model, _ = start(fleet, LocalSteps())
        with (
            pytest.raises(UpdateError, match=r"not LocalSteps\(\): with LocalSteps\(\) whoever ends its period"),
            join(model),
        ):
            pass

    run_fleets(1, body)
