"""Parties that make other numbers of steps in a period: by speeds that are given, and by those that are measured."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from small_racks import TWO_SITES
from syncline.errors import ConfigurationError
from syncline.pytorch import rule_watch
from syncline.pytorch.checkpoint import load_checkpoint, save_checkpoint
from syncline.pytorch.distribute import distribute
from syncline.schedule import Collective, CostModel, lower_bound, period
from syncline.updates import LocalSteps, Nesterov, local_steps_updater
from syncline.updates.local_steps_updater import LocalStepsUpdater
from thread_fleets import run_fleets

SLOW = {"a0": 1.0, "a1": 1.0, "b0": 0.5, "b1": 0.5}


class Tally(nn.Module):
    """Its gradient is the same wherever the parameters are: with a rate of 1, a step of a rank counts 1."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.counts = nn.ParameterList([nn.Parameter(torch.zeros(num_ranks, dtype=torch.float64)) for _ in range(4)])

    def forward(self, rank: int) -> torch.Tensor:
        return -torch.stack([count[rank] for count in self.counts]).sum()


def begin(fleet, **settings):
    model = Tally(fleet.world_size)
    return distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), LocalSteps(**settings), fleet=fleet)


def step(model, optimizer, rank: int) -> None:
    optimizer.zero_grad()
    model(rank).backward()
    optimizer.step()


def train(fleet, num_rounds: int, **settings):
    """Train until so many rounds are merged; return steps, what they count, and the counters."""
    model, optimizer = begin(fleet, **settings)
    num_steps = 0
    while optimizer.statistics().num_rounds < num_rounds:
        step(model, optimizer, fleet.rank)
        num_steps += 1
    counters = optimizer.statistics()
    optimizer.end_period()
    return num_steps, [count.tolist() for count in model.counts], counters


@pytest.mark.parametrize("fragments", [1, 4, 8])
@pytest.mark.parametrize("overlap", [True, False])
def test_given_speeds_say_how_many_steps_each_party_makes(fragments: int, overlap: bool) -> None:
    settings = {"period": 8, "fragments": fragments, "overlap": overlap, "pace": SLOW}
    # The slow site makes four steps in a period, so there are no more than four fragments.
    rounds_of_period = {1: 1, 4: 4, 8: 4}[fragments]
    results = run_fleets(TWO_SITES, lambda fleet: train(fleet, 3 * rounds_of_period, **settings))
    (fast, counts, counters), (slow, _, of_slow) = results[0], results[2]
    assert (counters.period, of_slow.period) == (8, 4)
    assert fast == 2 * slow
    assert all(other == counts for _, other, _ in results)  # the same bits on all ranks


def test_each_sample_counts_the_same_however_many_steps_its_site_makes() -> None:
    """One site makes twice as many steps: with the weight of all its samples each of them would count twice."""
    settings = {"period": 8, "fragments": 1, "overlap": False, "pace": SLOW}
    results = run_fleets(TWO_SITES, lambda fleet: train(fleet, 2, **settings))
    (fast, counts, _), (slow, *_) = results[0], results[2]
    assert (fast, slow) == (16, 8)
    # Ranks of a site step on their mean: one step of a site counts one half for each, and sites one half.
    for count in counts:
        assert count == pytest.approx([fast / 4, fast / 4, slow / 4, slow / 4], rel=1e-6)


def test_all_end_together_where_loops_have_equal_lengths_too() -> None:
    def body(fleet):
        model, optimizer = begin(fleet, period=8, pace=SLOW, outer=Nesterov())
        for _ in range(21):
            step(model, optimizer, fleet.rank)
        optimizer.end_period()
        return [count.tolist() for count in model.counts], optimizer.iteration

    results = run_fleets(TWO_SITES, body)
    assert all(result == results[0] for result in results)
    assert results[0][1] == 21


def measured(monkeypatch: pytest.MonkeyPatch, step_s: list[float]) -> None:
    """Let the steps of each rank have taken so long, whatever the clock says."""
    told = LocalStepsUpdater._told

    def _told(self, num_moved, *, ends):
        ends, number, _, _, num_steps, _ = told(self, num_moved, ends=ends)
        return ends, number, 0.0, max(1e-9, num_steps * step_s[self.collectives.rank]), num_steps, num_moved

    monkeypatch.setattr(LocalStepsUpdater, "_told", _told)


@pytest.mark.parametrize(
    ("step_s", "periods"),
    [
        ([0.1, 0.1, 0.2, 0.2], [16, 16, 8, 8]),
        ([0.1, 0.105, 0.107, 0.1], [16, 16, 16, 16]),  # alike, or nearly
        ([0.2, 0.1, 0.4, 0.8], [8, 8, 2, 2]),  # a party is as fast as its slowest rank
        ([9.0, 9.0, 0.1, 0.1], [1, 1, 16, 16]),
    ],
)
def test_measured_steps_say_how_many_each_party_makes(
    step_s: list[float], periods: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, step_s)
    results = run_fleets(TWO_SITES, lambda fleet: train(fleet, 40, period=16, pace="own"))
    assert [counters.period for *_, counters in results] == periods
    assert all(counts == results[0][1] for _, counts, _ in results)


@pytest.mark.parametrize(("slow_s", "num_lines"), [(0.2, 1), (0.11, 0)])
def test_the_first_minute_names_a_party_that_holds_the_others_up(
    slow_s: float, num_lines: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    measured(monkeypatch, [0.1, 0.1, 0.1, slow_s])

    def body(fleet):
        model, optimizer = begin(fleet, period=8)
        for number in range(24):
            if number == 20 and fleet.rank == 0:  # who speaks
                monkeypatch.setattr(rule_watch, "FIRST_S", 0.0)
            step(model, optimizer, fleet.rank)
        optimizer.end_period()

    run_fleets(TWO_SITES, body)
    said = "the party of b0, b1 computes at 50% of the fastest one's speed, and all make as many steps; by prediction "
    said += 'LocalSteps(pace="own") takes 1.5 times as many samples in the same time'
    assert capfd.readouterr().err.count(said) == num_lines


def test_a_party_whose_steps_become_slow_makes_fewer_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    step_s = [0.1] * 4
    measured(monkeypatch, step_s)

    def body(fleet):
        model, optimizer = begin(fleet, period=4, fragments=2, pace="own")
        periods = []
        while len(periods) < 2:
            rounds = optimizer.statistics().num_rounds
            while optimizer.statistics().num_rounds < rounds + 24:
                step(model, optimizer, fleet.rank)
            periods.append(optimizer.statistics().period)
            fleet.barrier()
            step_s[2:] = [0.4, 0.4]
            fleet.barrier()
        optimizer.end_period()
        return periods, [count.tolist() for count in model.counts]

    results = run_fleets(TWO_SITES, body)
    assert [periods for periods, _ in results] == [[4, 4], [4, 4], [4, 1], [4, 1]]
    assert all(counts == results[0][1] for _, counts in results)


def test_steps_are_timed_without_what_rounds_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits in rounds is not slow."""
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])

    def body(fleet):
        model, optimizer = begin(fleet, period=4, fragments=1, pace="own")
        updater = optimizer.training.updater
        for _ in range(3):
            step(model, optimizer, fleet.rank)
            now_s[0] += 1.0
        updater._held_up_s = 1.5
        _, _, held_up_s, taken_s, num_steps, _ = updater._told(4, ends=False)
        optimizer.end_period()
        return (taken_s - held_up_s) / num_steps

    assert run_fleets(1, body) == [pytest.approx((3.0 - 1.5) / 2)]  # the first step began before anybody looked


def test_what_a_round_has_held_up_is_told_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which begins in the same call: else the first steps would seem longer than they are."""
    now_s, told = [0.0], []
    arrive, tell = LocalStepsUpdater._arrive, LocalStepsUpdater._told

    def late(self, flight):
        now_s[0] += 0.5
        return arrive(self, flight)

    def note(self, num_steps, *, ends):
        numbers = tell(self, num_steps, ends=ends)
        told.append(numbers[2:5])
        return numbers

    def body(fleet):
        model, optimizer = begin(fleet, fragments=2)
        for _ in range(4):
            now_s[0] += 0.25
            step(model, optimizer, fleet.rank)

    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(local_steps_updater, "LEAST_BYTES", 1)
    monkeypatch.setattr(period.AutomaticPeriod, "judge", lambda *_, **__: False)
    monkeypatch.setattr(LocalStepsUpdater, "_arrive", late)
    monkeypatch.setattr(LocalStepsUpdater, "_told", note)
    run_fleets(1, body)
    assert told[1:4] == [(0.5 * number, 0.75 * number, number) for number in (1, 2, 3)]


def test_a_found_period_is_that_of_the_fastest_party(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, [0.1, 0.1, 0.2, 0.2])
    results = run_fleets(TWO_SITES, lambda fleet: train(fleet, 40, period="auto", pace="own"))
    assert [counters.period for *_, counters in results] == [2, 2, 1, 1]
    assert all(counts == results[0][1] for _, counts, _ in results)


@pytest.mark.parametrize(("noticed_s", "first"), [(1.0, 2), (0.0, 16)])
@pytest.mark.parametrize(
    ("pace", "slow", "predicted"),
    [("equal", 1.0, 8), ("equal", 2.0, 4), ("own", 2.0, 8)],
)
def test_where_rates_are_known_a_period_is_what_they_say_once_steps_were_timed(
    pace: str, slow: float, predicted: int, noticed_s: float, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short one to begin with would hold the first steps up for a transfer of all parameters."""
    monkeypatch.setattr(local_steps_updater, "LEAST_BYTES", 1)
    monkeypatch.setattr(period, "NOTICED_S", noticed_s)
    num_bytes = 8 * sum(count.numel() for count in Tally(4).counts)
    round_s = lower_bound(TWO_SITES, Collective.ALL_REDUCE, num_bytes) / CostModel().payload_share
    measured(monkeypatch, [round_s / 6, round_s / 6, slow * round_s / 6, slow * round_s / 6])

    def body(fleet):
        model, optimizer = begin(fleet, pace=pace)
        seen = []
        for _ in range(12):
            step(model, optimizer, fleet.rank)
            seen.append(optimizer.statistics().period)
        optimizer.end_period()
        return seen, [count.tolist() for count in model.counts]

    for seen, counts in run_fleets(TWO_SITES, body):
        assert seen == [first] * 2 + [predicted] * 10
        for count in counts if pace == "equal" else ():
            assert count == pytest.approx([12 / 4] * 4, rel=1e-6)


def test_training_goes_on_from_a_checkpoint_with_given_speeds(tmp_path: Path) -> None:
    def first(fleet):
        model, optimizer = begin(fleet, period=4, pace=SLOW)
        for _ in range(8 if fleet.rank < 2 else 4):
            step(model, optimizer, fleet.rank)
        save_checkpoint(tmp_path / "saved", model, optimizer)
        return go_on(fleet, model, optimizer)

    def second(fleet):
        model, optimizer = begin(fleet, period=4, pace=SLOW)
        load_checkpoint(tmp_path / "saved", model, optimizer)
        return go_on(fleet, model, optimizer)

    def go_on(fleet, model, optimizer):
        assert optimizer.iteration == 8
        for _ in range(8 if fleet.rank < 2 else 4):
            step(model, optimizer, fleet.rank)
        optimizer.end_period()
        return [count.tolist() for count in model.counts]

    topology = TWO_SITES
    assert run_fleets(topology, first) == run_fleets(topology, second)


def test_a_pace_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"overlap=False, which waits; give the speed of each host"):
        LocalSteps(pace="own", overlap=False)
    for pace in ({}, {"a0": 0.0}, "fast"):
        with pytest.raises(ConfigurationError, match="pace"):
            LocalSteps(pace=pace)
    given = {"a0": 1.0, "b0": 0.5}, {"b0": 0.5, "a0": 1.0}
    assert len({repr(LocalSteps(pace=pace)) for pace in given}) == 1, "ranks compare rules as texts"

    def body(fleet):
        with pytest.raises(
            ConfigurationError, match=r"the speeds of LocalSteps\(pace=\) give a number .* leave out 'b1'"
        ):
            begin(fleet, pace={"a0": 1.0, "a1": 1.0, "b0": 0.5})

    run_fleets(TWO_SITES, body)
