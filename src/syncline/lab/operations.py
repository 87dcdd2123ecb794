"""What `syncline lab` does, one function a command. Nothing here prints, but what the commands in the lab print."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO, Unpack

from syncline.errors import LabError
from syncline.lab.lab import Lab, LabSettings
from syncline.lab.programs import check_machine
from syncline.lab.records import LabRecord, all_records, clean, find_record, remove_lab
from syncline.lab.running import run_on_hosts
from syncline.topology import DirectedLink, Topology

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatus:
    """One direction of a link: its rate, what it carries now, and what it has carried since the lab was built."""

    link: DirectedLink
    limit_bytes_per_s: float
    bytes_per_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LabStatus:
    """One lab. ``owner_pid`` is None where it stays until it is taken down; ``links`` is empty where it is broken."""

    lab_id: str
    topology: Topology
    owner_pid: int | None
    is_abandoned: bool
    has_priorities: bool
    addresses: Mapping[str, str]
    links: tuple[LinkStatus, ...]


def status(*, lab_id: str | None = None, interval_s: float = 1.0) -> tuple[LabStatus, ...]:
    """Describe every lab on this machine, or one; rates are measured over ``interval_s``, of all at once."""
    check_machine()
    records = all_records() if lab_id is None else (find_record(lab_id),)
    labs = [Lab.attach(record) for record in records]
    before, started = [_link_bytes(lab) for lab in labs], time.monotonic()
    time.sleep(interval_s if labs else 0.0)
    after, elapsed_s = [_link_bytes(lab) for lab in labs], time.monotonic() - started
    counts = zip(records, labs, before, after, strict=True)
    return tuple(_describe(record, lab, earlier, later, elapsed_s) for record, lab, earlier, later in counts)


def _link_bytes(lab: Lab) -> dict[DirectedLink, int]:
    try:
        return lab.link_bytes()
    except LabError:
        return {}  # it is being built or removed, or its run was killed in the middle of that


def _describe(
    record: LabRecord,
    lab: Lab,
    earlier: Mapping[DirectedLink, int],
    later: Mapping[DirectedLink, int],
    elapsed_s: float,
) -> LabStatus:
    return LabStatus(
        lab_id=record.lab_id,
        topology=lab.topology,
        owner_pid=record.owner and record.owner[0],
        is_abandoned=record.is_abandoned,
        has_priorities=record.has_priorities,
        addresses={host.name: host.address for host in lab.plan.hosts},
        links=tuple(_link_statuses(lab, earlier, later, elapsed_s)),
    )


def _link_statuses(
    lab: Lab, earlier: Mapping[DirectedLink, int], later: Mapping[DirectedLink, int], elapsed_s: float
) -> Iterator[LinkStatus]:
    limits = {link.child: link.link for link in lab.plan.links}
    for link, num_bytes in later.items():
        yield LinkStatus(
            link=link,
            limit_bytes_per_s=limits[link.child].bytes_per_s(link.direction),
            bytes_per_s=(num_bytes - earlier.get(link, num_bytes)) / elapsed_s,
            num_bytes=num_bytes,
        )
