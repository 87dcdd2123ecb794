"""Ranks as processes over TCP; one of them is killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("overlapped_process.py")
DEADLINE_S = 120


def run_ranks(world_size: int, *arguments: str) -> list[tuple[int, str]]:
    """Start the script on each rank; return exit status and output of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    names = {key: value for key, value in os.environ.items() if not key.startswith(("SYNCLINE", "TORCHELASTIC"))}
    places = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            env=names | places | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
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


@pytest.mark.parametrize("deadly_step", [-1, 37])
def test_a_killed_worker_does_not_stop_the_others(deadly_step: int) -> None:
    """Periods of 16 iterations, so step 37 is in the third; rank 1 hosts shards."""
    results = run_ranks(3, str(deadly_step), "16", "96")
    survivors = [rank for rank in range(3) if rank != 1 or deadly_step < 0]
    said = [results[rank][1].strip().splitlines()[-1].split() for rank in survivors]
    for rank, words in zip(survivors, said, strict=True):
        assert results[rank][0] == 0, results[rank][1]
        assert words[0] == "hash", results[rank][1]
        assert words[1] == said[0][1], "parameters differ"
        assert words[-1] == "6"
        assert deadly_step < 0 or "1" in results[rank][1].split("lost")[1].split("periods")[0]
