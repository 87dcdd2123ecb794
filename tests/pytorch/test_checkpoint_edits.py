"""A checkpoint that was edited, its checksum made right: whatever is changed, it loads the same or is refused."""

import copy
import json
import pickle
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import syncline
from syncline.errors import CheckpointError
from syncline.pytorch.checkpoint.folder import MANIFEST

UNSAID = object()
REPLACEMENTS = (-1, 0, 1, 2, 1 << 70, 1.5, "", "torch.int8", "torch.nothing", "../a", None, True, [], [[]], {}, UNSAID)
FREE = {"extra", "world_size", "iteration", "parts", "groups", "value"}
"""What follows from no file: hyper-parameters, counts, what the user gave, and values that stand there themselves."""


def train() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    for _ in range(2):
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, optimizer, scheduler


def leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield (*path, key)
        yield from leaves(value, (*path, key))


def edited(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(data)
    place = changed
    for key in path[:-1]:
        place = place[key]
    if value is UNSAID:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return changed


def write_manifest(folder: Path, content: Any) -> None:
    crc = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    (folder / MANIFEST).write_text(json.dumps({"format": 2, "crc": crc, "content": content}))


def contents_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [one[key] for one in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return [*model.state_dict().values(), *state]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, list[torch.Tensor]]:
    model, optimizer, scheduler = train()
    syncline.save_checkpoint(tmp_path / "saved", model, optimizer, extra={"epoch": 1}, scheduler=scheduler)
    return tmp_path / "saved", contents_of(model, optimizer)


def check_loads_the_same_or_is_refused(folder: Path, expected: list[torch.Tensor], *, is_free: bool) -> bool:
    """Load as a new process would; return whether it was refused."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    try:
        syncline.load_checkpoint(folder, model, optimizer, scheduler=scheduler)
    except CheckpointError:
        return True
    found = contents_of(model, optimizer)
    assert is_free or (len(found) == len(expected) and all(map(torch.equal, found, expected)))
    return False


def test_every_edit_of_a_manifest_is_refused_or_changes_nothing(saved: tuple[Path, list[torch.Tensor]]) -> None:
    folder, expected = saved
    content = json.loads((folder / MANIFEST).read_text())["content"]
    choose = random.Random(0)
    num_refused = num_edits = 0
    for path in leaves(content):
        for value in choose.sample(REPLACEMENTS, 2):
            write_manifest(folder, edited(content, path, value))
            try:
                num_refused += check_loads_the_same_or_is_refused(folder, expected, is_free=bool(FREE & set(path)))
            except Exception as error:
                error.add_note(f"{path} was made {value!r}")
                raise
            num_edits += 1
    assert num_edits > 400
    assert num_refused > num_edits / 2


def chunks(content: Any) -> list[Any]:
    return [record for record in content["records"] if "dtype" in record]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda one: chunks(one)[0].update(offset=[-1, 0]), "greater than or equal to 0"),
        (lambda one: chunks(one)[0].update(offset=[1, 0]), "reach beyond"),
        (lambda one: chunks(one)[0].update(start=1 << 40), "are meant, which has"),
        (lambda one: chunks(one)[0].update(file="../elsewhere"), "lies in its folder itself"),
        (lambda one: chunks(one)[0].update(file="__9_0.distcp"), "none of the files"),
        (lambda one: one["records"].append(chunks(one)[0]), "elements"),
        (lambda one: chunks(one)[1].update(start=chunks(one)[0]["start"]), "lie at byte"),
        (lambda one: one["optimizer"]["groups"][0].update(lr="fast"), "hyper-parameter 'lr'"),
        (lambda one: one["parts"].update(scheduler="bm8="), "scheduler="),
    ],
)
def test_what_is_wrong_is_told(saved: tuple[Path, list[torch.Tensor]], change: Any, told: str) -> None:
    folder, _ = saved
    content = json.loads((folder / MANIFEST).read_text())["content"]
    change(content)
    write_manifest(folder, content)
    model, optimizer, scheduler = train()
    with pytest.raises(CheckpointError, match=told):
        syncline.load_checkpoint(folder, model, optimizer, scheduler=scheduler)


def test_a_manifest_that_is_nested_without_end_is_refused(saved: tuple[Path, list[torch.Tensor]]) -> None:
    folder, _ = saved
    (folder / MANIFEST).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="damaged"):
        syncline.load_checkpoint(folder, train()[0])


def test_chunks_of_an_edited_index_of_torch_must_cover_their_tensors(tmp_path: Path) -> None:
    model, _, _ = train()
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    index = tmp_path / "saved" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    chunk = metadata.state_dict_metadata["model.0.weight"].chunks[0]
    chunk.offsets = torch.Size([-1, 0])
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="overlap, or reach beyond"):
        syncline.load_checkpoint(tmp_path / "saved", model)
