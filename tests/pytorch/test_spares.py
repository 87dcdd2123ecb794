"""Sharded with spares: equal to one process, state of the same bits on owner and spare, and nothing counted twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_models import CASES, Case, copies, loss_of
from test_training_oracle import DEEP, OPTIMIZERS, check_equal, train_together

from syncline.errors import ConfigurationError
from syncline.pytorch.checkpoint import load_checkpoint, save_checkpoint
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.topology import Topology
from syncline.updates import Sharded

pytestmark = pytest.mark.usefixtures("small_slices")

RACKS = """
switch: core
children:
  - {switch: a, uplink: 1 Gbit/s, children: [{host: "a[0-1]", uplink: 1 Gbit/s}]}
  - {switch: b, uplink: 1 Gbit/s, children: [{host: "b[0-1]", uplink: 1 Gbit/s}]}
"""
TOPOLOGIES = {"racks": Topology.parse(RACKS), "deep": Topology.parse(DEEP), "flat": Topology.flat(3)}
RULES = {
    "element": Sharded(bucket_bytes=4000, spares=1),
    "overlapping": Sharded(bucket_bytes=4000, spares=1, overlap_forward=True),
    "whole_parameters": Sharded(align="parameter", bucket_bytes=6000, spares=1),
}


@pytest.mark.parametrize(
    ("topology", "rule", "model", "optimizer"),
    [
        ("racks", "element", "perceptron", "adam"),
        ("racks", "whole_parameters", "sometimes_unused", "adamw"),
        ("deep", "overlapping", "sometimes_unused", "sgd"),
        ("flat", "element", "sometimes_unused", "adamw"),
    ],
)
def test_training_with_spares_equals_one_process(
    topology: str, rule: str, model: str, optimizer: str, run_fleets: Any
) -> None:
    case = CASES[model]
    results, reference = train_together(
        case, TOPOLOGIES[topology], RULES[rule], OPTIMIZERS[optimizer], case.batches(4, 41), run_fleets
    )
    check_equal(results, reference, case.tolerance)


def keep_state(optimizer: Any) -> dict[tuple[str, str, int, int], torch.Tensor]:
    """Return a copy of each piece of state that this rank keeps, spares included."""
    return {
        (entry.parameter, entry.key, entry.start or 0, entry.stop or -1): torch.as_tensor(entry.value).clone()
        for entry in optimizer.training.updater.state_entries()
    }


@pytest.mark.parametrize("rule", ["element", "whole_parameters"])
def test_owner_and_spare_keep_state_of_the_same_bits(rule: str, run_fleets: Any) -> None:
    """With a fused kernel, which rounds the last elements of a tensor its way; and parameters that go unused."""
    base = CASES["sometimes_unused"]
    case = Case(build=base.build, batch=lambda n, g: tuple(t.float() for t in base.batch(n, g)), dtype=torch.float32)
    models, batches = copies(case.make(), 4), case.batches(12, 16)

    def body(fleet: Fleet) -> tuple[dict[Any, torch.Tensor], list[tuple[Any, ...]]]:
        model = models[fleet.rank]
        model, optimizer = distribute(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), RULES[rule], fleet=fleet, check_every=1
        )
        for inputs, targets in batches:
            loss_of(model, inputs[fleet.rank :: 4], targets[fleet.rank :: 4]).backward()
            optimizer.step()
            optimizer.zero_grad()
        spared = [entry for entry in optimizer.training.updater.state_entries() if entry.is_spare]
        return keep_state(optimizer), [(e.parameter, e.key, e.start or 0, e.stop or -1) for e in spared]

    results = run_fleets(TOPOLOGIES["racks"], body)
    num_compared = 0
    for rank, (kept, spared) in enumerate(results):
        for place in spared:
            owner = [other for number, (other, _) in enumerate(results) if number != rank and place in other]
            assert len(owner) == 1
            assert torch.equal(kept[place], owner[0][place])
            num_compared += 1
    assert num_compared > 20
    kept_elements = sum(kept[place].numel() for kept, _ in results for place in kept)
    assert kept_elements == 2 * sum(kept[place].numel() for kept, spared in results for place in spared)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_norms_count_each_element_once(norm_type: float, run_fleets: Any) -> None:
    case = CASES["perceptron"]
    models, ((inputs, targets),) = copies(case.make(), 5), case.batches(1, 16)
    alone = models[4]
    loss_of(alone, inputs, targets).backward()
    expected = float(torch.nn.utils.get_total_norm([p.grad for p in alone.parameters()], norm_type))

    def body(fleet: Fleet) -> float:
        model = models[fleet.rank]
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), RULES["element"], fleet=fleet)
        loss_of(model, inputs[fleet.rank :: 4], targets[fleet.rank :: 4]).backward()
        total = float(optimizer.clip_grad_norm_(expected / 2, norm_type))
        optimizer.step()
        return total

    assert run_fleets(TOPOLOGIES["racks"], body) == [pytest.approx(expected, rel=1e-12)] * 4
    assert all(
        torch.equal(a, b) for m in models[1:4] for a, b in zip(m.parameters(), models[0].parameters(), strict=True)
    )


def test_checkpoints_and_whole_states_have_each_element_once(tmp_path: Path, run_fleets: Any) -> None:
    case = CASES["sometimes_unused"]
    batches = case.batches(4, 24)

    def train(rule: Sharded, steps: slice, *, load: Path | None = None, save: Path | None = None) -> list[Any]:
        models = copies(case.make(), 4)

        def body(fleet: Fleet) -> Any:
            model = models[fleet.rank]
            optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.02)
            model, optimizer = distribute(model, optimizer, rule, fleet=fleet)
            if load is not None:
                load_checkpoint(load, model, optimizer)
            for inputs, targets in batches[steps]:
                loss_of(model, inputs[fleet.rank :: 4], targets[fleet.rank :: 4]).backward()
                optimizer.step()
                optimizer.zero_grad()
            if save is not None:
                save_checkpoint(save, model, optimizer)
            return optimizer.state_dict()["state"]

        return run_fleets(TOPOLOGIES["racks"], body)

    plain, ours = Sharded(bucket_bytes=4000), RULES["element"]
    train(ours, slice(0, 2), save=tmp_path / "ours")
    found = [train(rule, slice(2, 4), load=tmp_path / "ours")[3] for rule in (ours, plain)]
    expected = train(plain, slice(0, 4))[0]
    for state in found:
        assert state.keys() == expected.keys()
        for number, values in expected.items():
            for key, value in values.items():
                torch.testing.assert_close(state[number][key], value, rtol=1e-11, atol=1e-12)


def test_statistics_say_where_spares_are(run_fleets: Any) -> None:
    models = copies(CASES["perceptron"].make(), 4)

    def body(fleet: Fleet) -> Any:
        model = models[fleet.rank]
        _, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), RULES["element"], fleet=fleet)
        return optimizer.statistics()

    statistics = run_fleets(TOPOLOGIES["racks"], body)[0]
    assert statistics.spares == "rack"
    assert sum(statistics.shares) == pytest.approx(2.0)
    assert str(statistics).startswith("a spare of each range in another rack: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spares": 2}, "spares must be 0, or 1 for a second owner of each range, not 2"),
        ({"spares": 1, "replicate": 1}, "has an owner in each replica already"),
        ({"spares": 1, "step_in_backward": True}, "leave out one of them"),
    ],
)
def test_what_spares_cannot_go_with_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Sharded(**options)
