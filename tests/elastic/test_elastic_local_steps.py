"""Losses at any call of a training with local steps, on threads: who is left ends equal, and no step counts twice."""

import random
import threading

import pytest
import torch
from mortal_fleets import DiedError, run_mortals
from torch import nn

import syncline
from small_racks import TWO_SITES
from syncline.schedule.period import AutomaticPeriod
from syncline.updates.rounds import Round
from thread_fleets import run_fleets

NUM_RANKS, NUM_STEPS = 4, 9
DEADLINE_S = 60.0
SMALL = syncline.AllReduce(bucket_bytes=32)
WORLDS = {"each a party": NUM_RANKS, "two parties": TWO_SITES}
RULES = {
    "in turn": {"period": 2, "fragments": 1, "overlap": False},
    "overlapped": {"period": 2, "fragments": 1},
    "each step": {"period": 2, "fragments": 2, "within": SMALL},
    "momentum": {"period": 3, "fragments": 2, "outer": syncline.Nesterov()},
    "chosen": {"period": "auto", "within": SMALL},
    "own pace": {"period": 3, "pace": "own", "within": SMALL},
}


@pytest.fixture(autouse=True)
def _other_periods(monkeypatch):
    """Let a period that ranks choose be another one after each, and paces be measured over few steps."""

    def judge(self, held_up):
        assert 0.0 <= held_up <= 1.0
        self.num_steps = {2: 4, 4: 3, 3: 1, 1: 2}[self.num_steps]
        return True

    monkeypatch.setattr(AutomaticPeriod, "judge", judge)
    monkeypatch.setattr("syncline.schedule.period.LEAST_STEPS", 4)


class Tally(nn.Module):
    """Its gradient is the same wherever the parameters are: with a rate of 1, each step of a rank counts 1."""

    def __init__(self):
        super().__init__()
        self.counts = nn.ParameterList([nn.Parameter(torch.zeros(NUM_RANKS, dtype=torch.float64)) for _ in range(3)])
        self.register_buffer("last", torch.zeros(1))

    def forward(self, rank):
        self.last.fill_(rank)
        return -sum(count[rank] for count in self.counts)


def train(world, rule, deaths, *, num_steps=lambda _: NUM_STEPS, begins_early=True, ends_once_more=False):
    """Return the counts, the buffer, members and iteration of each rank that lived, at a period's end."""

    def body(fleet, mortal):
        model, number = Tally(), fleet.rank
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = syncline.distribute(model, optimizer, rule, elastic=True, fleet=fleet)
        changes = []
        optimizer.on_membership_change(changes.append)

        def make_steps(number_of_steps):
            for _ in range(number_of_steps):
                optimizer.zero_grad()
                model(number).backward()
                optimizer.step()
            optimizer.end_period()

        fleet.barrier()  # all have ended distribute(), in which a loss is an error
        with mortal():
            if ends_once_more:
                make_steps(2)
            make_steps(num_steps(number))
        make_steps(1)  # of one loss a rank may hear at the end of a period, and another after it
        counts = torch.stack([count.detach().clone() for count in model.counts])
        return counts, float(model.last), fleet.members, optimizer.iteration, changes

    begin = Round._begin_early
    if not begins_early:  # then sums are calls of the training thread, before which ranks die too
        Round._begin_early = lambda _: None
    try:
        return run_mortals(world, deaths, body)
    finally:
        Round._begin_early = begin


def ended(lived, deaths):
    """Those that are left ended with the same bits, or without a quorum."""
    results = {rank: result for rank, result in lived.items() if not isinstance(result, Exception)}
    stopped = [result for result in lived.values() if isinstance(result, Exception)]
    assert all(isinstance(error, syncline.QuorumLostError) for error in stopped), (deaths, stopped)
    first = next(iter(results.values()), None)
    for counts, last, members, iteration, changes in results.values():
        assert torch.equal(counts, first[0]), deaths
        assert (last, members, iteration) == (first[1], tuple(results), first[3]), deaths
        assert [change.lost for change in changes] == [change.lost for change in first[4]], deaths
    return results


@pytest.mark.parametrize("begins_early", [True, False], ids=["beside", "in step"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("world", WORLDS)
def test_who_is_left_ends_equal_wherever_ranks_die(world, rule, begins_early):
    draw = random.Random(f"{world} {rule}")
    for num_dead in (1, 1, 2):
        deaths = {rank: draw.randrange(1, 50) for rank in draw.sample(range(NUM_RANKS), num_dead)}
        lived = train(WORLDS[world], syncline.LocalSteps(**RULES[rule]), deaths, begins_early=begins_early)
        results = ended(lived, deaths)
        assert results or num_dead == 2, (deaths, lived)


@pytest.mark.parametrize("rule", ["in turn", "overlapped", "each step"])
@pytest.mark.parametrize("in_sums", [False, True], ids=["before a round", "before a sum"])
def test_each_step_counts_once(rule, in_sums):
    """Ranks alike in steps: those before the loss count a fourth each, those after it a third, and none both."""
    draw = random.Random(f"count {rule}")
    for _ in range(6):
        victim, death = draw.randrange(NUM_RANKS), draw.randrange(1, 12 if in_sums else 8)
        lived = train(NUM_RANKS, syncline.LocalSteps(**RULES[rule]), {victim: death}, begins_early=not in_sums)
        results = ended(lived, death)
        assert len(results) == NUM_RANKS - 1
        counts, *_ = next(iter(results.values()))
        for values in counts:
            left = values[list(results)]
            assert left.max() - left.min() < 1e-6, "they have made as many steps"
            num_before = (12.0 * left[0] - 4.0 * (NUM_STEPS + 1)) / (3.0 - 4.0)
            for number, most in ((num_before, NUM_STEPS + 1), (4.0 * values[victim], NUM_STEPS)):
                assert abs(float(number) - round(float(number))) < 1e-5
                assert -1e-5 < float(number) < most + 1e-5


def test_who_lacks_the_sums_of_a_round_gets_them_from_who_has_merged_it(monkeypatch):
    """Rank 1 dies when all have them; rank 0 merges them before it finds that, and rank 2 is made to have none."""
    has_result, shared = Round.has_result.fget, []
    share = Round.share
    monkeypatch.setattr(Round, "share", lambda self, *about: shared.append(self) or share(self, *about))

    def has_it(self):
        return has_result(self) and (self._rank != 2 or self in shared)

    monkeypatch.setattr(Round, "has_result", property(has_it))
    all_have, is_found = threading.Barrier(3), threading.Event()

    def body(fleet):
        model, number = Tally(), fleet.rank
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        rule = syncline.LocalSteps(period=1)
        model, optimizer = syncline.distribute(model, optimizer, rule, elastic=True, fleet=fleet)
        for step in range(4):
            optimizer.zero_grad()
            model(number).backward()
            optimizer.step()
            if step == 0:
                optimizer.training.updater._flight.wait()
                all_have.wait(DEADLINE_S)
                if number == 1:
                    fleet.base.abort()
                    raise DiedError
                if number == 2:
                    fleet.communicator.watch_failure(lambda _: is_found.set())
                    assert is_found.wait(DEADLINE_S)
        optimizer.end_period()
        return model.counts[0].detach().clone()

    first, _, third = run_fleets(3, body, accept=DiedError)
    assert len(shared) == 2
    assert torch.equal(first, third)
    assert first.tolist() == pytest.approx([1 / 3 + 3 / 2, 1 / 3, 1 / 3 + 3 / 2, 0.0], abs=1e-6)


def test_ranks_make_different_numbers_of_steps():
    """Some end their period long before the others, and follow; also those of one party together."""
    for world, deaths in (("each a party", {1: 9}), ("each a party", {3: 12}), ("two parties", {2: 40})):
        rule = syncline.LocalSteps(period=2, fragments=2, within=SMALL)
        num_steps = {0: 3, 1: 3, 2: 8, 3: 8}.get
        results = ended(train(WORLDS[world], rule, deaths, num_steps=num_steps, ends_once_more=True), deaths)
        assert len(results) == 3


@pytest.mark.parametrize("world", WORLDS)
def test_fewer_than_the_least_do_not_go_on(world):
    def body(fleet, mortal):
        model = Tally()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        elastic = syncline.Elastic(min_ranks=4)
        rule = syncline.LocalSteps(period=2)
        model, optimizer = syncline.distribute(model, optimizer, rule, elastic=elastic, fleet=fleet)
        number = fleet.rank
        with mortal():
            for _ in range(NUM_STEPS):
                optimizer.zero_grad()
                model(number).backward()
                optimizer.step()

    lived = run_mortals(WORLDS[world], {2: 6}, body)
    assert len(lived) == 3
    assert all(isinstance(error, syncline.QuorumLostError) for error in lived.values()), lived


def test_a_party_goes_on_with_the_gradients_of_those_that_are_left():
    """Ranks of one party have the same parameters after each step, and a lost one's samples keep their weight."""

    def body(fleet, mortal):
        model, number, seen = Tally(), fleet.rank, []
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        rule = syncline.LocalSteps(period=100)
        model, optimizer = syncline.distribute(model, optimizer, rule, elastic=True, fleet=fleet)
        with mortal():
            for _ in range(NUM_STEPS):
                optimizer.zero_grad()
                model(number).backward()
                optimizer.step()
                seen.append(model.counts[0].detach().clone())
        optimizer.end_period()
        return seen, model.counts[0].detach().clone(), optimizer.statistics().parties

    lived = run_mortals(TWO_SITES, {1: 17}, body)
    (alone, end, parties), (first, _, _), (second, _, _) = (lived[rank] for rank in (0, 2, 3))
    assert all(map(torch.equal, first, second))
    assert parties == ((0,), (1, 2))
    num_together = round(2 * float(alone[-1][1]))
    assert 0 < num_together < NUM_STEPS
    assert float(alone[-1][0]) == num_together / 2 + (NUM_STEPS - num_together)
    samples = 2 * num_together + NUM_STEPS - num_together, 2 * NUM_STEPS
    for rank, moved in ((0, float(alone[-1][0])), (1, num_together / 2)):
        assert float(end[rank]) == pytest.approx(moved * samples[0] / sum(samples), abs=1e-6)
    assert float(end[2]) == pytest.approx(NUM_STEPS / 2 * samples[1] / sum(samples), abs=1e-6)
