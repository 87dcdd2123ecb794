"""Trainings that follow the rates of links: when they measure, what they plan, and that all ranks go on alike."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import syncline
from syncline import discovery
from syncline.discovery import TrafficWatch, following
from syncline.discovery.kept import keep
from syncline.errors import UpdateError
from syncline.pytorch import following as training_following
from syncline.pytorch.fleet import Fleet
from syncline.topology import Topology
from thread_fleets import run_fleets

PLACES = "{switch: s, children: [{switch: r, uplink: 2 Gbit/s, children: [{host: 'h[0-1]', uplink: 1 Gbit/s}]}, "
RACKS = Topology.parse(PLACES + "{host: h2, uplink: 1 Gbit/s}]}")
SLOWER = Topology.parse(RACKS.to_yaml().replace("2 Gbit/s", "100 Mbit/s"))
"""Where the uplink is slow, the host beside the rack is to own half."""


def traffic(rates: list[float], *, busy_s: float = 5.0) -> TrafficWatch:
    """Return a watch that has seen one peer move at these rates, a window after another."""
    watch, moved = TrafficWatch(), [0.0, 0.0]
    watch.begin(0.0, {1: (0, 0.0)})
    for number, rate in enumerate(rates, start=1):
        moved = [moved[0] + rate * busy_s, moved[1] + busy_s]
        watch.see(number * following.WINDOW_S, {1: (int(moved[0]), moved[1])})
    return watch


@pytest.mark.parametrize(
    ("rates", "is_suspicious"),
    [
        ([8e6, 8e6, 8e6, 8e6], False),
        ([8e6, 5e6, 5e6], False),
        ([8e6, 5e6, 5e6, 5e6], True),
        ([8e6, 12e6, 12e6, 12e6], True),
        ([8e6, 5e6, 12e6, 5e6], False),
        ([8e6, 5e6, 8e6, 5e6], False),
    ],
)
def test_a_rate_is_suspicious_when_it_is_off_for_half_a_minute(rates: list[float], is_suspicious: bool) -> None:
    assert traffic(rates).is_suspicious is is_suspicious


def test_a_rank_that_comes_late_costs_no_rate() -> None:
    """Its connections are idle meanwhile: a tenth of the bytes in a tenth of the busy time is the same rate."""
    watch = TrafficWatch()
    watch.begin(0.0, {1: (0, 0.0)})
    watch.see(10.0, {1: (80_000_000, 10.0)})
    for window in range(1, 5):
        watch.see(10.0 * (window + 1), {1: (80_000_000 + 8_000_000 * window, 10.0 + window)})
    assert not watch.is_suspicious


@pytest.mark.parametrize(
    "rule", [syncline.Sharded(bucket_bytes=1 << 15, portions="fastest"), syncline.AllReduce(bucket_bytes=1 << 15)]
)
def test_all_ranks_plan_again_and_train_on_as_if_nothing_had_been(
    rule: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One rank suspects a link in every step; what is measured is a slower one, and then the same."""
    monkeypatch.setattr(discovery, "measure_again", lambda *_, **__: SLOWER)
    monkeypatch.setattr(training_following, "LOOK_S", 0.0)

    def train(fleet: Fleet, *, follows: bool) -> tuple[list[torch.Tensor], list[Any], int]:
        fleet.replans = follows
        model = torch.nn.Sequential(torch.nn.Linear(100, 150), torch.nn.Linear(150, 40))
        for parameter in model.parameters():
            torch.nn.init.uniform_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
        model, optimizer = syncline.distribute(model, torch.optim.Adam(model.parameters(), lr=0.01), rule, fleet=fleet)
        if fleet.follower is not None:
            suspect = SimpleNamespace(
                **dict.fromkeys(("begin", "see", "skip"), lambda *_: 0), is_suspicious=fleet.rank == 2
            )
            fleet.follower._watch = suspect
        for step in range(6):
            batch = torch.randn(4, 100, generator=torch.Generator().manual_seed(10 * step + fleet.rank))
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        schedules = optimizer.training.updater.collectives.bucket_schedules
        owned = [schedule.owned for schedule in schedules]
        num_plans = fleet.follower.num_plans if fleet.follower is not None else 0
        return [parameter.detach().clone() for parameter in model.parameters()], owned, num_plans

    def body(fleet: Fleet) -> Any:
        return train(fleet, follows=True)

    followed = run_fleets(RACKS, body)
    plain = run_fleets(RACKS, lambda fleet: train(fleet, follows=False))
    assert [num_plans for *_, num_plans in followed] == [1] * 3
    owners_moved = any(owned != before for (_, owned, _), (_, before, _) in zip(followed, plain, strict=True))
    assert owners_moved is isinstance(rule, syncline.Sharded)
    for (values, _, _), (expected, _, _) in zip(followed, plain, strict=True):
        for value, other in zip(values, expected, strict=True):
            assert torch.allclose(value, other, rtol=1e-5, atol=1e-6)
    told = [line for line in capfd.readouterr().err.splitlines() if "links have other rates" in line]
    assert len(told) == 1
    assert "(was 2 Gbit/s)" in told[0]


def test_what_cannot_plan_again_is_refused_where_it_was_asked_for() -> None:
    def body(fleet: Fleet) -> None:
        fleet.replans = fleet.is_replan_asked = True
        model = torch.nn.Linear(3, 2)
        syncline.distribute(
            model, torch.optim.SGD(model.parameters(), lr=0.1), syncline.Sharded(step_in_backward=True), fleet=fleet
        )

    (error, *_) = run_fleets(2, body, accept=UpdateError)
    assert "init(replan=True) does not go with this training: Sharded(step_in_backward=" in str(error)


@pytest.mark.parametrize(
    ("seconds", "is_found_kept"), [((1.0, 0.5, 0.5, 1.0), False), ((0.5, 1.0, 1.0, 0.5), True), ((1.0,) * 4, True)]
)
def test_where_the_network_is_in_doubt_two_plans_are_tried_and_the_faster_is_kept(
    seconds: tuple[float, ...],
    is_found_kept: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Rank 0's clock tells how long a step takes in each turn, and all go on with the same."""
    num_steps = training_following.NUM_LEADING + training_following.NUM_TIMED
    clocks = threading.local()

    def tell_s() -> float:
        clocks.steps = getattr(clocks, "steps", -1) + 1
        clocks.now_s = getattr(clocks, "now_s", 0.0) + seconds[min(3, clocks.steps // num_steps)]
        return float(clocks.now_s)

    monkeypatch.setattr(training_following, "time", SimpleNamespace(monotonic=tell_s))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = keep(discovery.discovery_folder({"XDG_CACHE_HOME": str(tmp_path)}), SLOWER)

    def train(fleet: Fleet, *, is_in_doubt: bool) -> tuple[torch.Tensor, str, int, list[str]]:
        fleet.replans = fleet.is_network_in_doubt = is_in_doubt
        model = torch.nn.Linear(200, 100)
        torch.nn.init.uniform_(model.weight, generator=torch.Generator().manual_seed(1))
        torch.nn.init.zeros_(model.bias)
        rule = syncline.Sharded(bucket_bytes=1 << 15, portions="fastest")
        model, optimizer = syncline.distribute(model, torch.optim.Adam(model.parameters(), lr=0.01), rule, fleet=fleet)
        names = []
        for step in range(4 * num_steps + 2):
            batch = torch.randn(4, 200, generator=torch.Generator().manual_seed(10 * step + fleet.rank))
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            names.append(fleet.topology.name)
        num_plans = fleet.follower.num_plans if fleet.follower is not None else 0
        return model.weight.detach().clone(), names[-1], num_plans, names

    tried = run_fleets(SLOWER, lambda fleet: train(fleet, is_in_doubt=True))
    plain = run_fleets(SLOWER, lambda fleet: train(fleet, is_in_doubt=False))
    for (value, name, num_plans, names), (expected, *_) in zip(tried, plain, strict=True):
        assert torch.allclose(value, expected, rtol=1e-5, atol=1e-6)
        assert (name == SLOWER.name, num_plans) == (is_found_kept, 2 if is_found_kept else 3)
        assert names.index("flat-3") == num_steps - 1  # the end of the first turn
    assert kept is not None
    assert kept.exists() is is_found_kept
    (told,) = [line for line in capfd.readouterr().err.splitlines() if "two plans were tried" in line]
    assert told.endswith("the first" if is_found_kept else "the second, and what was measured is not kept")
