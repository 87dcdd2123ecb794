"""The faults that ``hidden_faults.py`` hides, each a context within which a rank or a link has it.

On any machine: slow computing, a slow loader, a stopped process. As root by cgroups: a slow processor, a slow disk in a
checkpoint, memory on a disk (a file that is mapped, while a cgroup leaves no memory for it). In the lab: a link at a
part of its rate (``tc``), a link that loses packets (``nft``), and a plan for another network: hosts of two racks
change places.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from syncline.lab import Lab
from syncline.lab.plan import LabLink
from syncline.topology import DirectedLink

FLAGS = ("computing", "loader", "memory")
"""Faults that the ranks have by themselves, while there is a file of that name with their number."""
AS_ROOT = ("processor", "disk", "memory")
OF_RANKS = (*dict.fromkeys((*FLAGS, *AS_ROOT)), "stopped")
OF_LINKS = ("slow link", "loss", "plan")
QUOTA_US, PERIOD_US = 5_000, 100_000
DISK_BYTES_PER_S, MEMORY_BYTES, MAPPED_BYTES = 200_000, 1 << 26, 1 << 28
SLOW_BYTES_PER_S, LOST_PER_MILLE = 30e6 / 8, 40
CGROUPS = Path("/sys/fs/cgroup")
REASONS = {
    "computing": r"computes slower",
    "loader": r"outside of .*in read_batch",
    "memory": r"memory that is on a disk",
    "processor": r"had no processor",
    "disk": r"waited for a disk",
    "stopped": r"process is stopped|nor do heartbeats come",
    "slow link": r"messages were under way",
    "loss": r"is lost",
    "plan": r"messages were under way|is used|is lost",
}
"""What a line says of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What may have a fault: a rank, its process and the job's folder, and in the lab a direction of a link."""

    rank: int
    pid: int
    folder: Path
    lab: Lab | None = None
    link: DirectedLink | None = None

    def is_named(self, fault: str, named: str) -> bool:
        """Whether what a line names is it; of the links of one path, which may carry the same, it may name three."""
        if fault not in OF_LINKS:
            return named == f"rank {self.rank}"
        links = re.sub(r"^the links? of |^rank .*", "", named).split(" and ")
        return bool(links[0]) if fault == "plan" else len(links) <= 3 and str(self.link).split()[0] in links


def possible_faults(*, is_in_lab: bool) -> list[str]:
    """Return the faults that can be hidden here."""
    of_ranks = [fault for fault in OF_RANKS if fault not in AS_ROOT or os.geteuid() == 0]
    of_links = [fault for fault in OF_LINKS if is_in_lab and (fault != "loss" or shutil.which("nft"))]
    return [*of_ranks, *of_links, "nothing"]


@contextmanager
def broken(fault: str, target: Target) -> Iterator[None]:
    """Let the target have the fault within this context."""
    if fault == "stopped":
        os.kill(target.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(target.pid, signal.SIGCONT)
    elif fault in OF_LINKS:
        assert target.lab is not None
        assert target.link is not None
        of_link = {"slow link": _slowed, "loss": _lossy}
        with of_link[fault](target.lab, target.link) if fault in of_link else _swapped(target.lab):
            yield
    elif fault == "nothing":
        yield
    else:
        _forget(target.folder / "mapped")
        flag = target.folder / f"{fault}-{target.rank}"
        with _limits(fault, target):
            flag.touch()
            try:
                yield
            finally:
                flag.unlink()


def _forget(path: Path) -> None:
    """Let nothing of a file be in memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _limits(fault: str, target: Target) -> AbstractContextManager[None]:
    """Return the limit that makes a process slow so."""
    if fault == "processor":
        return _limited("cpu", target.pid, ("cpu.cfs_quota_us", QUOTA_US), ("cpu.max", f"{QUOTA_US} {PERIOD_US}"))
    if fault == "disk":
        number = target.folder.stat().st_dev
        disk = f"{os.major(number)}:{os.minor(number)}"
        first = "blkio.throttle.write_bps_device", f"{disk} {DISK_BYTES_PER_S}"
        return _limited("blkio", target.pid, first, ("io.max", f"{disk} wbps={DISK_BYTES_PER_S}"))
    if fault == "memory":
        return _limited("memory", target.pid, ("memory.limit_in_bytes", MEMORY_BYTES), ("memory.high", MEMORY_BYTES))
    return nullcontext()


@contextmanager
def _limited(controller: str, pid: int, first: tuple[str, object], second: tuple[str, object]) -> Iterator[None]:
    """Put a process into a cgroup with a limit within this context: a file and value of version 1, or of version 2."""
    parent = CGROUPS / controller if (CGROUPS / controller).exists() else CGROUPS
    name, value = second if parent == CGROUPS else first
    group = parent / "syncline-hidden-fault"
    group.mkdir(exist_ok=True)
    (group / name).write_text(str(value))
    (group / "cgroup.procs").write_text(str(pid))
    try:
        yield
    finally:
        (parent / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def _end(lab: Lab, link: DirectedLink) -> tuple[LabLink, str, str]:
    """Return a link of the lab, and the namespace and interface that its packets of this direction leave by."""
    place = next(each for each in lab.plan.links if each.child == link.child)
    if link.direction == "up":
        return place, place.lower_namespace, place.lower_interface
    return place, lab.plan.switch_namespace, place.upper_interface


def limit(lab: Lab, link: DirectedLink, bytes_per_s: float) -> None:
    """Give a direction of a link of the lab another rate."""
    _, namespace, interface = _end(lab, link)
    bits = f"{round(8 * bytes_per_s)}bit"
    for parent, name in (("1:", "1:1"), ("1:1", "1:a")):
        where = ["tc", "-n", namespace, "class", "change", "dev", interface, "parent", parent, "classid", name]
        subprocess.run([*where, "htb", "rate", bits, "ceil", bits], check=True)


@contextmanager
def _slowed(lab: Lab, link: DirectedLink) -> Iterator[None]:
    limit(lab, link, SLOW_BYTES_PER_S)
    try:
        yield
    finally:
        limit(lab, link, lab.topology.bytes_per_s(link))


@contextmanager
def _lossy(lab: Lab, link: DirectedLink) -> Iterator[None]:
    """Drop packets where they arrive: what a sender's own queue drops, its TCP is told of, and does not count as lost.

    One packet may be 64 KiB here, as the kernel cuts nothing before it must, so losses come in bursts.
    """
    place, _, _ = _end(lab, link)
    namespace, interface = lab.plan.switch_namespace, place.upper_interface
    if link.direction == "down":
        namespace, interface = place.lower_namespace, place.lower_interface
    nft = ["ip", "netns", "exec", namespace, "nft"]
    rules = (
        f'table netdev faults {{ chain lossy {{ type filter hook ingress device "{interface}" priority 0; '
        f"numgen random mod 1000 < {LOST_PER_MILLE} drop; }}; }}"
    )
    subprocess.run([*nft, rules], check=True)
    try:
        yield
    finally:
        subprocess.run([*nft, "delete", "table", "netdev", "faults"], check=True)


@contextmanager
def _swapped(lab: Lab) -> Iterator[None]:
    """Let the first hosts of two racks change places: what is planned to stay in a rack leaves it."""
    hosts: dict[str, LabLink] = {}
    for place in lab.plan.links:
        if place.lower_bridge is None:
            hosts.setdefault(place.upper_bridge, place)
    first, second, *_ = hosts.values()

    def connect(place: LabLink, bridge: str) -> None:
        where = ["ip", "-n", lab.plan.switch_namespace, "link", "set", "dev", place.upper_interface]
        subprocess.run([*where, "master", bridge], check=True)

    connect(first, second.upper_bridge)
    connect(second, first.upper_bridge)
    try:
        yield
    finally:
        connect(first, first.upper_bridge)
        connect(second, second.upper_bridge)
