"""What rank 0 says of other update rules after the first minute: where links hold steps up, and where they do not."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import syncline
from syncline.observe import Trace
from syncline.pytorch import rule_watch
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.rule_watch import late_gradients, other_rule
from syncline.topology import Topology
from thread_fleets import run_fleets

SITES = Topology.load("two-sites")
MIB = 1 << 20


@pytest.mark.parametrize("rule", [syncline.AllReduce(), syncline.Sharded()])
def test_where_links_hold_steps_up_codes_and_local_steps_are_named(rule: Any) -> None:
    links_s = 16 * MIB / (20e6 / 8)
    told = other_rule(rule, SITES, 16 * MIB, links_s + 0.5, links_s)
    assert f'by {type(rule).__name__}(compress="int8"), and ' in told
    assert "500 ms by LocalSteps(period=16), which are not the same steps: compare losses" in told


@pytest.mark.parametrize(
    ("rule", "step_s", "waited_s"),
    [
        (syncline.Sharded(), 100.0, 7.0),  # computing alone
        (syncline.Sharded(), 8.0, 0.0),  # all is under the backward pass
        (syncline.Sharded(compress="int8"), 9.0, 7.0),  # the user has chosen
        (syncline.LocalSteps(), 0.5, 0.1),  # which pays
        (syncline.Clustered(), 1.0, 0.5),
    ],
)
def test_nothing_is_said_where_another_rule_is_not_clearly_better(rule: Any, step_s: float, waited_s: float) -> None:
    assert other_rule(rule, SITES, 16 * MIB, step_s, waited_s) == ""


@pytest.mark.parametrize("rule", [syncline.LocalSteps(), syncline.Overlapped(), syncline.Clustered()])
def test_a_rule_that_is_no_faster_than_an_exact_one_is_told_so(rule: Any) -> None:
    told = other_rule(rule, Topology.flat(4, rate=125e6), MIB, 0.5, 0.1)
    assert told.startswith(f"a step of {type(rule).__name__}() takes 500 ms on this network")
    assert "one of Sharded() at most 4" in told


def test_global_gradients_that_come_late_are_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert late_gradients(2.0) == ""
    monkeypatch.setattr(rule_watch, "FIRST_S", 0.0)
    monkeypatch.setattr(rule_watch, "FRESH", 0.5)  # it is said in the second step
    is_trained = threading.Event()

    def body(fleet: Fleet) -> None:
        model = torch.nn.Linear(10, 10)
        optimizer = torch.optim.Adam(model.parameters())
        rule = syncline.Overlapped(max_staleness=None, period=99)
        model, optimizer = syncline.distribute(model, optimizer, rule, fleet=fleet)
        if fleet.rank == 1:  # it makes no step, so the other gets no global gradient
            assert is_trained.wait(60)
            return
        for _ in range(5):
            model(torch.ones(2, 10)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        is_trained.set()

    run_fleets(2, body)
    assert "global gradients of Overlapped() come " in (told := capfd.readouterr().err)
    assert "iterations late on average, and from 0.5 on it takes more samples than synchronous training" in told


@pytest.mark.parametrize(("first_s", "num_lines"), [(0.0, 1), (60.0, 0)])
def test_it_is_said_once_by_rank_0_after_the_first_minute(
    first_s: float, num_lines: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rule_watch, "FIRST_S", first_s)

    def body(fleet: Fleet) -> None:
        model = torch.nn.Linear(10, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = syncline.distribute(model, optimizer, syncline.LocalSteps(period=2), fleet=fleet)
        for _ in range(6):
            model(torch.ones(2, 10)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    run_fleets(Topology.flat(2, rate=125e7), body)
    assert capfd.readouterr().err.count("whose steps are those of one process over all batches") == num_lines


def test_the_minute_begins_anew_where_links_have_other_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else steps on fast links would be held against what slow ones need, and codes seem to save all of it."""
    said: list[str] = []
    monkeypatch.setattr(rule_watch, "say", said.append)
    updater = SimpleNamespace(iteration=0, mean_staleness=0.0)
    fleet = SimpleNamespace(rank=0, topology=Topology.flat(2, rate=125e6), trace=Trace())
    training = SimpleNamespace(updater=updater, model=torch.nn.Linear(2048, 2048))
    watch = rule_watch.RuleWatch(SimpleNamespace(training=training, fleet=fleet, rule=syncline.Sharded()))  # type: ignore[arg-type]
    for now_s, iteration, waited_s in ((0.0, 0, 0.0), (50.0, 100, 10.0), (70.0, 102, 24.0), (118.0, 108, 66.0)):
        fleet.topology = SITES if iteration else fleet.topology
        fleet.statistics = lambda waited_s=waited_s: SimpleNamespace(waited_s={"step": waited_s})
        monkeypatch.setattr(rule_watch, "time", SimpleNamespace(monotonic=lambda now_s=now_s: now_s))
        updater.iteration = iteration
        watch.end_step()
        assert len(said) == (now_s > 110.0)
    assert said[0].startswith("for 7 s of a step's 8.5 s rank 0 waits")
