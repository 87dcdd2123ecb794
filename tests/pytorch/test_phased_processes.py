"""Pairs of processes over loopback: training, traces, a death."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from rank_scripts import run_script
from syncline.updates.phased.storage import Folder

SCRIPT = Path(__file__).with_name("phased_process.py")


@pytest.mark.parametrize("world_size", [2, 4])
def test_training_that_ends_without_close(world_size: int) -> None:
    for status, output in run_script(SCRIPT, world_size, "train", finalizes=True):
        assert status == 0, output
        assert "final" in output


def test_the_trace_shows_each_stage_and_phase(tmp_path: Path) -> None:
    for status, output in run_script(SCRIPT, 2, "trace", str(tmp_path)):
        assert status == 0, output
    for rank in range(2):
        events = json.loads((tmp_path / f"trace-{rank}.json").read_text())
        spans = {(event["name"], event["cat"]) for event in events if event["ph"] == "X"}
        own = range(rank, 6, 2)
        assert {(f"forward of stage {number}", "compute") for number in own if number < 5} <= spans
        assert {(f"backward of stage {number}", "compute") for number in own if number < 5} <= spans
        assert (("loss of stage 5", "compute") in spans) is (rank == 1)
        for number in own:
            assert {(f"load of stage {number}", "storage"), (f"store of stage {number}", "storage")} <= spans
            assert (f"update of stage {number}", "update") in spans


def test_a_death_is_told_to_the_partner_and_the_other_pair_and_every_file_is_whole(tmp_path: Path) -> None:
    results = run_script(SCRIPT, 4, "die", str(tmp_path))
    assert [status for status, _ in results] == [0, 7, 0, 0], results
    for rank in (0, 2, 3):
        assert re.search(r"told of rank 1: .* is lost: .*; rank \d was .*step \d", results[rank][1]), results[rank][1]
    files = sorted(tmp_path.glob("*/*.safetensors"))
    assert len(files) == 4 * 3 * 2
    for path in files:
        _, notes = Folder(path.parent).read(path.name.removesuffix(".safetensors"))
        assert int(notes["step"]) in range(3, 6)


def test_a_killed_rank_leaves_no_temporary_storage(tmp_path: Path) -> None:
    for status, output in run_script(SCRIPT, 2, "kill", str(tmp_path)):
        assert status == -signal.SIGKILL, output
        assert f"stored in step 2 at {tmp_path}" in output
    assert {path.name for path in tmp_path.iterdir()} <= {f"syncline-{os.geteuid()}"}  # the user's secret
