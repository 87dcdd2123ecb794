"""Checkpoints: saved by some ranks, loaded by others, exactly; damage is found."""

from __future__ import annotations

import copy
import errno
import gc
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from oracle_models import CASES, copies, loss_of
from torch import nn

from syncline.errors import CheckpointError
from syncline.pytorch.checkpoint import load_checkpoint, save_checkpoint, storage
from syncline.pytorch.checkpoint.folder import MANIFEST, previous_folder, writing_folder
from syncline.pytorch.checkpoint.state import SavedState
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.topology import Topology
from syncline.updates import AllReduce, Sharded, UpdateRule

pytestmark = pytest.mark.usefixtures("small_slices")

CASE = CASES["sometimes_unused"]
BATCHES = CASE.batches(4, 12)


def make(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, amsgrad=True)


def go_on(model: nn.Module, optimizer: Any, batches: Any, rank: int = 0, world_size: int = 1) -> None:
    for inputs, targets in batches:
        loss_of(model, inputs.tensor_split(world_size)[rank], targets.tensor_split(world_size)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_and_save(path: Path, run_fleets: Any, *, num_ranks: int = 3) -> list[torch.Tensor]:
    """Save after two steps, and return the parameters after four."""
    models = copies(CASE.make(), num_ranks)

    def body(fleet: Fleet) -> list[torch.Tensor]:
        rule = Sharded(bucket_bytes=700)
        model, optimizer = distribute(models[fleet.rank], make(models[fleet.rank]), rule, samples="batch", fleet=fleet)
        go_on(model, optimizer, BATCHES[:2], fleet.rank, fleet.world_size)
        save_checkpoint(path, model, optimizer, extra={"step": 2})
        go_on(model, optimizer, BATCHES[2:], fleet.rank, fleet.world_size)
        optimizer.synchronize()
        return [parameter.detach().clone() for parameter in model.parameters()]

    return run_fleets(num_ranks, body)[0]


def spoilt_copies(number: int) -> list[nn.Module]:
    models = copies(CASE.make(), number)
    for model in models:
        for parameter in model.parameters():
            parameter.data.fill_(9.0)
    return models


@pytest.mark.parametrize(
    ("world", "rule"),
    [
        (1, Sharded()),
        (2, Sharded(bucket_bytes=900)),
        (5, Sharded(align="parameter")),
        (2, AllReduce()),
        (Topology.load("demo-1-3"), Sharded(bucket_bytes=2000)),
    ],
    ids=["one", "two", "five_whole", "all_reduce", "one_and_three"],
)
def test_loads_on_other_ranks(world: int | Topology, rule: UpdateRule, tmp_path: Path, run_fleets: Any) -> None:
    expected = train_and_save(tmp_path / "saved", run_fleets)
    models = spoilt_copies(world if isinstance(world, int) else world.num_ranks)

    def body(fleet: Fleet) -> list[torch.Tensor]:
        inner = make(models[fleet.rank])
        inner.param_groups[0]["lr"] = 0.5
        model, optimizer = distribute(models[fleet.rank], inner, rule, samples="batch", fleet=fleet)
        assert load_checkpoint(tmp_path / "saved", model, optimizer) == {"step": 2}
        assert optimizer.param_groups[0]["lr"] == 0.02
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
        go_on(model, optimizer, BATCHES[2:], fleet.rank, fleet.world_size)
        optimizer.synchronize()
        return [parameter.detach().clone() for parameter in model.parameters()]

    for found in run_fleets(world, body):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


class GarbageProbe:
    """A part of a checkpoint that notes whether garbage is looked for while it is asked."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def state_dict(self) -> dict[str, int]:
        self.found.append(gc.isenabled())
        return {"kept": 1}

    def load_state_dict(self, _: dict[str, int]) -> None:
        self.found.append(gc.isenabled())


def test_nobody_waits_for_a_rank_that_looks_for_garbage(tmp_path: Path) -> None:
    model, probe = CASE.make(), GarbageProbe()
    save_checkpoint(tmp_path / "saved", model, probe=probe)
    load_checkpoint(tmp_path / "saved", model, probe=probe)
    assert len(probe.found) >= 2
    assert not any(probe.found)
    assert gc.isenabled()


def test_seconds_in_which_a_checkpoint_is_written_are_counted_for_those_who_look_on(
    tmp_path: Path, run_fleets: Any
) -> None:
    models = spoilt_copies(2)

    def body(fleet: Fleet) -> tuple[float, float]:
        model, optimizer = distribute(models[fleet.rank], make(models[fleet.rank]), fleet=fleet)
        progress = fleet.communicator.progress
        before_s = progress.stored_s
        save_checkpoint(tmp_path / "saved", model, optimizer)
        return before_s, progress.stored_s

    for before_s, after_s in run_fleets(2, body):
        assert (before_s, after_s > 0) == (0.0, True)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_each_rank_writes_an_even_part_of_the_model_and_rank_0_what_may_differ(world_size: int) -> None:
    model = nn.Sequential(nn.Linear(7, 50), nn.BatchNorm1d(50), nn.Linear(50, 3), nn.PReLU())
    whole = model.state_dict()
    model[3].register_state_dict_post_hook(lambda _, state, *__: state.update({"3.weight": torch.zeros(1)}))
    parts = [SavedState() for _ in range(world_size)]
    for rank, part in enumerate(parts):
        part.add_model(model, dict(model.named_parameters()), rank=rank, world_size=world_size)
    buffers = {"model.1.running_mean", "model.1.running_var", "model.1.num_batches_tracked", "model.3.weight"}
    assert buffers.isdisjoint(chunk.name for part in parts[1:] for chunk in part.chunks)
    written = [sum(chunk.tensor.nbytes for chunk in part.chunks if chunk.name not in buffers) for part in parts]
    assert max(written) - min(written) <= 50 * 4  # a row
    found = {name: torch.full_like(value, -1) for name, value in whole.items()}
    for chunk in (chunk for part in parts for chunk in part.chunks):
        target = found[chunk.name.removeprefix("model.")]
        if target.dim():
            target = target[chunk.offset[0] : chunk.offset[0] + len(chunk.tensor)]
        assert (target == -1).all(), "written twice"
        target.copy_(chunk.tensor)
    assert all(torch.equal(found[name], value) for name, value in (whole | {"3.weight": torch.zeros(1)}).items())


def test_one_process_without_a_fleet(tmp_path: Path, run_fleets: Any) -> None:
    expected = train_and_save(tmp_path / "saved", run_fleets)
    (model,) = spoilt_copies(1)
    optimizer = make(model)
    load_checkpoint(tmp_path / "saved", model, optimizer)
    save_checkpoint(tmp_path / "again", model, optimizer, extra=[1, None])
    (model,) = spoilt_copies(1)
    optimizer = make(model)
    assert load_checkpoint(tmp_path / "again", model, optimizer) == [1, None]
    go_on(model, optimizer, BATCHES[2:])
    for ours, theirs in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-12, atol=1e-12)


def test_dcp_itself_reads_the_model(tmp_path: Path, run_fleets: Any) -> None:
    train_and_save(tmp_path / "saved", run_fleets)
    (model,), (other,) = spoilt_copies(1), spoilt_copies(1)
    load_checkpoint(tmp_path / "saved", model)
    state = {f"model.{name}": value for name, value in other.state_dict().items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert all(torch.equal(value, model.state_dict()[name.removeprefix("model.")]) for name, value in state.items())


def test_the_previous_one_is_kept_and_found(tmp_path: Path) -> None:
    model, path = CASE.make(), tmp_path / "saved"
    for number in range(3):
        save_checkpoint(path, model, extra=number)
    assert load_checkpoint(path, model) == 2
    assert load_checkpoint(previous_folder(path), model) == 1
    path.rename(tmp_path / "away")  # as if the process had died between the two renames
    assert load_checkpoint(path, model) == 1
    assert not writing_folder(path).exists()


def test_what_is_no_checkpoint_is_not_moved_away(tmp_path: Path) -> None:
    model, path = CASE.make(), tmp_path / "results"
    path.mkdir()
    save_checkpoint(path, model)  # an empty folder is nothing to lose
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "precious").write_text("data")
    (tmp_path / "file").write_text("data")
    for name in ("logs", "file"):
        with pytest.raises(CheckpointError, match=f"{name} is there, but no checkpoint"):
            save_checkpoint(tmp_path / name, model)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["file", "logs", "results", "results.previous"]
    assert (tmp_path / "logs" / "precious").read_text() == "data"


def _shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [_shorten, _flip, Path.unlink])
@pytest.mark.parametrize("name", ["__0_0.distcp", "__2_0.distcp", MANIFEST])
def test_damage_is_found_on_every_rank(
    damage: Callable[[Path], Any], name: str, tmp_path: Path, run_fleets: Any
) -> None:
    train_and_save(tmp_path / "saved", run_fleets)
    damage(tmp_path / "saved" / name)
    models = copies(CASE.make(), 2)

    def body(fleet: Fleet) -> None:
        model, optimizer = distribute(models[fleet.rank], make(models[fleet.rank]), samples="batch", fleet=fleet)
        with pytest.raises(CheckpointError, match=r"damaged|no checkpoint"):
            load_checkpoint(tmp_path / "saved", model, optimizer)

    run_fleets(2, body)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model, path = CASE.make(), tmp_path / "saved"
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_checkpoint(path, model)
    with pytest.raises(CheckpointError, match="not JSON"):
        save_checkpoint(path, model, extra=object())
    assert not path.exists()
    save_checkpoint(path, model)
    with pytest.raises(CheckpointError, match="without an optimizer"):
        load_checkpoint(path, model, make(model))
    with pytest.raises(CheckpointError, match="another model"):
        load_checkpoint(path, nn.Linear(2, 2))
    wider = CASE.make()
    wider.last = nn.Linear(9, 4).double()
    with pytest.raises(CheckpointError, match=r"last\.weight"):
        load_checkpoint(path, wider)
    outer = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(outer | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        load_checkpoint(path, model)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def adamax(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adamax(model.parameters())


def nadam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.NAdam(model.parameters())


class Clipped(torch.optim.AdamW):
    """A user's own, with a number more than the one it is made from."""

    def __init__(self, parameters: Any, *, clip: float = 1.0) -> None:
        super().__init__(parameters)
        self.defaults["clip"] = clip
        for group in self.param_groups:
            group["clip"] = clip


@pytest.mark.parametrize(
    ("saver", "loader", "told"),
    [
        (make, sgd, r"than SGD: it has betas, eps and lacks dampening, momentum; give the optimizer"),
        (sgd, make, r"than AdamW: it has dampening, momentum and lacks betas, eps; give the optimizer"),
        (adam, adamax, r"than Adamax: it has exp_avg, exp_avg_sq, step and lacks exp_inf; give the optimizer"),
        (adam, nadam, r"than NAdam: it has exp_avg, exp_avg_sq, step and lacks mu_product; give the optimizer"),
        (adamax, adam, r"than Adam: it has exp_avg, exp_inf, step and lacks exp_avg_sq; give the optimizer"),
    ],
    ids=["adamw_into_sgd", "sgd_into_adamw", "adam_into_adamax", "adam_into_nadam", "adamax_into_adam"],
)
@pytest.mark.parametrize("num_ranks", [0, 2])
def test_a_checkpoint_of_another_optimizer_is_refused_and_nothing_is_changed(
    saver: Any, loader: Any, told: str, num_ranks: int, tmp_path: Path, run_fleets: Any
) -> None:
    model = CASE.make()
    optimizer = saver(model)
    go_on(model, optimizer, BATCHES[:1])
    save_checkpoint(tmp_path / "saved", model, optimizer)
    models = spoilt_copies(max(num_ranks, 1))

    def body(fleet: Fleet | None) -> None:
        model = models[0 if fleet is None else fleet.rank]
        inner = optimizer = loader(model)
        before = copy.deepcopy(inner.param_groups[0] | {"params": []})
        if fleet is not None:
            model, optimizer = distribute(model, inner, Sharded(), samples="batch", fleet=fleet)
        with pytest.raises(CheckpointError, match=told):
            load_checkpoint(tmp_path / "saved", model, optimizer)
        assert inner.param_groups[0] | {"params": []} == before
        assert all((parameter == 9).all() for parameter in model.parameters())
        load_checkpoint(tmp_path / "saved", model)

    run_fleets(num_ranks, body) if num_ranks else body(None)


def test_keys_that_versions_schedulers_and_users_add_to_groups_are_no_other_optimizer(tmp_path: Path) -> None:
    model = CASE.make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    go_on(model, optimizer, BATCHES[:1])
    optimizer.param_groups[0] |= {"layer": 3, "new_switch": False}
    del optimizer.param_groups[0]["fused"]
    save_checkpoint(tmp_path / "saved", model, optimizer)
    del optimizer.param_groups[0]["layer"]
    save_checkpoint(tmp_path / "without", model, optimizer)
    for name, loader in (("saved", torch.optim.AdamW(model.parameters())), ("without", Clipped(model.parameters()))):
        load_checkpoint(tmp_path / name, model, loader)
        assert loader.param_groups[0]["max_lr"] == 0.1
        go_on(model, loader, BATCHES[1:2])


def test_a_full_disk_is_called_so_on_every_rank_and_leaves_the_old_checkpoint(
    tmp_path: Path, run_fleets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_and_save(tmp_path / "saved", run_fleets)
    models = copies(CASE.make(), 3)
    wait_for_full_disk = threading.Barrier(3, timeout=60)

    def write_on_full_disk(folder: Path, *_: Any, rank: int) -> dict[str, Any]:
        wait_for_full_disk.wait()
        if rank == 1:
            return {}
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage, "write_chunks", write_on_full_disk)
    message = f"Checkpoint {tmp_path / 'saved'}: a rank cannot write its part: ranks 0 and 2: No space left on device"

    def body(fleet: Fleet) -> None:
        model, optimizer = distribute(
            models[fleet.rank], make(models[fleet.rank]), Sharded(), samples="batch", fleet=fleet
        )
        with pytest.raises(CheckpointError) as told:
            save_checkpoint(tmp_path / "saved", model, optimizer)
        assert str(told.value) == message

    run_fleets(3, body)
    assert load_checkpoint(tmp_path / "saved", CASE.make()) == {"step": 2}


def test_a_failure_of_one_rank_leaves_the_old_checkpoint(tmp_path: Path, run_fleets: Any) -> None:
    train_and_save(tmp_path / "saved", run_fleets)
    models = copies(CASE.make(), 2)

    class Odd(torch.optim.AdamW):
        """Its state cannot be moved."""

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["odd"] = object()

    def body(fleet: Fleet) -> None:
        model, optimizer = distribute(
            models[fleet.rank], Odd(models[fleet.rank].parameters()), Sharded(align="parameter"), fleet=fleet
        )
        go_on(model, optimizer, BATCHES[:1], fleet.rank, fleet.world_size)
        with pytest.raises(CheckpointError, match="cannot begin: rank 0: The optimizer state"):
            save_checkpoint(tmp_path / "saved", model, optimizer)

    run_fleets(2, body)
    assert load_checkpoint(tmp_path / "saved", CASE.make()) == {"step": 2}
    assert [found.name for found in tmp_path.iterdir()] == ["saved"], "half a checkpoint takes no room"


def test_state_that_cannot_be_moved_is_saved_as_the_error_says(tmp_path: Path, run_fleets: Any) -> None:
    class Listed(torch.optim.SGD):
        """Keeps its momentum in a list, as optimizers of Kronecker factors keep theirs."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in filter(lambda one: one.grad is not None, group["params"]):
                    (sums,) = self.state[parameter].setdefault("sums", [torch.zeros_like(parameter)])
                    parameter.sub_(sums.add_(parameter.grad), alpha=group["lr"])

    models = copies(CASE.make(), 2)

    def body(fleet: Fleet) -> None:
        model = models[fleet.rank]
        model, optimizer = distribute(model, Listed(model.parameters(), lr=0.01), AllReduce(), fleet=fleet)
        go_on(model, optimizer, BATCHES[:1], fleet.rank, fleet.world_size)
        remedy = r"'sums' of '.*' is a list; .* save optimizer\.state_dict\(\) with torch\.save\(\) on one rank"
        with pytest.raises(CheckpointError, match=remedy):
            save_checkpoint(tmp_path / "saved", model, optimizer)
        save_checkpoint(tmp_path / "saved", model)
        if fleet.rank == 0:
            torch.save(optimizer.state_dict(), tmp_path / "optimizer")
        go_on(model, optimizer, BATCHES[1:], fleet.rank, fleet.world_size)
        optimizer.synchronize()
        expected = [parameter.detach().clone() for parameter in model.parameters()]
        load_checkpoint(tmp_path / "saved", model)
        optimizer.load_state_dict(torch.load(tmp_path / "optimizer"))
        go_on(model, optimizer, BATCHES[1:], fleet.rank, fleet.world_size)
        optimizer.synchronize()
        assert all(map(torch.equal, model.parameters(), expected))

    run_fleets(2, body)
