"""Ranks as processes, over loopback: ``init`` and ``close`` many times, training, a death."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fleet_process.py")
DEADLINE_S = 120


def run_ranks(world_size: int, *arguments: str, extra: dict[str, str] | None = None) -> list[tuple[int, str]]:
    """Start the script on each rank; return exit status and output of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    names = {key: value for key, value in os.environ.items() if not key.startswith(("SYNCLINE", "TORCHELASTIC"))}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            env=names
            | {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            | {"OMP_NUM_THREADS": "1"}
            | (extra or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


@pytest.mark.parametrize(("world_size", "number"), [(1, 200), (2, 30)])
def test_nothing_is_left_after_many_fleets(world_size: int, number: int) -> None:
    for status, output in run_ranks(world_size, "cycles", str(number)):
        assert status == 0, output


def test_training_that_ends_without_close() -> None:
    for status, output in run_ranks(3, "train"):
        assert status == 0, output
        assert "final" in output


@pytest.mark.parametrize("master", ["::1", "[::1]"])
def test_a_fleet_over_ipv6(master: str) -> None:
    for status, output in run_ranks(3, "addresses", extra={"MASTER_ADDR": master}):
        assert status == 0, output
        assert output.splitlines()[-1] == "addresses ::1", f"the job must run on ::1 alone: {output}"


def test_a_death_is_told_to_the_others() -> None:
    results = run_ranks(3, "die")
    assert [status for status, _ in results] == [0, 7, 0], results
    assert "told of rank 1" in results[0][1]
    assert "told of rank 1" in results[2][1]
