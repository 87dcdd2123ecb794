"""Ranks as processes over TCP, as a user has them: some are killed, some only serve, some begin with a checkpoint."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import syncline
from rank_scripts import run_python, run_script
from small_regression import make_adam, make_model, parameters_of

SCRIPT = Path(__file__).with_name("overlapped_process.py")
SAID = re.compile(r"hash (\w+) lost (\(.*?\)) periods (\d+)")


def arguments(rule: dict, num_iterations: int, *options: str) -> list[str]:
    return ["--rule", json.dumps(rule), "--iterations", str(num_iterations), *options]


def launch(num_ranks: int, options: list[str]) -> subprocess.CompletedProcess[str]:
    """Start the script with ``syncline run``."""
    return run_python("-m", "syncline", "run", "--ranks", num_ranks, SCRIPT, *options)


@pytest.mark.parametrize("quorum", [2, None])
@pytest.mark.parametrize("victim", [None, 0, 1])
def test_a_killed_worker_does_not_stop_the_others(victim: int | None, quorum: int | None, tmp_path) -> None:
    """Periods of 16 iterations, so step 37 is in the third; each rank hosts shards. Who lives saves, to the end."""
    rule = {"period": 16, "quorum": quorum}
    path = str(tmp_path / "checkpoint")
    deadly = [] if victim is None else ["--victims", str(victim), "--deadly-step", "37"]
    results = run_script(SCRIPT, 3, *arguments(rule, 96, "--save", path, *deadly))
    survivors = [rank for rank in range(3) if rank != victim]
    said = [SAID.search(results[rank][1]) for rank in survivors]
    for rank, words in zip(survivors, said, strict=True):
        assert results[rank][0] == 0, results[rank][1]
        assert words is not None, results[rank][1]
        assert words[1] == said[0][1], "parameters differ"
        assert words[3] == "6"
        assert victim is None or str(victim) in words[2]
    assert_saved(path, 96)


def assert_saved(path: str, iteration: int) -> None:
    """What lies at ``path`` loads in one process alone, and is of ``iteration``."""
    model = make_model()
    assert syncline.load_checkpoint(path, model, make_adam(model.parameters()))["iteration"] == iteration
    assert not parameters_of(model).equal(parameters_of(make_model()))


def test_too_few_left_end_with_who_is_missing_and_a_checkpoint(tmp_path) -> None:
    """Three of four suffice; two die, and rank 0, the lowest that lives, writes what it has."""
    more = ["--victims", "1", "2", "--deadly-step", "21", "--save-on-failure", str(tmp_path / "saved")]
    results = run_script(SCRIPT, 4, *arguments({"period": 16, "quorum": 3}, 10_000, *more))
    for rank in (0, 3):
        status, output = results[rank]
        assert status == 1, output
        assert "QuorumLostError: A global gradient needs 3 of 4 workers, but 2 are left: rank " in output
    # Who ends first lost the two that died; the other may see that end before it sees both deaths.
    dead = re.compile(r"but 2 are left: rank 1 \(.* and rank 2 \(")
    assert any(dead.search(output) for _, output in (results[0], results[3]))
    said = re.compile(rf"rank 0 has written a checkpoint of what it had, after step \d+, to {tmp_path}/saved")
    assert all(said.search(results[rank][1]) for rank in (0, 3))
    model = make_model()
    progress = syncline.load_checkpoint(tmp_path / "saved", model, make_adam(model.parameters()))
    assert progress["iteration"] >= 16


def test_training_that_was_killed_goes_on_with_another_number_of_workers(tmp_path) -> None:
    """Three workers save at each period's end and are all killed in the third period; two go on from iteration 32."""
    path = str(tmp_path / "checkpoint")
    script = arguments({"period": 16, "rule": "rebase"}, 64)
    killed = launch(3, [*script, "--save", path, "--victims", "0", "1", "2", "--deadly-step", "37"])
    assert killed.returncode != 0, killed.stdout
    saved = make_model()
    assert syncline.load_checkpoint(path, saved, make_adam(saved.parameters()))["iteration"] == 32
    resumed = launch(2, [*script, "--resume", path])
    assert resumed.returncode == 0, resumed.stdout
    said = SAID.findall(resumed.stdout)
    assert [periods for _, _, periods in said] == ["2", "2"]
    assert len({digest for digest, _, _ in said}) == 1
    assert not parameters_of(saved).equal(parameters_of(make_model()))


def test_dedicated_servers_end_when_the_workers_have_left_and_others_go_on_from_what_they_saved(tmp_path) -> None:
    """Ranks 3 and 4 only serve. Then two workers and one server go on."""
    path = str(tmp_path / "checkpoint")
    for num_ranks, num_servers, options in ((5, 2, []), (3, 1, ["--resume", path])):
        rule = {"period": 16, "servers": f"dedicated:{num_servers}"}
        done = launch(num_ranks, arguments(rule, 48 + 16 * len(options), "--save", path, *options))
        assert done.returncode == 0, done.stdout
        said = SAID.findall(done.stdout)
        assert [periods for _, _, periods in said] == (["2", "2"] if options else ["3", "3", "3"])
        assert len({digest for digest, _, _ in said}) == 1
        assert_saved(path, 48 + 16 * len(options))
