"""Sharded inside each part of the topology: equal to one process, to the bit in all parts, and nothing between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_models import CASES, Case, copies, loss_of
from test_training_oracle import DEEP, OPTIMIZERS, check_equal, train_together
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rank_scripts import run_script
from syncline.errors import ConfigurationError, TopologyError
from syncline.pytorch.checkpoint import load_checkpoint, save_checkpoint
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.topology import DirectedLink, Topology
from syncline.updates import Sharded

pytestmark = pytest.mark.usefixtures("small_slices")

RACKS = Topology.load("two-racks-5-3")
TOPOLOGIES = {"racks": RACKS, "deep": Topology.parse(DEEP)}
PLAIN = Sharded(bucket_bytes=4000)
RULES = {
    "racks": Sharded(bucket_bytes=4000, replicate=1),
    "ranks": Sharded(bucket_bytes=4000, replicate=3),
    "whole_parameters": Sharded(align="parameter", bucket_bytes=6000, replicate=["rack-a", "rack-b"]),
    "in_backward": Sharded(bucket_bytes=4000, replicate=1, step_in_backward=True),
    "overlapping": Sharded(bucket_bytes=4000, replicate="auto", overlap_forward=True),
}


@pytest.mark.parametrize(
    ("model", "optimizer"), [*((model, "adam") for model in CASES), *(("attention", each) for each in ("adamw", "sgd"))]
)
def test_racks_equal_one_process(model: str, optimizer: str, run_fleets: Any) -> None:
    case = CASES[model]
    results, reference = train_together(
        case, RACKS, RULES["racks"], OPTIMIZERS[optimizer], case.batches(4, 41), run_fleets
    )
    check_equal(results, reference, case.tolerance)


@pytest.mark.parametrize("rule", ["ranks", "whole_parameters", "in_backward", "overlapping"])
def test_other_replicas_equal_one_process(rule: str, run_fleets: Any) -> None:
    case = CASES["sometimes_unused"]
    results, reference = train_together(case, RACKS, RULES[rule], OPTIMIZERS["adamw"], case.batches(4, 41), run_fleets)
    check_equal(results, reference, case.tolerance)


@pytest.mark.parametrize("replicate", [1, 2, "host"])
def test_replicas_of_a_deep_tree_equal_one_process(replicate: Any, run_fleets: Any) -> None:
    case, rule = CASES["perceptron"], Sharded(bucket_bytes=4000, replicate=replicate)
    results, reference = train_together(
        case, TOPOLOGIES["deep"], rule, OPTIMIZERS["adam"], case.batches(4, 23), run_fleets
    )
    check_equal(results, reference, case.tolerance)


@pytest.mark.parametrize("model", ["perceptron", "sometimes_unused"])
def test_replicas_have_the_same_bits_where_kernels_round_ends_otherwise(model: str, run_fleets: Any) -> None:
    """A rack of five and one of three divide a bucket otherwise; a fused kernel rounds the last elements its way."""
    base = CASES[model]
    case = Case(build=base.build, batch=lambda n, g: tuple(t.float() for t in base.batch(n, g)), dtype=torch.float32)
    results, reference = train_together(
        case,
        RACKS,
        RULES["racks"],
        lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
        case.batches(20, 41),
        run_fleets,
    )
    check_equal(results, reference, 1e-4)


def test_each_rack_keeps_the_whole_state_once(run_fleets: Any) -> None:
    case = CASES["perceptron"]
    make = OPTIMIZERS["sgd"]
    results, reference = train_together(case, RACKS, RULES["racks"], make, case.batches(2, 41), run_fleets)
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in reference.parameters())
    found = [result["state_bytes"] for result in results]
    assert (sum(found[:5]), sum(found[5:])) == (num_bytes, num_bytes)
    assert max(found[:5]) < 0.22 * num_bytes
    assert max(found[5:]) < 0.35 * num_bytes


def test_state_is_gathered_within_a_rack(run_fleets: Any) -> None:
    case = CASES["sometimes_unused"]
    found = {}
    for name, rule in (("plain", PLAIN), ("racks", RULES["racks"])):
        results, _ = train_together(
            case, RACKS, rule, OPTIMIZERS["adam"], case.batches(3, 41), run_fleets, with_state=True
        )
        found[name] = [result["optimizer"]["state"] for result in results]
    for plain, ours in zip(found["plain"], found["racks"], strict=True):
        assert plain.keys() == ours.keys()
        for number, state in plain.items():
            for key, value in state.items():
                torch.testing.assert_close(ours[number][key], value, rtol=1e-11, atol=1e-12)


class OneStep:
    """A step of a small model on two racks, with a look at what the uplinks carried in between."""

    def __init__(self, rule: Sharded, run_fleets: Callable[..., list[Any]]) -> None:
        self._rule = rule
        self._models = copies(CASES["perceptron"].make(), 8)
        self._batches = CASES["perceptron"].batches(2, 16)
        self._together = threading.Barrier(8)
        self.num_bytes = sum(p.numel() * p.element_size() for p in self._models[0].parameters())
        self.before, self.after = (
            [sum(counts) for counts in zip(*parts, strict=True)]
            for parts in zip(*run_fleets(RACKS, self._run), strict=True)
        )

    def _run(self, fleet: Fleet) -> tuple[list[int], list[int]]:
        model = self._models[fleet.rank]
        model, optimizer = distribute(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            self._rule,
            fleet=fleet,
            broadcast_buffers=False,
            check_every=None,
        )
        counts = [self._uplinks(fleet)]
        for inputs, targets in self._batches[:1]:
            loss_of(model, inputs[fleet.rank :: 8], targets[fleet.rank :: 8]).backward()
        updater = optimizer.training.updater
        assert updater.divided_gradients is not None  # waits for all reductions and the report
        counts.append(self._uplinks(fleet))
        optimizer.step()
        optimizer.synchronize()
        counts.append(self._uplinks(fleet))
        return tuple([b - a for a, b in zip(*pair, strict=True)] for pair in (counts[:2], counts[1:]))  # type: ignore[return-value]

    def _uplinks(self, fleet: Fleet) -> list[int]:
        self._together.wait(60)
        links = fleet.statistics().link_bytes
        self._together.wait(60)
        return [links.get(DirectedLink(rack, way), 0) for rack in ("rack-a", "rack-b") for way in ("up", "down")]


def test_after_the_backward_pass_nothing_moves_between_racks(run_fleets: Any) -> None:
    ours, plain = OneStep(RULES["racks"], run_fleets), OneStep(PLAIN, run_fleets)
    assert ours.after == [0] * 4
    assert min(plain.after) > plain.num_bytes * 0.3, "without replicas parameters cross"
    told = 4000  # of weights and present gradients, as the ranks report them
    for one in ours.before:
        assert ours.num_bytes <= one <= ours.num_bytes + told
    for before, after in zip(plain.before, plain.after, strict=True):
        assert plain.num_bytes <= before + after <= plain.num_bytes + told


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_norms_count_each_element_once(norm_type: float, run_fleets: Any) -> None:
    case = CASES["perceptron"]
    models, ((inputs, targets),) = copies(case.make(), 17), case.batches(1, 16)
    alone = models[16]
    loss_of(alone, inputs, targets).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in alone.parameters()], norm_type)

    def body(fleet: Fleet) -> tuple[float, float, torch.Tensor]:
        model = models[fleet.rank]
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), RULES["racks"], fleet=fleet)
        loss_of(model, inputs[fleet.rank :: 8], targets[fleet.rank :: 8]).backward()
        first = float(next(model.parameters()).grad.norm(norm_type))
        total = float(optimizer.clip_grad_norm_(float(expected) / 2, norm_type))
        optimizer.step()
        optimizer.synchronize()
        return first, total, next(model.parameters()).detach().clone()

    first = next(alone.parameters())
    stepped = first.detach() - first.grad / 2
    for norm, total, found in run_fleets(RACKS, body):
        assert total == pytest.approx(float(expected), rel=1e-12)
        assert norm == pytest.approx(float(first.grad.norm(norm_type)), rel=1e-12)
        torch.testing.assert_close(found, stepped, rtol=1e-5, atol=1e-7)  # torch's clipping adds 1e-6 to the norm


def train(
    world: Topology | int, rule: Sharded, run_fleets: Any, *, load: Path | None = None, save: Path | None = None
) -> list[torch.Tensor]:
    """Make two steps, after loading or before saving, and return rank 0's parameters; all ranks have the same."""
    case = CASES["sometimes_unused"]
    batches = case.batches(4, 24)[slice(2, 4) if load else slice(0, 2)]
    models = copies(case.make(), world if isinstance(world, int) else world.num_ranks)

    def body(fleet: Fleet) -> list[torch.Tensor]:
        model = models[fleet.rank]
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02, amsgrad=True)
        model, optimizer = distribute(model, optimizer, rule, samples="batch", fleet=fleet)
        if load is not None:
            load_checkpoint(load, model, optimizer)
        for inputs, targets in batches:
            rank, size = fleet.rank, fleet.world_size
            loss_of(model, inputs.tensor_split(size)[rank], targets.tensor_split(size)[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        if save is not None:
            save_checkpoint(save, model, optimizer)
        optimizer.synchronize()
        return [parameter.detach().clone() for parameter in model.parameters()]

    results = run_fleets(world, body)
    assert all(torch.equal(ours, first) for result in results for ours, first in zip(result, results[0], strict=True))
    return results[0]


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [
        ((RACKS, RULES["racks"]), (RACKS, PLAIN)),
        ((RACKS, PLAIN), (RACKS, RULES["racks"])),
        ((RACKS, RULES["racks"]), (3, PLAIN)),
        ((TOPOLOGIES["deep"], Sharded(replicate="host")), (RACKS, RULES["whole_parameters"])),
    ],
    ids=["to_plain", "from_plain", "to_three", "to_other_replicas"],
)
def test_checkpoints_load_with_and_without_replicas(
    saved_by: Any, loaded_by: Any, tmp_path: Path, run_fleets: Any
) -> None:
    train(*saved_by, run_fleets, save=tmp_path / "ours")
    train(3, PLAIN, run_fleets, save=tmp_path / "plain")
    found = train(*loaded_by, run_fleets, load=tmp_path / "ours")
    expected = train(3, PLAIN, run_fleets, load=tmp_path / "plain")
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.fixture
def fake_group() -> Iterator[None]:
    """A process group of eight that moves nothing, so that meshes can be made."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("fake_group")
def test_a_mesh_is_its_groups_of_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    assert Sharded(replicate=mesh) == Sharded(replicate=[[0, 1, 2, 3], [4, 5, 6, 7]])
    with pytest.raises(ConfigurationError, match=r"a DeviceMesh of two dimensions \(the first replicates, the second"):
        Sharded(replicate=DeviceMesh("cpu", list(range(8))))


@pytest.mark.parametrize("also", [{"portions": {"h0": 1}}, {"align": "parameter", "cost": sum}])
def test_replicas_are_divided_by_links_and_a_cap_alone(also: Any) -> None:
    with pytest.raises(ConfigurationError, match="leave out portions of hosts and cost, or replicate"):
        Sharded(replicate=1, **also)


def test_what_is_no_replica_is_refused_on_all_ranks(run_fleets: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"replicate is .* not 1\.5"):
        Sharded(replicate=1.5)  # type: ignore[arg-type]
    before = [copies(nn.Linear(3, 2), 8) for _ in range(2)]

    def body(fleet: Fleet) -> str:
        (model,) = copies(before[0][fleet.rank], 1)
        with pytest.raises(TopologyError) as caught:
            distribute(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                Sharded(replicate=[[0, 1, 2, 3], [4, 5, 6, 7]]),
                fleet=fleet,
            )
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before[0][0].parameters(), strict=True))
        model, optimizer = distribute(
            model, torch.optim.SGD(model.parameters(), lr=0.1), Sharded(replicate="auto"), fleet=fleet
        )
        assert optimizer.training.updater.replicas == ((0, 1, 2, 3, 4), (5, 6, 7))
        assert str(optimizer.statistics()).startswith("2 replicas: of 8 elements ranks own ")
        assert sum(optimizer.statistics().shares) == 2.0
        return str(caught.value)

    for message in run_fleets(RACKS, body):
        assert "but ranks [0, 1, 2, 3] are not all ranks below one node" in message


def test_replicas_over_real_sockets() -> None:
    for status, output in run_script(Path(__file__).with_name("replicas_process.py"), 8):
        assert status == 0, output
        assert output.splitlines()[-1] == "equal"
