"""Whenever a rank ends, training goes on from a step that all ranks have, as if nothing had happened: bit for bit."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from phased_crashes import CrashError, CrashingFolder, stored_step
from phased_models import make_batches, make_stages, squared

from rank_scripts import run_script
from syncline.errors import ConfigurationError, SynclineError
from syncline.pytorch.phased import phase, setup
from syncline.updates.phased.storage import Folder
from syncline.updates.phased.versions import read_manifests

NUM_STEPS = 3
SCRIPT = Path(__file__).with_name("phased_resume_process.py")
OPTIONS: dict[str, Any] = {"micro_batches": 2, "max_grad_norm": 0.2, "input_budget_bytes": 0}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def train(fleet: Any, folder: Path, *, last: int | None = None, crashes: int = 0, **options: Any) -> list[float]:
    """Go on to the end, or to a crash of one rank in its ``last`` operation; return the losses from there on."""
    torch.manual_seed(4)
    storage = CrashingFolder(folder / str(fleet.rank), last=last if fleet.rank == crashes else None)
    trainer = phase(make_stages(4), adam, loss=squared, fleet=fleet, storage=storage, resume=True, **options)
    before = trainer.num_steps
    generator = torch.Generator().manual_seed(8)
    data = torch.randn(NUM_STEPS, 8, 9, generator=generator, dtype=torch.float64)
    losses = [trainer.step(batch[:, :6], batch[:, 6:]) for batch in data[before:]]
    trainer.synchronize()
    assert trainer.num_steps == NUM_STEPS
    return [before, storage.num_operations, *losses]


def check_crash(run_fleets: Any, folder: Path, whole: list[Any], **crash: Any) -> int:
    """Crash and go on; return the step that was gone on from."""
    accept = (CrashError, SynclineError)
    world = len(whole)
    options = {name: crash.pop(name) for name in list(crash) if name in OPTIONS}
    failed = run_fleets(world, lambda fleet: train(fleet, folder, **crash, **options), accept=accept)
    assert any(isinstance(one, CrashError) for one in failed), failed
    again = run_fleets(world, lambda fleet: train(fleet, folder, **options))
    for rank, (before, _, *losses) in enumerate(again):
        assert losses == whole[rank][2 + before :]
        assert stored_step(folder / str(rank), NUM_STEPS) == stored_step(folder.parent / "whole" / str(rank), NUM_STEPS)
    return int(again[0][0])


@pytest.mark.parametrize(
    ("world", "options", "stride", "share", "latest"),
    [(2, {}, 2, 1.0, 2), (4, OPTIONS, 9, 0.9, 1)],
    ids=["pair", "pairs, clipping, spilling"],
)
def test_a_crash_in_any_operation(
    world: int, options: dict[str, Any], stride: int, share: float, latest: int, run_fleets: Any, tmp_path: Path
) -> None:
    """``share``: what is spilled is removed without a write if it was used before, so operations may be fewer.

    ``latest``: the step from which the last of the crashes lets training go on; clipping puts updates off.
    """
    whole = run_fleets(world, lambda fleet: train(fleet, tmp_path / "whole", **options))
    begun = [
        check_crash(run_fleets, tmp_path / str(last), whole, last=last, crashes=last % world, **options)
        for last in range(1, int(min(one[1] for one in whole) * share) + 1, stride)
    ]
    assert min(begun) == 0
    assert max(begun) >= latest


def test_one_more_step_is_made_after_the_end(run_fleets: Any, tmp_path: Path) -> None:
    """Each of the two slots is used again, and a job that is complete begins with its last step."""
    for number in (1, 3, 4, 4):

        def body(fleet: Any, number: int = number) -> int:
            trainer = phase(make_stages(4), adam, loss=squared, fleet=fleet, storage=tmp_path, resume=True)
            before = trainer.num_steps
            for _ in range(before, number):
                trainer.step(*make_batches(1, 1)[0][0])
            return before

        begun = run_fleets(2, body)
        assert begun in ([0, 0], [1, 1], [3, 3], [4, 4])
    assert begun == [4, 4]


def outcomes(run_fleets: Any, body: Any, world: int = 2) -> list[str]:
    return [str(one) for one in run_fleets(world, body, accept=SynclineError)]


def make_steps(run_fleets: Any, folder: Path, number: int, world: int = 2) -> None:
    def body(fleet: Any) -> None:
        trainer = phase(make_stages(4), adam, loss=squared, fleet=fleet, storage=folder, resume=True)
        for step in make_batches(number, 1):
            trainer.step(*step[0])

    run_fleets(world, body)


def flip_last_bit(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_files_that_changed_are_not_gone_on_from(run_fleets: Any, tmp_path: Path) -> None:
    """Of the last step, the one before is taken; of both, that is an error, and nothing is lost."""
    make_steps(run_fleets, tmp_path, 3)

    def damage(step: int) -> None:
        path = tmp_path / "rank-0001" / f"stage-0003.state.{step % 2}.safetensors"
        flip_last_bit(path)

    def begin(fleet: Any) -> int:
        return phase(make_stages(4), adam, loss=squared, fleet=fleet, storage=tmp_path, resume=True).num_steps

    damage(3)
    assert run_fleets(2, begin) == [2, 2]
    damage(2)
    told = outcomes(run_fleets, begin)
    assert all("those of step 2 have changed on rank 1" in one for one in told), told
    assert sorted(read_manifests(Folder(tmp_path / "rank-0000"))) == [2, 3]


def test_a_folder_that_is_gone_is_not_begun_anew(run_fleets: Any, tmp_path: Path) -> None:
    make_steps(run_fleets, tmp_path, 2)
    (tmp_path / "rank-0000").rename(tmp_path / "elsewhere")

    def begin(fleet: Any) -> int:
        return phase(make_stages(4), adam, loss=squared, fleet=fleet, storage=tmp_path, resume=True).num_steps

    told = outcomes(run_fleets, begin)
    assert all("rank 0 has none; rank 1 has step 1 and step 2: start each rank" in one for one in told), told
    (tmp_path / "rank-0000").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "rank-0000")
    assert run_fleets(2, begin) == [2, 2]


@pytest.mark.parametrize("change", ["stages", "buckets"])
def test_another_job_is_told_and_changes_nothing(
    change: str, run_fleets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_steps(run_fleets, tmp_path, 2)
    if change == "buckets":
        monkeypatch.setattr(setup, "DEFAULT_BUCKET_BYTES", 500)
    before = {path: path.read_bytes() for path in sorted(tmp_path.glob("*/*"))}

    def begin(fleet: Any) -> int:
        stages = make_stages(5) if change == "stages" else make_stages(4)
        return phase(stages, adam, loss=squared, fleet=fleet, storage=tmp_path, resume=True).num_steps

    told = outcomes(run_fleets, begin)
    assert any("holds step 2 of another job: it was" in one for one in told), told
    assert {path: path.read_bytes() for path in sorted(tmp_path.glob("*/*"))} == before


@pytest.mark.parametrize(("stored", "started"), [(2, 4), (4, 2)])
def test_another_number_of_ranks_is_refused_and_changes_nothing(
    stored: int, started: int, run_fleets: Any, tmp_path: Path
) -> None:
    make_steps(run_fleets, tmp_path, 2, world=stored)
    before = {path: path.read_bytes() for path in sorted(tmp_path.glob("*/*"))}

    def begin(fleet: Any) -> None:
        with pytest.raises(
            ConfigurationError, match=f"that is {stored} in .* this job has {started} .*: start {stored}"
        ):
            phase(make_stages(4), adam, loss=squared, fleet=fleet, storage=tmp_path, resume=True)

    run_fleets(started, begin)
    assert {path: path.read_bytes() for path in sorted(tmp_path.glob("*/*"))} == before


def test_only_a_folder_can_be_gone_on_from(run_fleets: Any) -> None:
    def body(fleet: Any) -> None:
        with pytest.raises(ConfigurationError, match="name one with storage="):
            phase(make_stages(4), adam, loss=squared, fleet=fleet, resume=True)

    run_fleets(2, body)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what ranks leave that nobody kills; ``losses.json`` is what they told."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "losses.json").write_text(json.dumps(run_to_end(folder)))
    return folder


def test_a_job_cannot_be_elastic_as_well(run_fleets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_ELASTIC", "on")

    def body(fleet: Any) -> None:
        with pytest.raises(
            ConfigurationError, match=r"elastic=True does not go with phase\(\).* say --restarts N without --elastic"
        ):
            phase(make_stages(4), adam, loss=squared, fleet=fleet)

    run_fleets(2, body)


def run_to_end(folder: Path) -> list[list[str]]:
    """Return what each rank told: how many steps were made before, and the losses of the others."""
    results = run_script(SCRIPT, 2, str(folder), "0", "0")
    assert [status for status, _ in results] == [0, 0], results
    return [output.split("result ")[-1].split() for _, output in results]


def check_told(text: str, killed: int) -> None:
    """Check that a survivor's error says who is lost, and in which step and at which stage it was itself."""
    at = r"in step \d, at the (forward|loss|backward) of stage \d|at the end of step \d|after step \d"
    assert re.search(rf"told of rank {killed}: rank {killed} .* is lost.*; rank {1 - killed} was ({at})", text), text


@pytest.mark.parametrize(
    ("killed", "moment", "least"),
    [
        pytest.param(0, "29", 1, id="half of a file is written"),
        pytest.param(1, "Send:13", 0, id="a stage is computed, and not told"),
        pytest.param(0, "Reduce:8", 0, id="gradients are complete"),
        pytest.param(1, "step:5", 1, id="a shard is stepped"),
        pytest.param(0, "Store:5", 1, id="some stages of a step are stored"),
        pytest.param(1, "Commit:3", 2, id="all stages of a step are stored"),
    ],
)
def test_kill_9_with_dropout_and_running_statistics(
    killed: int, moment: str, least: int, undisturbed: Path, tmp_path: Path
) -> None:
    """Processes, of which one kills itself; the other is told, and ends. ``least``: the step that all had before.

    Steps are stored in turn, everywhere, and a stage is updated once it is stored as of the step before.
    """
    results = run_script(SCRIPT, 2, str(tmp_path), str(killed), moment)
    assert results[killed][0] == -signal.SIGKILL, results
    check_told(results[1 - killed][1], killed)
    whole = json.loads((undisturbed / "losses.json").read_text())
    begun = run_to_end(tmp_path)
    assert begun[0][0] == begun[1][0]
    assert least <= int(begun[0][0]) < 4
    for rank, (before, *losses) in enumerate(begun):
        assert losses == whole[rank][1 + int(before) :]
        assert stored_step(tmp_path / str(rank), 4) == stored_step(undisturbed / str(rank), 4)
