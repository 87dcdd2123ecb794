"""What is written down about each lab, so that a later command finds it, and how labs end, by what was written.

A lab's folder is written before its first namespace is made and removed after its last: so no namespace of ours is ever
without a record. The folders are in /run, which a reboot empties just as it removes namespaces.

The names of the hosts inside a lab are written too, as the `/etc/hosts` that a command in the lab sees: `ip netns exec`
shows it the files in `/etc/netns/NAMESPACE` in place of those in `/etc`. The machine's own name leads to the lab's host
there, since programs look up their own name to find their address.

Processes end first, then namespaces, then the record; also those of labs whose owner was killed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from pydantic import TypeAdapter

from syncline.errors import LabError
from syncline.lab.plan import NAMESPACE_PREFIX, LabHost, LabPlan, lab_id_of, plan_lab
from syncline.lab.programs import check_machine, delete_namespaces, namespace_names, processes_in
from syncline.topology import Topology

RECORDS = Path("/run/syncline-lab")
_RECORD = "lab.json"
_TOPOLOGY = "topology.yaml"
_WRITING_S = 60.0  # nobody takes longer to write a record
HOST_NAMES = Path("/etc/netns")
_POLL_S = 0.02
_KILL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LabRecord:
    """One lab: who owns it, and all that its plan is computed from.

    The owner is a process id and the time at which that process began, since ids are used again. A lab without owner
    stays until it is taken down.
    """

    lab_id: str
    folder: Path
    network: ipaddress.IPv4Network
    owner: tuple[int, float] | None
    has_priorities: bool
    congestion: str | None
    """The congestion control of all connections, if somebody chose one."""

    @property
    def topology_file(self) -> Path:
        """The topology as a file, for the commands that run in the lab."""
        return self.folder / _TOPOLOGY

    @property
    def is_abandoned(self) -> bool:
        """True where the owner is dead."""
        return self.owner is not None and _started_at(self.owner[0]) != self.owner[1]

    def plan(self) -> LabPlan:
        """Compute the plan again."""
        return plan_lab(Topology.load(self.topology_file), lab_id=self.lab_id, network=self.network)

    def remove(self) -> None:
        """Forget the lab."""
        shutil.rmtree(self.folder, ignore_errors=True)


def create_record(
    topology: Topology,
    *,
    network: ipaddress.IPv4Network,
    is_kept: bool,
    has_priorities: bool,
    congestion: str | None = None,
    records: Path = RECORDS,
) -> LabRecord:
    """Write the record of a new lab under an id that no other lab has."""
    lab_id = secrets.token_hex(3)
    record = LabRecord(
        lab_id=lab_id,
        folder=records / lab_id,
        network=network,
        owner=None if is_kept else (os.getpid(), psutil.Process().create_time()),
        has_priorities=has_priorities,
        congestion=congestion,
    )
    try:
        records.mkdir(mode=0o755, parents=True, exist_ok=True)
        record.folder.mkdir()
        record.topology_file.write_text(topology.to_yaml(), encoding="utf-8")
        (record.folder / _RECORD).write_bytes(TypeAdapter(LabRecord).dump_json(record))
    except OSError as error:
        raise LabError(
            f"the lab must keep a record, but {record.folder} cannot be written ({error.strerror})"
        ) from error
    return record


def all_records(records: Path = RECORDS) -> tuple[LabRecord, ...]:
    """Return the records of all labs on this machine, the oldest first."""
    found = []
    folders = records.iterdir() if records.is_dir() else ()
    for folder in sorted(folders, key=lambda path: path.stat().st_mtime):
        with contextlib.suppress(OSError, ValueError):  # it is being written, or removed
            found.append(TypeAdapter(LabRecord).validate_json((folder / _RECORD).read_bytes()))
    return tuple(found)


def find_record(lab_id: str | None, records: Path = RECORDS) -> LabRecord:
    """Return the record of ``lab_id``, or of the only lab there is."""
    known = all_records(records)
    matching = [record for record in known if lab_id in {None, record.lab_id}]
    if len(matching) == 1:
        return matching[0]
    ids = ", ".join(record.lab_id for record in known) or "none"
    if lab_id is None and known:
        raise LabError(f"there are several labs ({ids}); say which with --lab ID")
    what = "there is no lab" if lab_id is None else f"there is no lab {lab_id!r} (there is: {ids})"
    raise LabError(f"{what}; make one with 'syncline lab up TOPOLOGY'")


def remove_incomplete_records(records: Path = RECORDS) -> None:
    """Remove the folders of runs that were killed while they wrote their record, so before they made anything else."""
    for folder in records.iterdir() if records.is_dir() else ():
        is_old = time.time() - folder.stat().st_mtime > _WRITING_S
        if is_old and not (folder / _RECORD).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _started_at(process_id: int) -> float | None:
    """Return when a process began; None if it is dead, also where its parent has not taken note yet."""
    try:
        process = psutil.Process(process_id)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def write_host_names(plan: LabPlan, folder: Path = HOST_NAMES) -> None:
    """Write the names for every host of a lab."""
    own_name = socket.gethostname()
    try:
        for host in plan.hosts:
            place = folder / host.namespace
            place.mkdir(parents=True)
            (place / "hosts").write_text(_hosts_file(plan, host, own_name), encoding="utf-8")
    except OSError as error:
        raise LabError(
            f"the lab writes the names of its hosts to {folder}, but cannot ({error.strerror}); make it writable"
        ) from error


def remove_host_names(lab_id: str, folder: Path = HOST_NAMES) -> None:
    """Remove what :func:`write_host_names` wrote."""
    for place in _places(folder):
        if lab_id_of(place.name) == lab_id:
            shutil.rmtree(place, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()  # where it is empty


def labs_with_host_names(folder: Path = HOST_NAMES) -> set[str]:
    """Return the ids of the labs for which names are written."""
    return {lab_id_of(place.name) for place in _places(folder)}


def _places(folder: Path) -> tuple[Path, ...]:
    return tuple(folder.glob(f"{NAMESPACE_PREFIX}*"))


def _hosts_file(plan: LabPlan, own: LabHost, own_name: str) -> str:
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    for host in plan.hosts:
        names = [host.name, own_name] if host is own and own_name != host.name else [host.name]
        lines.append(f"{host.address} {' '.join(names)}")
        lines.append(f"::ffff:{host.address} {host.name}.lab")  # the form in which a listener on [::] sees its clients
    return "\n".join(lines) + "\n"


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


def kill_process_groups(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """Kill the process groups, and wait for those that ended."""
    signal_groups(processes, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_S
    with contextlib.suppress(subprocess.TimeoutExpired):
        for process in processes:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))


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
