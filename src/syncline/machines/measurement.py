"""The features of the machine that we run on, as far as this process may use it, and its disk's rate by a short probe.

A container sees all of its machine's cores and memory in /proc, and is stopped by its control groups when it uses them.
Limits of all groups on the path count. Files as the kernel documents them: cgroup-v2.rst, and cgroup-v1/memory.rst and
scheduler/sched-bwc.rst.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from syncline.machines.nvml import Gpu, find_gpu, read_gpu

PROBE_BYTES = 8 * 1024 * 1024
PROBE_S = 0.25
UNLIMITED_BYTES = 1 << 60
"""The first version writes "no limit" as the largest number of pages."""
_GROUPS = "proc/self/cgroup"
_MOUNTS = "sys/fs/cgroup"
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "rootfs", "hugetlbfs"})


def read_machine(*, probe_directory: Path | None = None, gpu: int | None = None) -> dict[str, float]:
    """Return what can be read here: CPU clock and cores, memory, GPU clock and memory, and the disk's write rate.

    Cores and memory are those that this process may use. ``probe_directory`` is where the disk is tried (default: the
    working directory); of a folder in memory no rate is told. ``gpu`` is the number that this process's CUDA devices
    have (default: see :func:`.nvml.find_gpu`). A feature that this machine does not tell is left out.
    """
    limits = read_limits()
    clock, total_bytes = psutil.cpu_freq(), psutil.virtual_memory().total
    highest_mhz = 0.0 if clock is None else clock.max or clock.current  # of what its cores run at now, the mean
    features = {"cpu_hz": highest_mhz * 1e6, "cpu_cores": usable_cores(limits)}
    features["memory_bytes"] = float(min(total_bytes, limits.memory_bytes or total_bytes))
    features["disk_bytes_per_s"] = probe_disk(probe_directory or Path.cwd())
    features |= read_gpu(find_gpu(gpu))
    return {name: value for name, value in features.items() if value > 0}


def read_moment(gpu: Gpu | None = None) -> dict[str, float]:
    """Return what changes from one period to the next and costs little to read: clocks and free memory."""
    clock = psutil.cpu_freq()
    available, limits = psutil.virtual_memory().available, read_limits()
    moment = {
        "cpu_hz": 0.0 if clock is None else clock.current * 1e6,
        "available_memory_bytes": float(
            available if limits.available_bytes is None else min(available, limits.available_bytes)
        ),
    }
    moment |= {} if gpu is None else gpu.read_moment()
    return {name: value for name, value in moment.items() if value > 0}


def probe_disk(directory: Path) -> float:
    """Write and sync at most ``PROBE_BYTES`` for about ``PROBE_S`` seconds; return bytes per second.

    0 if it cannot be written, or lies in memory.

    Each block is synced, so that it is the disk that is measured and not the memory before it.
    """
    block = os.urandom(1024 * 1024)
    try:
        if is_in_memory(directory):
            return 0.0
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            return _write_blocks(file.fileno(), [block] * (PROBE_BYTES // len(block)))
    except OSError:
        return 0.0


def _write_blocks(descriptor: int, blocks: Iterable[bytes]) -> float:
    start_s = time.monotonic()
    written_bytes, elapsed_s = 0, 0.0
    for block in blocks:
        written_bytes += os.write(descriptor, block)
        os.fsync(descriptor)
        elapsed_s = time.monotonic() - start_s
        if elapsed_s > PROBE_S:
            break
    return written_bytes / max(elapsed_s, 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the control groups leave this process; None where they do not limit it."""

    cores: float | None = None
    memory_bytes: int | None = None
    available_bytes: int | None = None
    """What is left of the memory: the file cache that the kernel can give up counts as free."""


def read_limits(root: Path = Path("/")) -> Limits:
    """Return the limits of this process's control groups, of both versions; ``root`` is where /proc and /sys are."""
    cores: list[float] = []
    memory: list[tuple[int, int]] = []
    for folder, is_second in _group_folders(root):
        cores += _cores(folder, is_second=is_second)
        memory += _memory(folder, is_second=is_second)
    return Limits(
        cores=min(cores, default=None),
        memory_bytes=min((limit for limit, _ in memory), default=None),
        available_bytes=min((max(0, limit - used) for limit, used in memory), default=None),
    )


def usable_cores(limits: Limits) -> float:
    """Return how many cores this process can keep busy: those that it may run on, as far as its quota goes."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1
    return float(allowed) if limits.cores is None else min(float(allowed), limits.cores)


def is_in_memory(folder: Path) -> bool:
    """Whether files in ``folder`` lie in memory, not on a disk."""
    path = folder.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    # The longest is the one that counts; of those mounted over one another, the last.
    kind = max(enumerate(mounts), key=lambda pair: (len(pair[1].mountpoint), pair[0]))[1].fstype if mounts else ""
    return kind in MEMORY_FILE_SYSTEMS


def _group_folders(root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's groups and of all above them, and whether they are of the second version."""
    text = ""
    with contextlib.suppress(OSError):
        text = (root / _GROUPS).read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        names = [controllers, *controllers.split(",")] if controllers else ["", "unified"]
        mount = next((root / _MOUNTS / name for name in names if (root / _MOUNTS / name).is_dir()), None)
        if mount is not None:
            group = PurePosixPath(path.lstrip("/"))
            # A container may see the machine's path, but only its own part of the tree.
            for part in (group, *group.parents):
                yield mount / part, not controllers


def _cores(folder: Path, *, is_second: bool) -> list[float]:
    if is_second:
        quota, _, period = _text(folder / "cpu.max").partition(" ")
    else:
        quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    return [int(quota) / int(period)] if quota.isdecimal() and period.isdecimal() and int(period) else []


def _memory(folder: Path, *, is_second: bool) -> list[tuple[int, int]]:
    """Return the limit of a group, if it has one, and what is used of it."""
    names = ("memory.max", "memory.current") if is_second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limit, used = (_text(folder / name) for name in names)
    if not limit.isdecimal() or int(limit) >= UNLIMITED_BYTES:
        return []
    key = "inactive_file" if is_second else "total_inactive_file"
    statistics = dict(line.partition(" ")[::2] for line in _text(folder / "memory.stat").splitlines())
    cache = statistics.get(key, "0")
    return [(int(limit), int(used or 0) - int(cache))]


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace").strip()
    return ""
