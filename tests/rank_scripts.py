"""Ranks as processes of their own: a script for each, forked from a process that has imported torch."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEADLINE_S = 120


def script_environment() -> dict[str, str]:
    """Return an environment in which a script knows no job, and finds the modules that tests share."""
    names = {key: value for key, value in os.environ.items() if not key.startswith(("SYNCLINE", "TORCHELASTIC"))}
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), names.get("PYTHONPATH")]))
    return names | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@contextmanager
def reserved_port(address: str = "127.0.0.1") -> Iterator[int]:
    """Yield a port that no other program gets meanwhile: it is bound, and not listened on, so that rank 0 may."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        yield holder.getsockname()[1]


def run_script(
    script: Path, world_size: int, *arguments: str, extra: dict[str, str] | None = None
) -> list[tuple[int, str]]:
    """Start the script on each rank, as a launcher would; return exit status and output of each."""
    extra = extra or {}
    address = extra.get("MASTER_ADDR", "127.0.0.1")
    with tempfile.TemporaryDirectory() as folder, reserved_port(address.strip("[]")) as port:
        places = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        common = script_environment() | places
        outputs = [Path(folder) / str(rank) for rank in range(world_size)]
        job = {
            "script": str(script),
            "arguments": arguments,
            "environments": [common | {"RANK": str(rank)} | extra for rank in range(world_size)],
            "outputs": [str(output) for output in outputs],
        }
        statuses = _ask(_nursery(), job)
        texts = [output.read_text() for output in outputs]
    assert statuses is not None, f"ranks hang; they wrote {texts}"
    return list(zip(statuses, texts, strict=True))


@functools.cache
def _nursery() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("rank_nursery.py"))],
        env=script_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(_end, process)
    return process


def _ask(nursery: subprocess.Popen[str], job: dict[str, object]) -> list[int] | None:
    """Return the statuses of a job's ranks; None if they hang, and then they are killed."""
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    nursery.stdin.write(json.dumps(job) + "\n")
    nursery.stdin.flush()
    if select.select([nursery.stdout], [], [], DEADLINE_S)[0]:
        statuses: list[int] = json.loads(nursery.stdout.readline())
        return statuses
    _nursery.cache_clear()
    _end(nursery)
    return None


def _end(nursery: subprocess.Popen[str]) -> None:
    if nursery.poll() is None:
        os.killpg(nursery.pid, signal.SIGKILL)
    nursery.communicate()


def run_struck(program: Path, folder: Path, world_size: int, victim: int, *arguments: str) -> tuple[list[Any], Any]:
    """Run ``program FOLDER RANK WORLD_SIZE VICTIM ...`` for each rank; ``victim`` (-1: none) is struck on the way.

    Returns what each of those that lived printed, as JSON, and what the victim had printed before.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), str(folder), str(rank), str(world_size), str(victim), *arguments],
            env=script_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    lines, struck = [], None
    try:
        for rank, process in enumerate(processes):
            if rank != victim:
                out, err = process.communicate(timeout=DEADLINE_S)
                assert process.returncode == 0, err
                lines.append(json.loads(out))
    finally:
        for rank, process in enumerate(processes):
            process.kill()
            printed = process.communicate()[0]
            if rank == victim and printed:
                struck = json.loads(printed)
    return lines, struck
