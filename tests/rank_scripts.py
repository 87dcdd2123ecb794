"""Ranks as processes of their own: a script for each."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

DEADLINE_S = 120


def script_environment() -> dict[str, str]:
    """Return an environment in which a script knows no job, and finds the modules that tests share."""
    names = {key: value for key, value in os.environ.items() if not key.startswith(("SYNCLINE", "TORCHELASTIC"))}
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), names.get("PYTHONPATH")]))
    return names | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run_script(
    script: Path, world_size: int, *arguments: str, extra: dict[str, str] | None = None
) -> list[tuple[int, str]]:
    """Start the script on each rank, as a launcher would; return exit status and output of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env=script_environment() | places | {"RANK": str(rank)} | (extra or {}),
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
