"""Training with priorities: equal to the bit to training without, and classes that are seen where they should be."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
from torch import nn

from syncline import Priorities
from syncline.errors import ConfigurationError, SynclineError
from syncline.observe import Trace
from syncline.priorities.forward_timing import predict_forward
from syncline.priorities.meter import StepSample
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.topology import Topology
from syncline.updates import AllReduce, Clustered, Sharded, UpdateRule, class_tuner
from syncline.updates.class_tuner import Decision, Verdict
from thread_fleets import run_over_tcp

pytestmark = pytest.mark.usefixtures("small_slices")

NUM_STEPS = 12
RULES: dict[str, UpdateRule] = {
    "sharded": Sharded(bucket_bytes=2000, overlap_forward=True),
    "whole_parameters": Sharded(align="parameter", bucket_bytes=2000),
    "all_reduce": AllReduce(bucket_bytes=2000),
    # written down: what a busy machine measures of itself would group the ranks otherwise in the second run
    "clustered": Clustered(clusters=((0, 1), (2,)), period=4),
}
PRIORITIES = {
    "searched": Priorities(measure_steps=3),
    "equal": Priorities(search="equal", num_classes=3),
    "given": Priorities(num_classes=2, search=(1, 5), dscp=None),
}


@pytest.fixture(autouse=True)
def _every_sample_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little classes bring on a machine without links."""
    monkeypatch.setattr(class_tuner, "MIN_GAIN", 0.0)
    monkeypatch.setattr(class_tuner, "SEARCH_AGAIN_AT", 0.0)


def train(fleet: Fleet, rule: UpdateRule, priorities: Any) -> tuple[list[torch.Tensor], Any, Any]:
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(24, 24), nn.Tanh())))
    generator = torch.Generator().manual_seed(7)  # ranks are threads here, which share torch's own
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2, generator=generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, distributed = distribute(model, optimizer, rule, samples="batch", priorities=priorities, fleet=fleet)
    generator = torch.Generator().manual_seed(fleet.rank)
    for _ in range(NUM_STEPS):
        model(torch.randn(4 + fleet.rank, 24, generator=generator)).square().mean().backward()
        distributed.step()
        distributed.zero_grad()
    distributed.synchronize()
    result = [parameter.detach().clone() for parameter in model.parameters()]
    return result, distributed.class_statistics(), fleet.statistics()


@pytest.mark.filterwarnings("ignore:Priorities.* is ignored by:syncline.SynclineWarning")
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("priorities", PRIORITIES.values(), ids=PRIORITIES)
def test_results_are_equal_to_the_bit_with_priorities_and_without(
    run_fleets: Any, rule: UpdateRule, priorities: Priorities
) -> None:
    without = run_fleets(3, lambda fleet: train(fleet, rule, None))
    with_them = run_fleets(3, lambda fleet: train(fleet, rule, priorities))
    for (expected, *_), (found, *_) in zip(without, with_them, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_all_ranks_search_and_come_to_the_same_classes(run_fleets: Any) -> None:
    results = run_fleets(3, lambda fleet: train(fleet, RULES["sharded"], PRIORITIES["searched"]))
    statistics = [found for _, found, _ in results]
    first = statistics[0]
    assert first.num_searches >= 1
    assert len(first.classes) == len(first.num_bytes) == len(first.forward_s) == len(first.arrivals_s) > 3
    assert first.predicted_s <= first.one_class_s
    assert all(other == first for other in statistics)


def test_fixed_proportions_are_taken_from_the_first_step(run_fleets: Any) -> None:
    _, found, fleet = run_fleets(2, lambda fleet: train(fleet, RULES["sharded"], PRIORITIES["given"]))[0]
    assert found.is_on
    assert found.classes[0] == 0
    assert found.classes[-1] == 1
    assert list(found.classes) == sorted(found.classes)
    by_class = fleet.fabric.by_class()
    assert by_class[1].sent_bytes > by_class[0].sent_bytes > 0


def test_the_argument_wins_over_the_topology_file(run_fleets: Any) -> None:
    hosts = "switch: core\nchildren: [{host: h0, uplink: 1 Gbit/s}, {host: h1, uplink: 1 Gbit/s}]\n"
    topology = Topology.parse(hosts + "priorities: {search: equal, num_classes: 2}")
    _, of_file, _ = run_fleets(topology, lambda fleet: train(fleet, RULES["sharded"], True))[0]
    _, of_argument, _ = run_fleets(topology, lambda fleet: train(fleet, RULES["sharded"], False))[0]
    assert max(of_file.classes) == 1
    assert max(of_argument.classes) == 0


def test_it_is_said_once_that_classes_do_not_pay(
    run_fleets: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(class_tuner, "MIN_GAIN", 10.0)
    never = Priorities(measure_steps=2)
    with caplog.at_level(logging.INFO):
        _, found, _ = run_fleets(2, lambda fleet: train(fleet, RULES["sharded"], never))[0]
    assert found.num_searches > 1
    assert not found.is_on
    said = [record for record in caplog.records if "do not pay" in record.message]
    assert [record.levelno for record in said] == [logging.WARNING]


def test_the_trace_names_the_class_of_each_bucket(run_fleets: Any, tmp_path: Any) -> None:
    trace = Trace(rank=0, path=tmp_path / "trace.json")
    run_fleets(2, lambda fleet: train(fleet, RULES["sharded"], PRIORITIES["given"]), trace=trace)
    trace.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    classes = {
        event["args"]["connection_class"] for event in events if event["name"].startswith("all_gather of bucket")
    }
    assert classes == {0, 1}


def test_ranks_that_differ_in_priorities_are_told(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        train(fleet, RULES["sharded"], Priorities(num_classes=2 + fleet.rank))

    with pytest.raises(SynclineError, match="num_classes=2"):
        run_fleets(2, body)


def connections_of(fleet: Fleet) -> tuple[int, int]:
    """Return how many classes are open, and how large a message may be that a neighbour is sent unasked."""
    fabric: Any = fleet.communicator._fabric
    peer = fabric.peer(1 - fleet.rank)
    return peer.num_classes, peer.options.eager_bytes


ONE, SEVERAL, ONE_AGAIN = (1, 256 << 10), (4, 16 << 10), (4, 256 << 10)


@pytest.mark.parametrize("rule", [Sharded(bucket_bytes=2000), Sharded(bucket_bytes=2000, overlap_forward=True)])
def test_by_default_sizes_are_those_of_one_class_and_others_last_as_long_as_a_verdict_for_several(
    rule: Sharded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def retune(decision: Decision, sample: StepSample) -> bool:
        """Find that the last bucket goes better by itself, and the next time that it does not."""
        several = (0,) * (len(sample.forward_s) - 1) + (1,)
        classes = several if decision.verdict is None else (0,) * len(several)
        profile = decision.verdict.profile if decision.verdict else decision._search(sample).profile
        chosen = predict_forward(profile, classes)
        decision.verdict = Verdict(chosen=chosen, one_class_s=1.0, pays=classes == several, profile=profile)
        return True

    monkeypatch.setattr(Decision, "retune", retune)

    def body(fleet: Fleet) -> tuple[list[Any], list[int]]:
        model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, distributed = distribute(model, optimizer, rule, fleet=fleet)
        seen = []
        for _ in range(18):
            model(torch.ones(2, 24)).square().mean().backward()
            distributed.step()
            distributed.zero_grad()
            seen.append(connections_of(fleet))
        distributed.synchronize()
        by_class = fleet.statistics().fabric.by_class()
        return seen, [by_class[number].sent_messages if number in by_class else 0 for number in range(4)]

    for seen, sent in run_over_tcp(Topology.flat(2, rate=125e6), body):
        if rule.overlap_forward:
            assert seen == [ONE] * 8 + [SEVERAL] * 8 + [ONE_AGAIN] * 2
            assert sent[0] > sent[1] > 0 == sent[2] == sent[3]
        else:
            assert seen == [ONE] * 18
            assert not any(sent[1:])


def test_what_a_user_asks_for_holds_from_the_first_step() -> None:
    def body(fleet: Fleet) -> Any:
        model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(3)))
        rule = Sharded(bucket_bytes=2000, overlap_forward=True)
        distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), rule, priorities=Priorities(), fleet=fleet)
        return connections_of(fleet)

    assert run_over_tcp(Topology.flat(2, rate=125e6), body) == [SEVERAL] * 2


def test_models_whose_priorities_do_not_go_together_are_refused_at_once() -> None:
    def body(fleet: Fleet) -> None:
        for priorities in (True, Priorities(num_classes=2, search="equal")):
            model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(3)))
            rule = Sharded(bucket_bytes=2000, overlap_forward=True)
            distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), rule, priorities=priorities, fleet=fleet)

    with pytest.raises(ConfigurationError, match="give all models of a job the same priorities"):
        run_over_tcp(Topology.flat(2, rate=125e6), body)
