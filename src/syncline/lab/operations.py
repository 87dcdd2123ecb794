"""What `syncline lab` does, one function a command. Nothing here prints, but what the commands in the lab print."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO, Unpack

from syncline.lab.lab import Lab, LabSettings
from syncline.lab.programs import check_machine
from syncline.lab.records import find_record
from syncline.lab.removal import clean, remove_lab
from syncline.lab.running import run_on_hosts
from syncline.lab.status import LabStatus, LinkStatus, status
from syncline.topology import Topology

__all__ = ["LabStatus", "LinkStatus", "up", "down", "run", "execute", "status", "clean"]


def up(topology: Topology | str | Path, **settings: Unpack[LabSettings]) -> Lab:
    """Build a lab that stays until :func:`down`."""
    return Lab(topology, is_kept=True, **settings).up()


def down(lab_id: str | None = None) -> str:
    """Remove a lab, by default the only one, with everything that runs in it; return its id."""
    check_machine()
    record = find_record(lab_id)
    remove_lab(record)
    return record.lab_id


def run(
    topology: Topology | str | Path,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    output: TextIO | None = None,
    errors: TextIO | None = None,
    report: Callable[[str], None] = lambda _: None,
    **settings: Unpack[LabSettings],
) -> int:
    """Build a lab, run ``argv`` on every host, remove the lab; return 0 or the status of the first host that failed.

    ``report`` is told, in sentences, what the lab leaves out and which host failed.
    """
    with _ended_by_signals(), Lab(topology, **settings) as lab:
        for note in lab.notes:
            report(note)
        streams = {"output": output or sys.stdout, "errors": errors or sys.stderr}
        return run_on_hosts(lab, argv, env=env, report=report, **streams)


def execute(host: str, argv: Sequence[str], *, lab_id: str | None = None, env: Mapping[str, str] | None = None) -> int:
    """Run one command on one host of a lab, with this terminal, and return its status."""
    check_machine()
    process: subprocess.Popen[bytes] = Lab.attach(find_record(lab_id)).spawn(
        host, argv, env=env, start_new_session=False
    )
    while True:
        try:
            status = process.wait()
        except KeyboardInterrupt:  # the terminal sent it to the command as well, which decides what to do
            continue
        return status if status >= 0 else 128 - status


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C, so that a lab is removed after them too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
