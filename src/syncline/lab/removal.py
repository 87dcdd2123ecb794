"""How labs end: processes first, then namespaces, then the record; also those whose owner was killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from syncline.errors import LabError
from syncline.lab.plan import NAMESPACE_PREFIX, lab_id_of
from syncline.lab.programs import check_machine, delete_namespaces, namespace_names, processes_in
from syncline.lab.records import (
    RECORDS,
    LabRecord,
    all_records,
    labs_with_host_names,
    remove_host_names,
    remove_incomplete_records,
)

_POLL_S = 0.02
_KILL_S = 5.0


def remove_lab(record: LabRecord) -> None:
    """Kill what runs in a lab and remove it, however much of it was built."""
    _remove_namespaces(_namespaces_of(record.lab_id))
    remove_host_names(record.lab_id)
    record.remove()


def clean(records: Path = RECORDS) -> tuple[str, ...]:
    """Remove every lab whose owner is dead, and every namespace of ours without a record; return the labs' ids."""
    check_machine()
    seen = {lab_id_of(name) for name in namespace_names() if name.startswith(NAMESPACE_PREFIX)} | labs_with_host_names()
    known = all_records(records)  # read last: whatever was seen before then has its record by now
    abandoned = {record.lab_id for record in known if record.is_abandoned}
    orphans = seen - {record.lab_id for record in known}
    for lab_id in abandoned | orphans:
        _remove_namespaces(_namespaces_of(lab_id))
        remove_host_names(lab_id)
        shutil.rmtree(records / lab_id, ignore_errors=True)
    remove_incomplete_records(records)
    return tuple(sorted(abandoned | orphans))


def end_process_groups(processes: Sequence[subprocess.Popen[Any]], *, grace_s: float) -> None:
    """Ask the process groups to end (SIGTERM), and kill what is left after ``grace_s``."""
    running = [process for process in processes if process.poll() is None]
    if grace_s > 0:
        signal_groups(running, signal.SIGTERM)
        wait_for_all(running, timeout_s=grace_s)
    signal_groups(running, signal.SIGKILL)
    wait_for_all(running, timeout_s=_KILL_S)


def wait_for_all(processes: Iterable[subprocess.Popen[Any]], *, timeout_s: float) -> bool:
    """Wait until all processes have ended; False where the time was over first."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
    return True


def signal_groups(processes: Iterable[subprocess.Popen[Any]], number: signal.Signals) -> None:
    """Send a signal to the groups of the processes that still run: the id of an ended one may be another's by now."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)


def _remove_namespaces(names: Sequence[str]) -> None:
    deadline = time.monotonic() + _KILL_S
    while (running := processes_in(names)) and time.monotonic() < deadline:
        for process_id in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        time.sleep(_POLL_S)
    try:
        delete_namespaces(names)
    except LabError:
        delete_namespaces(tuple(name for name in names if name in namespace_names()))  # somebody else cleans as well


def _namespaces_of(lab_id: str) -> tuple[str, ...]:
    return tuple(name for name in namespace_names() if name.startswith(f"{NAMESPACE_PREFIX}{lab_id}."))
