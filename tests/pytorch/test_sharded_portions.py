"""Portions of hosts and of whole parameters, with a model: state is where it should be, and steps stay the same."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle_models import CASES
from test_training_oracle import OPTIMIZERS, TOPOLOGIES, check_equal, train_together

from syncline.errors import ConfigurationError
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.topology import Topology
from syncline.updates import Sharded, matrix_cost

CASE = CASES["perceptron"]
GIVEN = {"h0": 3.0, "h1": 1.0, "h2": 0.0, "h3": 2.0}
ONE_AND_THREE = TOPOLOGIES["one_and_three"]


@pytest.mark.parametrize(
    "rule",
    [
        Sharded(portions=GIVEN, bucket_bytes=4000),
        Sharded(portions="fastest", bucket_bytes=4000),
        Sharded(portions=GIVEN, align="parameter", cost=matrix_cost, bucket_bytes=4000),
    ],
    ids=["given", "fastest", "whole"],
)
def test_steps_stay_those_of_one_process(rule: Sharded, run_fleets: Any) -> None:
    results, reference = train_together(CASE, ONE_AND_THREE, rule, OPTIMIZERS["adamw"], CASE.batches(3, 23), run_fleets)
    check_equal(results, reference, CASE.tolerance)
    if rule.portions != "fastest":
        assert results[2]["state_bytes"] == 0, "host h2 was given nothing"


def test_state_follows_what_hosts_were_given_and_is_told(run_fleets: Any, caplog: pytest.LogCaptureFixture) -> None:
    def body(fleet: Fleet) -> tuple[int, Any]:
        model = torch.nn.Linear(120, 50, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = distribute(model, optimizer, Sharded(portions=GIVEN), fleet=fleet)
        model(torch.ones(1, 120)).sum().backward()
        optimizer.step()
        assert fleet.statistics().updates == (optimizer.statistics(),)
        return optimizer.num_state_bytes, optimizer.statistics()

    with caplog.at_level(logging.INFO, logger="syncline.updates"):
        ended = run_fleets(ONE_AND_THREE, body)
    assert [num_bytes // 4000 for num_bytes, _ in ended] == [3, 1, 0, 2]
    assert ended[0][1].shares == pytest.approx([0.5, 1 / 6, 0.0, 1 / 3], abs=1e-3)
    assert caplog.messages == [str(ended[0][1])], "rank 0 says it once"


def test_a_cap_holds_and_is_said(run_fleets: Any, caplog: pytest.LogCaptureFixture) -> None:
    def body(fleet: Fleet) -> Any:
        model = torch.nn.Linear(1000, 1000, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return distribute(model, optimizer, Sharded(portions=1.25), fleet=fleet)[1].statistics()

    with caplog.at_level(logging.INFO, logger="syncline.updates"):
        statistics = run_fleets(Topology.load("demo-1-3"), body)[0]
    assert max(statistics.shares) <= 1.25 / 4 + 1e-3
    assert str(statistics).startswith("portions=1.25: of 1000000 elements ranks own")
    assert caplog.messages == [str(statistics)]


def test_memory_of_hosts_limits_what_their_ranks_own(run_fleets: Any) -> None:
    fixed_bytes, state_bytes = 2 * 24_000, 2 * 24_000
    root: Any = ONE_AND_THREE.root
    small = replace(root.children[0].children[0], memory_bytes=fixed_bytes + state_bytes // 10)
    rack = replace(root.children[0], children=(small,))
    topology = replace(ONE_AND_THREE, root=replace(root, children=(rack, root.children[1])))

    def body(fleet: Fleet) -> int:
        model = torch.nn.Linear(120, 50, bias=False)
        model, optimizer = distribute(model, torch.optim.Adam(model.parameters()), Sharded(), fleet=fleet)
        model(torch.ones(1, 120)).sum().backward()
        optimizer.step()
        return sum(
            state.numel() * 4 for values in optimizer.training.updater.state.values() for state in values.values()
        )

    owned = run_fleets(topology, body)
    assert 0 < owned[0] <= state_bytes // 10 + 100


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Sharded(portions={"h0": 1.0, "h7": 1.0}), "name 'h7', which it has not; its hosts are h0, h1"),
        (Sharded(portions={"h0": 1.0}), "leave out 'h1'"),
    ],
)
def test_hosts_that_there_are_not_are_refused(rule: Sharded, message: str, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        model = torch.nn.Linear(2, 2)
        with pytest.raises(ConfigurationError, match=message):
            distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), rule, fleet=fleet)

    run_fleets(Topology.flat(2), body)
