"""Ranks at a board that are killed or stopped in the middle of a call; and nothing is left after a close."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rank_scripts import script_environment
from syncline.runtime.board import futex

pytestmark = pytest.mark.skipif(not futex.has_futex(), reason="this platform has no board")

VICTIM = 2


def run_processes(folder, world_size, signal_name, moment):
    """Start the ranks; return what each of those that lived printed, and when the victim was struck."""
    program = Path(__file__).with_name("board_rank_process.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), str(folder), str(rank), str(world_size), str(VICTIM), signal_name, moment],
            env=script_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        lines = []
        for rank, process in enumerate(processes):
            if rank != VICTIM:
                out, err = process.communicate(timeout=60)
                assert process.returncode == 0, err
                lines.append(json.loads(out))
    finally:
        for process in processes:
            process.kill()
            process.wait()
        struck = processes[VICTIM].communicate()[0]
    return lines, json.loads(struck)["struck_s"]


@pytest.mark.parametrize(("signal_name", "limit_s"), [("SIGKILL", 1.0), ("SIGSTOP", 3.0)])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_rank_that_dies_or_freezes_is_named_by_all_others(tmp_path, signal_name, limit_s, moment):
    """Struck after it has put up its card, it has done its part of the call, and the next one fails."""
    lines, struck_s = run_processes(tmp_path, 4, signal_name, moment)
    assert len(lines) == 3
    step = 5 if moment == "before" else 6
    for line in lines:
        assert line["error"] == "PeerLostError", line
        assert "rank 2 (host h2)" in line["text"]
        assert f"during all_reduce, step {step}" in line["text"]
        assert line["at_s"] - struck_s < limit_s
        assert line["mapped"] == 0
