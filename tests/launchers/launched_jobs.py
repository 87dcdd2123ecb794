"""Starting a launcher's commands, and reading what the ranks wrote."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from rank_scripts import DEADLINE_S, script_environment

RANK_SCRIPT = Path(__file__).with_name("launched_rank.py")
END_S = 20.0
OF_LAUNCHERS = ("SLURM", "OMPI_", "PMI", "MPI_", "PET_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_")


def plain_environment() -> dict[str, str]:
    """Return a shell's environment, in which no launcher has said anything."""
    plain = {key: value for key, value in script_environment().items() if not key.startswith(OF_LAUNCHERS)}
    return plain | {"SYNCLINE_CONNECT_TIMEOUT": str(DEADLINE_S)}


def run_together(
    commands: Sequence[Sequence[str]], extras: Sequence[Mapping[str, str]], *, timeout_s: float = DEADLINE_S
) -> list[str]:
    """Run commands side by side, each in a shell's environment with its extra variables; all must succeed.

    Returns what each printed. If one hangs, all are ended, with whatever they started.
    """
    plain = plain_environment()
    processes: list[subprocess.Popen[str]] = []
    try:
        for command, extra in zip(commands, extras, strict=True):
            process = subprocess.Popen(
                list(command),
                env=plain | extra,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            processes.append(process)
        printed = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            _end(process)
    statuses = [process.returncode for process in processes]
    assert not any(statuses), f"{statuses}: " + "\n".join(printed)
    return printed


def what_ranks_said(folder: Path) -> list[dict[str, Any]]:
    """Return what the ranks wrote, in the order of their numbers."""
    return sorted((json.loads(path.read_text()) for path in folder.glob("*.json")), key=lambda said: said["rank"])


def check_one_job(said: Sequence[Mapping[str, Any]], num_ranks: int) -> None:
    """Check that the ranks were one job: each number once, a sum over all, the same weights, and a secret."""
    assert [rank["rank"] for rank in said] == list(range(num_ranks))
    assert {rank["world_size"] for rank in said} == {num_ranks}
    assert {rank["total"] for rank in said} == {num_ranks * (num_ranks + 1) / 2}
    assert all(rank["weights"] == said[0]["weights"] for rank in said)
    assert all(rank["has_secret"] for rank in said), "another user of the machine could have joined"


def _end(process: subprocess.Popen[str]) -> None:
    """End a launcher politely, since it alone knows the ranks that run elsewhere; then whatever is left of its own."""
    if process.poll() is None:
        own = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        try:
            process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()
        for child in own:
            if child.is_running():
                child.kill()
    process.communicate()
