"""Ranks as processes of their own: a script for each, forked from a process that has imported torch."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forked_client import FORKING, send

HERE = Path(__file__).parent
DEADLINE_S = 120


def script_environment() -> dict[str, str]:
    """Return an environment in which a script knows no job, and finds the modules that tests share."""
    names = {key: value for key, value in os.environ.items() if not key.startswith(("SYNCLINE", "TORCHELASTIC"))}
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), names.get("PYTHONPATH")]))
    return names | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1"}


@contextmanager
def reserved_port(address: str = "127.0.0.1") -> Iterator[int]:
    """Yield a port that no other program gets meanwhile: it is bound, and not listened on, so that rank 0 may."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        yield holder.getsockname()[1]


def run_script(
    script: Path,
    world_size: int,
    *arguments: str,
    extra: dict[str, str] | None = None,
    folder: Path | None = None,
    finalizes: bool = False,
    warm: tuple[str, ...] = (),
) -> list[tuple[int, str]]:
    """Start the script on each rank, as a launcher would, in a folder; return exit status and output of each.

    ``finalizes``: where the end of the interpreter is what is tested, see :class:`Program`.
    ``warm``: modules that are to be imported already, beside torch and syncline.
    """
    extra = extra or {}
    address = extra.get("MASTER_ADDR", "127.0.0.1")
    with reserved_port(address.strip("[]")) as port:
        places = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        common = script_environment() | places
        programs = [
            Program(
                (str(script), *arguments),
                common | {"RANK": str(rank)} | extra,
                folder,
                forks=False,
                finalizes=finalizes,
            )
            for rank in range(world_size)
        ]
        ended = run_programs(programs, warm=warm)
    return [(one.returncode, one.stdout) for one in ended]


@dataclass(frozen=True, slots=True)
class Program:
    """What is written after `python`: a script, or a module, and its arguments; and where it runs."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=script_environment)
    folder: Path | None = None
    forks: bool = True
    """Whether Python programs that it starts are forked too; a launcher's ranks are."""
    finalizes: bool = False
    """Whether the interpreter frees what it has, torch too, when the program has ended: longer than most run."""
    splits: bool = False
    """Whether standard error is told apart from standard output."""

    def start(self, place: Path, output: Path) -> socket.socket:
        """Let the nursery at ``place`` begin it; what it writes goes to ``output``."""
        errors = output.with_suffix(".errors") if self.splits else output
        files = [os.open(os.devnull, os.O_RDONLY)]
        files += [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for path in (output, errors)]
        told = {"arguments": self.arguments, "environment": dict(self.environment), "forks": self.forks}
        told["finalizes"] = self.finalizes
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(place / "socket"))
        send(connection, told | {"folder": str(self.folder or Path.cwd()), "has_namespaces": False}, files)
        for file in files:
            os.close(file)
        return connection


def run_python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` to its end; what it imports of torch and syncline is there already."""
    return run_programs([Program(tuple(map(str, arguments)), **options)])[0]


def run_programs(programs: Sequence[Program], *, warm: tuple[str, ...] = ()) -> list[subprocess.CompletedProcess[str]]:
    """Run programs side by side; return how each ended, and what it wrote. If one hangs, all are ended."""
    end_s = time.monotonic() + DEADLINE_S
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as connections:
        outputs = [Path(name, str(number)) for number in range(len(programs))]
        running = [
            connections.enter_context(program.start(_nursery(warm), output))
            for program, output in zip(programs, outputs, strict=True)
        ]
        ended = [_status_of(connection, end_s) for connection in running]
        texts = [[_text(output), _text(output.with_suffix(".errors"))] for output in outputs]
    assert None not in ended, f"programs hang; they wrote {texts}"
    return [
        subprocess.CompletedProcess(program.arguments, status or 0, *text)
        for program, status, text in zip(programs, ended, texts, strict=True)
    ]


def _status_of(connection: socket.socket, end_s: float) -> int | None:
    """Wait for a program's exit status; None if it hangs."""
    if not select.select([connection], [], [], max(0.0, end_s - time.monotonic()))[0]:
        return None
    return int(connection.recv(16))


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def forked_python(*, forks: bool = False) -> str:
    """Return a program that does what `python` does, for whoever starts ranks: what they import is there already.

    ``forks``: Python programs that it starts are forked too, as those of a launcher.
    """
    return str(_nursery(()) / (FORKING if forks else "python"))


@functools.cache
def _nursery(warm: tuple[str, ...]) -> Path:
    """Return the folder of a process that forks programs: its `socket`, and `python` by two names, which asks there."""
    place = Path(tempfile.mkdtemp())
    client = place / "python"
    client.write_text(f"#!{sys.executable} -IS\n" + HERE.joinpath("forked_client.py").read_text())
    client.chmod(0o700)
    (place / FORKING).symlink_to(client)
    process = subprocess.Popen(
        [sys.executable, str(HERE / "rank_nursery.py"), str(place), *warm],
        env=script_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    atexit.register(_end, process, place)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n", "the nursery ended"
    return place


def _end(process: subprocess.Popen[bytes], place: Path) -> None:
    process.kill()
    process.communicate()
    shutil.rmtree(place)


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
