"""Ranks as processes, over loopback: ``init`` and ``close`` many times, training, a death."""

from __future__ import annotations

from pathlib import Path

import pytest

from rank_scripts import run_script

SCRIPT = Path(__file__).with_name("fleet_process.py")


@pytest.mark.parametrize(("world_size", "number"), [(1, 200), (2, 30)])
def test_nothing_is_left_after_many_fleets(world_size: int, number: int) -> None:
    for status, output in run_script(SCRIPT, world_size, "cycles", str(number), finalizes=True):
        assert status == 0, output


def test_training_that_ends_without_close() -> None:
    for status, output in run_script(SCRIPT, 3, "train", finalizes=True):
        assert status == 0, output
        assert "final" in output


@pytest.mark.parametrize("master", ["::1", "[::1]"])
def test_a_fleet_over_ipv6(master: str) -> None:
    for status, output in run_script(SCRIPT, 3, "addresses", extra={"MASTER_ADDR": master}):
        assert status == 0, output
        assert output.splitlines()[-1] == "addresses ::1", f"the job must run on ::1 alone: {output}"


def test_a_death_is_told_to_the_others() -> None:
    results = run_script(SCRIPT, 3, "die")
    assert [status for status, _ in results] == [0, 7, 0], results
    assert "told of rank 1" in results[0][1]
    assert "told of rank 1" in results[2][1]


def test_children_see_the_steps_of_a_model_in_shared_memory() -> None:
    for rank, (status, output) in enumerate(run_script(SCRIPT.with_name("sharing_process.py"), 2)):
        assert status == 0, output
        assert output.splitlines()[-1] == f"seen by rank {rank}"
