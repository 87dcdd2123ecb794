"""The last few checkpoints of a training: names, what is removed and when, and where training goes on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import syncline
from syncline.errors import CheckpointError, ConfigurationError
from syncline.pytorch.checkpoint import folder as places
from syncline.pytorch.checkpoint.folder import MANIFEST
from syncline.pytorch.checkpoint.storage import is_ours
from syncline.pytorch.fleet import Fleet
from syncline.updates import AllReduce, Overlapped, Sharded, UpdateRule


def make(value: float = 0.0) -> nn.Module:
    generator = torch.Generator().manual_seed(1)  # of its own: ranks are threads, and make models at the same time
    model = nn.Linear(5, 3)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)
    if value:
        nn.init.constant_(model.weight, value)
    return model


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def spoil(folder: Path) -> None:
    path = next(folder.glob("*.distcp"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_the_last_n_stay_and_the_newest_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "run1"
    assert syncline.latest_checkpoint(folder) is None
    for iteration in (5, 10, 100_000, 99):
        syncline.save_checkpoint(folder, make(iteration), iteration=iteration, keep=2)
    assert names(folder) == [
        "iteration-0000000010",
        "iteration-0000000099",
        "iteration-0000100000.superseded",
    ], "a training that went back loses nothing"
    assert syncline.latest_checkpoint(folder) == folder / "iteration-0000000099"
    model = make()
    syncline.load_checkpoint(folder, model)
    assert float(model.weight[0, 0].detach()) == 99
    (folder / "iteration-0000000099" / MANIFEST).unlink()
    (folder / "iteration-0000000099" / ".metadata").unlink()
    assert syncline.latest_checkpoint(folder) == folder / "iteration-0000000010"
    next((folder / "iteration-0000000010").glob("*.distcp")).unlink()
    assert syncline.latest_checkpoint(folder) is None


def test_one_of_a_name_is_found_with_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    for value in (1, 2):
        syncline.save_checkpoint(path, make(value))
    assert syncline.latest_checkpoint(path) == path
    (path / MANIFEST).unlink()
    (path / ".metadata").unlink()
    assert syncline.latest_checkpoint(path) == places.previous_folder(path)


def test_nothing_goes_before_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, whole = tmp_path / "run1", []
    removed = places.remove

    def remove(path: Path) -> None:
        whole.append((path.name, syncline.latest_checkpoint(folder)))
        removed(path)

    monkeypatch.setattr(places, "remove", remove)
    for iteration in (1, 2):
        syncline.save_checkpoint(folder, make(iteration), iteration=iteration, keep=1)
    assert whole == [("iteration-0000000001", folder / "iteration-0000000002")]


def test_what_an_interrupted_save_left_goes_with_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "run1"
    for name in ("iteration-0000000001.writing", "iteration-0000000001.removed", "notes", "iteration-1"):
        (folder / name).mkdir(parents=True)
    syncline.save_checkpoint(folder, make(), iteration=3, keep=1)
    assert names(folder) == ["iteration-0000000003", "iteration-1", "notes"]


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    model = make()
    for keep in (0, -1, 1.5, True):
        with pytest.raises(ConfigurationError, match="keep must be"):
            syncline.save_checkpoint(tmp_path / "run1", model, keep=keep)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="iteration must be"):
        syncline.save_checkpoint(tmp_path / "run1", model, iteration=-1)
    with pytest.raises(CheckpointError, match="plain optimizer does not count"):
        syncline.save_checkpoint(tmp_path / "run1", model, keep=1)
    assert not (tmp_path / "run1").exists()
    (tmp_path / "run2").write_text("")
    with pytest.raises(CheckpointError, match="a file; with keep="):
        syncline.save_checkpoint(tmp_path / "run2", model, iteration=1, keep=1)


def test_a_single_checkpoint_gives_way_to_those_that_are_kept(tmp_path):
    model, path = make(), tmp_path / "run1"
    syncline.save_checkpoint(path, model, extra=1)
    for iteration, newest_first in ((2, [2, 1]), (3, [3, 2])):  # the second of two that are kept ends the single one
        syncline.save_checkpoint(path, model, extra=iteration, iteration=iteration, keep=2)
        assert [syncline.load_checkpoint(each, model) for each in places.candidates(path)] == newest_first


def test_a_single_checkpoint_is_whole_if_the_first_that_is_kept_is_cut_off(tmp_path):
    model, path = make(), tmp_path / "run1"
    syncline.save_checkpoint(path, model, extra=1)
    places.begin(places.place_of(path, 2), is_ours)
    assert syncline.load_checkpoint(path, model) == 1


class Sampler:
    """Its state has what JSON cannot say."""

    def __init__(self) -> None:
        self.seen: dict[int, torch.Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def train(fleet: Fleet | None, folder: Path, rule: UpdateRule | None, last: int, *, each: int = 2) -> dict[str, Any]:
    """Go on to iteration ``last``, with one line for the start; return where it began and what it ended with."""
    model = make()
    plain = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer: Any = plain
    rank, num_ranks = (0, 1) if fleet is None else (fleet.rank, fleet.world_size)
    if fleet is not None:
        model, optimizer = syncline.distribute(model, plain, rule, fleet=fleet)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5], gamma=0.5)
    sampler = Sampler()
    begin = syncline.resume(folder, model, optimizer, scheduler=scheduler, sampler=sampler)
    for iteration in range(begin.iteration, last):
        inputs = torch.arange(30.0).view(6, 5) * (0.01 + iteration)
        model(inputs[rank::num_ranks]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        sampler.seen[iteration] = torch.tensor(iteration)
        if (iteration + 1) % each == 0:
            more = {"scheduler": scheduler, "sampler": sampler, "extra": {"seed": 3}}
            syncline.save_checkpoint(folder, model, optimizer, iteration=iteration + 1, keep=3, **more)
    if fleet is not None:
        assert optimizer.iteration == last or isinstance(rule, Overlapped)  # of which one rank may be ahead
        optimizer.synchronize()
    return {
        "begin": begin,
        "weights": model.weight.detach().clone(),
        "lr": optimizer.param_groups[0]["lr"],
        "seen": sorted(sampler.seen),
    }


@pytest.mark.parametrize(
    ("rule", "num_ranks"), [(AllReduce(), 1), (Sharded(), 3), (Overlapped(quorum=2), 3)], ids=["all", "sharded", "some"]
)
def test_training_goes_on_at_another_number_of_ranks(
    rule: UpdateRule, num_ranks: int, tmp_path: Path, run_fleets: Any
) -> None:
    alone = train(None, tmp_path / "alone", None, 7)
    assert (alone["begin"].iteration, alone["begin"].extra, alone["begin"].path) == (0, {}, None)
    folder = tmp_path / "run1"
    run_fleets(2, lambda fleet: train(fleet, folder, Sharded(), 5))
    for found in run_fleets(num_ranks, lambda fleet: train(fleet, folder, rule, 7)):
        begin = found["begin"]
        assert (begin.iteration, begin.extra, begin.path) == (4, {"seed": 3}, folder / "iteration-0000000004")
        assert found["lr"] == alone["lr"] == 0.025
        assert found["seen"] == list(range(7))
        if not isinstance(rule, Overlapped):
            torch.testing.assert_close(found["weights"], alone["weights"])
    assert train(None, folder, None, 7)["begin"].iteration == 6, "and in a plain process"


def test_all_ranks_fall_back_together_and_say_so(
    tmp_path: Path, run_fleets: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run1"
    run_fleets(2, lambda fleet: train(fleet, folder, Sharded(), 6))
    spoil(folder / "iteration-0000000006")
    (folder / "iteration-0000000004" / MANIFEST).write_text("{}")
    with caplog.at_level(logging.WARNING):
        begins = [found["begin"] for found in run_fleets(3, lambda fleet: train(fleet, folder, Sharded(), 2))]
    assert {begin.path for begin in begins} == {folder / "iteration-0000000002"}
    (record,) = [record for record in caplog.records if "training goes on" in record.message]
    assert "iteration-0000000002, since newer ones are damaged" in record.message
    assert "the contents of __0_0.distcp have changed" in record.message
    spoil(folder / "iteration-0000000002")

    def fail(fleet: Fleet) -> None:
        with pytest.raises(CheckpointError, match=r"No checkpoint at .* is whole"):
            train(fleet, folder, Sharded(), 2)

    run_fleets(2, fail)


@pytest.mark.parametrize("index", [None, b"not a pickle"], ids=["whole_index", "damaged_index"])
def test_one_whose_manifest_is_gone_is_not_whole_and_training_goes_on_over_it(
    index: bytes | None, tmp_path: Path, run_fleets: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run1"
    run_fleets(2, lambda fleet: train(fleet, folder, Sharded(), 4))
    newest, older = folder / "iteration-0000000004", folder / "iteration-0000000002"
    (newest / MANIFEST).unlink()
    if index is not None:
        (newest / ".metadata").write_bytes(index)
    assert syncline.latest_checkpoint(folder) == older
    last = 4 if index is None else 3
    with caplog.at_level(logging.WARNING):
        begins = [found["begin"] for found in run_fleets(2, lambda fleet: train(fleet, folder, Sharded(), last))]
    assert {begin.path for begin in begins} == {older}
    assert "since newer ones are damaged" in caplog.text
    if index is None:
        assert syncline.latest_checkpoint(folder) == newest, "it is made again"
        return
    with pytest.raises(CheckpointError, match="is there, but no checkpoint"):  # for all that is known, another's
        train(None, folder, None, 4)


def test_parts_that_are_missing_or_no_parts_are_refused(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    syncline.save_checkpoint(tmp_path / "run1", model, optimizer)
    with pytest.raises(CheckpointError, match="no state of scheduler="):
        syncline.resume(tmp_path / "run1", model, optimizer, scheduler=scheduler)
    assert syncline.resume(tmp_path / "run1", model, optimizer, strict=False, scheduler=scheduler).path is not None
    with pytest.raises(ConfigurationError, match=r"seed must be a Stateful \(which has load_state_dict, st"):
        syncline.save_checkpoint(tmp_path / "run2", model, optimizer, seed=3)  # type: ignore[arg-type]
    sampler = Sampler()
    sampler.seen = {1: Sampler()}  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match=r"sampler= has more than plain values"):
        syncline.save_checkpoint(tmp_path / "run2", model, optimizer, sampler=sampler)
    assert not (tmp_path / "run2").exists()


def test_names_are_in_the_order_of_iterations() -> None:
    found = [places.place_of(Path("run1"), number) for number in (0, 9, 10, 99_999, 9_999_999_999)]
    assert found == sorted(found)
