"""What `syncline lab` does, one function a command. Nothing here prints, but what the commands in the lab print."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, TextIO, Unpack

from syncline.errors import LabError
from syncline.lab.lab import Lab, LabSettings
from syncline.lab.plan import LabPlan
from syncline.lab.programs import check_machine
from syncline.lab.records import LabRecord, all_records, clean, find_record, remove_lab, signal_groups
from syncline.topology import DirectedLink, Topology

__all__ = ["LabStatus", "up", "down", "run", "execute", "status", "clean"]

GRACE_S = 10.0
"""How long the other hosts may go on after one has failed, or after Ctrl-C."""

_KILL_AFTER_S = 5.0
_POLL_S = 0.1
_DRAIN_S = 1.0
_CHUNK_BYTES = 1 << 16


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


def execute(host: str, argv: Sequence[str], *, lab_id: str | None = None) -> int:
    """Run one command on one host of a lab, with this terminal, and return its status."""
    check_machine()
    process: subprocess.Popen[bytes] = Lab.attach(find_record(lab_id)).spawn(host, argv, start_new_session=False)
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
class LabStatus:
    """One lab, and what its links carry, which is empty where it is broken."""

    record: LabRecord
    plan: LabPlan
    num_bytes: Mapping[DirectedLink, int]
    """What each direction of each link has carried since the lab was built."""
    bytes_per_s: Mapping[DirectedLink, float]
    """What it carries now."""


def status(*, lab_id: str | None = None, interval_s: float = 1.0) -> tuple[LabStatus, ...]:
    """Describe every lab on this machine, or one; rates are measured over ``interval_s``, of all at once."""
    check_machine()
    records = all_records() if lab_id is None else (find_record(lab_id),)
    labs = [Lab.attach(record) for record in records]
    before, started = [_link_bytes(lab) for lab in labs], time.monotonic()
    time.sleep(interval_s if labs else 0.0)
    after, elapsed_s = [_link_bytes(lab) for lab in labs], time.monotonic() - started
    return tuple(
        LabStatus(
            record=record,
            plan=lab.plan,
            num_bytes=later,
            bytes_per_s={link: (later[link] - earlier.get(link, later[link])) / elapsed_s for link in later},
        )
        for record, lab, earlier, later in zip(records, labs, before, after, strict=True)
    )


def _link_bytes(lab: Lab) -> dict[DirectedLink, int]:
    try:
        return lab.link_bytes()
    except LabError:
        return {}  # it is being built or removed, or its run was killed in the middle of that


@dataclass(slots=True, kw_only=True)
class _Stream:
    """The lines of one pipe; a carriage return ends a line too, since progress bars write nothing else."""

    prefix: str
    sink: TextIO
    rest: bytes = b""

    def feed(self, chunk: bytes) -> None:
        *lines, self.rest = (self.rest + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._write(lines)

    def finish(self) -> None:
        self._write([self.rest] if self.rest else [])
        self.rest = b""

    def _write(self, lines: Sequence[bytes]) -> None:
        if lines:
            text = "".join(f"{self.prefix}{line.decode(errors='replace')}\n" for line in lines)
            self.sink.write(text)
            self.sink.flush()


@dataclass(slots=True, kw_only=True)
class _Run:
    """The processes of one run, and the signals that are still to be sent to them."""

    processes: Mapping[str, subprocess.Popen[bytes]]
    report: Callable[[str], None]
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    status: int = 0
    pending: list[tuple[float, signal.Signals]] = field(default_factory=list)

    def stop(self, *signals: tuple[float, signal.Signals]) -> None:
        now = time.monotonic()
        self.pending = [(now + delay_s, number) for delay_s, number in signals]

    def pump(self, timeout_s: float) -> bool:
        """Move output that is ready; False where no pipe is left or none had anything."""
        ready = self.selector.select(timeout_s) if self.selector.get_map() else []
        for key, _ in ready:
            chunk = os.read(key.fd, _CHUNK_BYTES)
            stream: _Stream = key.data
            stream.feed(chunk)
            if not chunk:
                stream.finish()
                self.selector.unregister(key.fileobj)
        return bool(ready)

    def look_after(self) -> bool:
        """Note failures and send the signals that are due; True while a process runs."""
        statuses = {host: process.poll() for host, process in self.processes.items()}
        for host, status in statuses.items():
            if self.status == 0 and status:
                self.status = status if status > 0 else 128 - status
                self.report(f"{host} ended with status {status}; the other hosts have {GRACE_S:g} s to end")
                self.stop((GRACE_S, signal.SIGTERM), (GRACE_S + _KILL_AFTER_S, signal.SIGKILL))
        now = time.monotonic()
        for _, number in [entry for entry in self.pending if entry[0] <= now]:
            signal_groups(self.processes.values(), number)
        self.pending = [entry for entry in self.pending if entry[0] > now]
        return None in statuses.values()

    def interrupt(self, number: signal.Signals) -> None:
        """Pass Ctrl-C on; the second time, do not wait."""
        delay_s = 0.0 if self.status == 128 + number else GRACE_S
        self.status = 128 + number
        signal_groups(self.processes.values(), number)
        self.stop((delay_s, signal.SIGTERM), (delay_s and delay_s + _KILL_AFTER_S, signal.SIGKILL))


def run_on_hosts(
    lab: Lab,
    argv: Sequence[str],
    *,
    output: TextIO,
    errors: TextIO,
    report: Callable[[str], None],
    env: Mapping[str, str] | None = None,
) -> int:
    """Run ``argv`` on every host of ``lab`` until all have ended; return 0, or the status of the first that failed.

    Each line of output gets its host's name in front. After a failure the other hosts have 10 s. Ctrl-C is passed on.
    """
    width = max(len(host.name) for host in lab.plan.hosts)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    run = _Run(processes=processes, report=report)
    with run.selector:
        for host in lab.plan.hosts:
            process = lab.spawn(
                host.name, argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            processes[host.name] = process
            prefix = f"{host.name.ljust(width)} | "
            _register(run, process.stdout, _Stream(prefix=prefix, sink=output))
            _register(run, process.stderr, _Stream(prefix=prefix, sink=errors))
        _pump_until_all_ended(run)
    return run.status


def _register(run: _Run, pipe: IO[Any] | None, stream: _Stream) -> None:
    assert pipe is not None
    run.selector.register(pipe, selectors.EVENT_READ, stream)


def _pump_until_all_ended(run: _Run) -> None:
    is_running = True
    while is_running:
        try:
            run.pump(_POLL_S)
            is_running = run.look_after()
        except KeyboardInterrupt:
            run.interrupt(signal.SIGINT)
    deadline = time.monotonic() + _DRAIN_S  # a process that was left behind may hold a pipe open for ever
    while run.selector.get_map() and time.monotonic() < deadline:
        run.pump(_POLL_S)
    for key in list(run.selector.get_map().values()):
        key.data.finish()
    for process in run.processes.values():
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
