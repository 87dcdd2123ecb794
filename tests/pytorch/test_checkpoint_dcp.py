"""Checkpoints and torch.distributed.checkpoint: what one has written the other reads, on any number of ranks."""

from __future__ import annotations

import pickle
import random
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import syncline
from rank_scripts import run_script
from syncline.errors import CheckpointError
from syncline.pytorch.checkpoint import storage
from syncline.pytorch.checkpoint.state import rectangles
from syncline.pytorch.checkpoint.storage import read_index
from syncline.pytorch.fleet import Fleet
from syncline.updates import AllReduce, Sharded, UpdateRule
from syncline.updates.bucket import Slot

pytestmark = pytest.mark.filterwarnings("ignore:.*single process:UserWarning")

STEPS = 2


def make() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 5))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": [*model[0].parameters(), *model[1].parameters()]}, {"params": [*model[3].parameters()]}]
    groups[1]["lr"] = 0.05
    return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)


def train(model: nn.Module, optimizer: Any, number: int, *, first: int = 0, rank: int = 0, num_ranks: int = 1) -> None:
    for iteration in range(first, first + number):
        inputs = torch.linspace(-1, 1 + iteration, 6 * 2 * 16).view(6, 2, 4, 4)
        model(inputs[rank::num_ranks]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save_with_torch(folder: Path, *, under: str | None = None, options: StateDictOptions | None = None) -> nn.Module:
    model = make()
    optimizer = make_optimizer(model)
    train(model, optimizer, STEPS)
    optimizer.param_groups[0]["lr"] = 0.01
    parameters, states = get_state_dict(model, optimizer, options=options)
    state = {"model": parameters, "optimizer": states}
    dcp.save({under: state} if under else state, checkpoint_id=folder, no_dist=True)
    train(model, optimizer, 1, first=STEPS)
    return model


def equal(ours: nn.Module, theirs: nn.Module) -> None:
    for name, value in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), value, rtol=1e-5, atol=1e-6)


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("rule", [AllReduce(), Sharded(), Sharded(align="parameter")], ids=["all", "element", "whole"])
@pytest.mark.parametrize(("under", "options"), [(None, None), ("app", FLAT)], ids=["plain", "nested_flat"])
def test_reads_what_torch_has_written(
    world: int, rule: UpdateRule, under: str | None, options: Any, tmp_path: Path, run_fleets: Any
) -> None:
    expected = save_with_torch(tmp_path / "dcp", under=under, options=options)

    def body(fleet: Fleet) -> nn.Module:
        model = make()
        for parameter in model.parameters():
            nn.init.constant_(parameter, 7.0)
        layout = model.to(memory_format=torch.channels_last) if fleet.world_size > 1 else model
        model, optimizer = syncline.distribute(layout, make_optimizer(layout), rule, samples="batch", fleet=fleet)
        assert syncline.load_checkpoint(tmp_path / "dcp", model, optimizer) is None
        assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.05]
        if fleet.world_size == 1:  # batch statistics are each rank's own
            train(model, optimizer, 1, first=STEPS)
            optimizer.synchronize()
            equal(model, expected)
        assert syncline.resume(tmp_path / "dcp", model, optimizer).iteration == 0
        return model

    run_fleets(world, body)


@pytest.mark.parametrize("rule", [AllReduce(), Sharded(bucket_bytes=400)], ids=["all", "element"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_torch_reads_what_is_written_here(
    rule: UpdateRule, channels_last: bool, tmp_path: Path, run_fleets: Any
) -> None:
    def body(fleet: Fleet) -> dict[str, Any]:
        model = make().eval()
        if channels_last:
            model = model.to(memory_format=torch.channels_last)
        model, optimizer = syncline.distribute(model, make_optimizer(model), rule, samples="batch", fleet=fleet)
        place = {"rank": fleet.rank, "num_ranks": fleet.world_size}
        train(model, optimizer, STEPS, **place)
        optimizer.param_groups[0]["lr"] = 0.01
        syncline.save_checkpoint(tmp_path / "ours", model, optimizer)
        train(model, optimizer, 1, first=STEPS, **place)
        optimizer.synchronize()
        return {name: value.clone() for name, value in model.state_dict().items()}

    expected = run_fleets(3, body)[0]
    model = make().eval()
    optimizer = make_optimizer(model)
    parameters, states = get_state_dict(model, optimizer)
    state = {"model": parameters, "optimizer": states}
    dcp.load(state, checkpoint_id=tmp_path / "ours", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.05]
    train(model, optimizer, 1, first=STEPS)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


KINDS = (torch.bfloat16, torch.float64, torch.complex64, torch.bool, torch.int8, torch.uint16, torch.float8_e4m3fn)


def make_kinds(value: int) -> nn.Module:
    model = nn.Module()
    whole = {str(kind).replace(".", "_"): torch.full((3, 2), value).to(kind) for kind in KINDS}
    odd = {
        "scalar": torch.tensor(float(value)),
        "empty": torch.empty(0, 3),
        "turned": torch.arange(6.0).view(2, 3).t() * value,
        "conjugate": torch.full((2,), complex(value, value)).conj(),
    }
    for name, tensor in (whole | odd).items():
        model.register_buffer(name, tensor)
    return model


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("elements need no torch.load()")


@pytest.mark.parametrize("reader", ["torch", "ours", "ours, of another torch"])
def test_elements_of_every_kind_are_read(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, loaded = make_kinds(1), make_kinds(0)
    syncline.save_checkpoint(tmp_path / "ours", saved)
    version = loaded.scalar._version
    if reader == "torch":
        dcp.load({"model": loaded.state_dict()}, checkpoint_id=tmp_path / "ours", no_dist=True)
    elif reader == "ours":
        monkeypatch.setattr(torch, "load", refuse)
        syncline.load_checkpoint(tmp_path / "ours", loaded)
    else:
        monkeypatch.setattr(storage, "_envelope", lambda *_: (b"another head", b""))
        syncline.load_checkpoint(tmp_path / "ours", loaded)
    assert loaded.scalar._version > version, "autograd sees the change"
    for name, tensor in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name].to(torch.complex64), tensor.to(torch.complex64)), name


def test_what_is_stored_is_what_the_index_says(tmp_path: Path) -> None:
    """An index may lie: of a tensor of another shape, nothing is loaded."""
    dcp.save({"model": nn.Linear(2, 2).state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    index = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    stored = metadata.state_dict_metadata["model.weight"]
    stored.size = stored.chunks[0].sizes = torch.Size([4, 2])
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="what is stored is not what its index says: there is tensor"):
        syncline.load_checkpoint(tmp_path / "dcp", nn.Linear(2, 4), strict=False)


def test_fsdp_and_sharded_read_each_other(tmp_path: Path) -> None:
    results = run_script(Path(__file__).with_name("dcp_process.py"), 2, str(tmp_path))
    assert [status for status, _ in results] == [0, 0], results


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    save_with_torch(tmp_path / "dcp")
    other = nn.LSTM(3, 3)
    with pytest.raises(CheckpointError, match=r"has nothing of this model; it has 'model\.0\.bias'"):
        syncline.load_checkpoint(tmp_path / "dcp", other)
    model = make()
    model.more = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"it lacks \['more.bias', 'more.weight'\]"):
        syncline.load_checkpoint(tmp_path / "dcp", model)
    syncline.load_checkpoint(tmp_path / "dcp", model, strict=False)
    model = make()
    state = {"model": model.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "alone", no_dist=True)
    with pytest.raises(CheckpointError, match="saved without an optimizer"):
        syncline.load_checkpoint(tmp_path / "alone", model, make_optimizer(model))
    dcp.save({"a": model.state_dict(), "b": model.state_dict()}, checkpoint_id=tmp_path / "two", no_dist=True)
    with pytest.raises(CheckpointError, match=r"several times, behind 'a\.', 'b\.'"):
        syncline.load_checkpoint(tmp_path / "two", model)


def test_of_several_optimizers_none_is_chosen_and_the_model_alone_is_loaded(tmp_path: Path) -> None:
    model = make()
    optimizer = make_optimizer(model)
    train(model, optimizer, STEPS)
    parameters, states = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "one": states, "two": states}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    other = make()
    with pytest.raises(CheckpointError, match=r"has several optimizers \(one\., two\.\); load the model alone"):
        syncline.load_checkpoint(tmp_path / "dcp", other, make_optimizer(other))
    syncline.load_checkpoint(tmp_path / "dcp", other)
    equal(other, model)


class Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("/tmp/evil"),)


class EvilMember:
    def __reduce__(self) -> Any:
        return getattr, (torch.Size, "numel")


def test_an_index_may_name_members_of_enums_as_the_first_pythons_of_3_11_did(tmp_path: Path, monkeypatch: Any) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Enum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
        save_with_torch(tmp_path / "dcp")
    assert b"getattr" in (tmp_path / "dcp" / ".metadata").read_bytes()
    syncline.load_checkpoint(tmp_path / "dcp", make())
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(EvilMember()))
    with pytest.raises(CheckpointError, match="it asks for 'numel'"):
        syncline.load_checkpoint(tmp_path / "dcp", make())


def test_an_index_runs_no_code(tmp_path: Path) -> None:
    save_with_torch(tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"it names pathlib\.Path\.touch|it names"):
        syncline.load_checkpoint(tmp_path / "dcp", make())
    (tmp_path / "dcp" / ".metadata").write_bytes(b"not a pickle")
    with pytest.raises(CheckpointError, match="cannot be read"):
        syncline.load_checkpoint(tmp_path / "dcp", make())


def test_a_damaged_index_is_told_as_one_whatever_its_pickle_raises(tmp_path: Path) -> None:
    save_with_torch(tmp_path / "dcp")
    index, choose, told = tmp_path / "dcp" / ".metadata", random.Random(0), set()
    good = index.read_bytes()
    for _ in range(300):
        damaged = bytearray(good)
        damaged[choose.randrange(len(good))] = choose.randrange(256)
        index.write_bytes(damaged)
        try:
            read_index(index.parent)
        except CheckpointError as error:
            told.add(type(error.__cause__))
    assert len(told) > 3, "of many kinds"


def test_our_index_without_our_manifest_is_damage(tmp_path: Path) -> None:
    syncline.save_checkpoint(tmp_path / "ours", make())
    (tmp_path / "ours" / "syncline.json").unlink()
    with pytest.raises(CheckpointError, match=r"syncline\.json is missing"):
        syncline.load_checkpoint(tmp_path / "ours", make())


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (1, 5, 1), (2, 1, 3, 2)])
def test_rectangles_cover_every_range_once(shape: tuple[int, ...]) -> None:
    size = torch.Size(shape).numel()
    plain = tuple(torch.empty(shape).stride())
    turned = tuple(torch.empty(tuple(reversed(shape))).permute(list(reversed(range(len(shape))))).stride())
    for stride in {plain, turned}:
        slot = Slot(name="w", position=0, start=0, stop=size, shape=shape, stride=stride)
        whole = slot.view(torch.arange(size))
        for start in range(size):
            for stop in range(start + 1, size + 1):
                seen = torch.zeros(shape, dtype=torch.int64)
                for offset, part in rectangles(slot, start, torch.arange(start, stop)):
                    place = tuple(
                        slice(first, first + length) for first, length in zip(offset, part.shape, strict=True)
                    )
                    assert torch.equal(whole[place], part)
                    seen[place] += 1
                assert int(seen.max()) == 1
                assert int(seen.sum()) == stop - start
