"""A report under any launcher (``SYNCLINE_REPORT``): every rank traces, and rank 0 writes it when its process ends."""

from __future__ import annotations

import atexit
import shutil
import sys
import time
from pathlib import Path

from syncline.errors import ConfigurationError

WAIT_S = 5.0
"""How long rank 0 waits until the other ranks have completed their traces."""
_TAIL = b"]\n"


def trace_folder(target: Path, *, rank: int, world_size: int) -> Path:
    """Return where the ranks write their traces; rank 0 makes the report of them when its process ends.

    Call it before the trace is opened, so that it is closed before. Raises :class:`ConfigurationError` if the folder
    cannot be made. Traces that are on other machines are missing in the report.
    """
    target = target.absolute()
    folder = target.with_name(f"{target.name}.parts")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"trace-{rank}.json").unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(f"SYNCLINE_REPORT: {folder} cannot be made: {error.strerror}") from error
    if rank == 0:
        atexit.register(_write, folder, target, world_size)
    return folder


def _write(folder: Path, target: Path, world_size: int) -> None:
    from syncline.report.page import write_report

    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s and sum(map(_is_complete, folder.glob("*.json"))) < world_size:
        time.sleep(0.05)
    try:
        write_report(folder, target, title=Path(sys.argv[0]).name)
    except ConfigurationError as error:
        print(f"syncline: {error}", file=sys.stderr)
        return
    shutil.rmtree(folder, ignore_errors=True)
    print(f"syncline: report: {target}", file=sys.stderr, flush=True)


def _is_complete(path: Path) -> bool:
    return path.read_bytes()[-len(_TAIL) :] == _TAIL
