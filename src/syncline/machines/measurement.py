"""The features of the machine that we run on, read from the system, and its disk's rate by a short probe."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from syncline.machines.limits import is_in_memory, read_limits, usable_cores
from syncline.machines.nvml import Gpu, find_gpu, read_gpu

PROBE_BYTES = 8 * 1024 * 1024
PROBE_S = 0.25
_MHZ = re.compile(r"^cpu MHz\s*:\s*([0-9.]+)", re.MULTILINE)


def read_machine(*, probe_directory: Path | None = None, gpu: int | None = None) -> dict[str, float]:
    """Return what can be read here: CPU clock and cores, memory, GPU clock and memory, and the disk's write rate.

    Cores and memory are those that this process may use. ``probe_directory`` is where the disk is tried (default: the
    working directory); of a folder in memory no rate is told. ``gpu`` is the number that this process's CUDA devices
    have (default: see :func:`.nvml.find_gpu`). A feature that this machine does not tell is left out.
    """
    limits = read_limits()
    total_bytes = psutil.virtual_memory().total
    features = {"cpu_hz": _cpu_hz(), "cpu_cores": usable_cores(limits)}
    features["memory_bytes"] = float(min(total_bytes, limits.memory_bytes or total_bytes))
    features["disk_bytes_per_s"] = probe_disk(probe_directory or Path.cwd())
    features |= read_gpu(find_gpu(gpu))
    return {name: value for name, value in features.items() if value > 0}


def read_moment(gpu: Gpu | None = None) -> dict[str, float]:
    """Return what changes from one period to the next and costs little to read: clocks and free memory."""
    clock = psutil.cpu_freq()
    available, limits = psutil.virtual_memory().available, read_limits()
    moment = {
        "cpu_hz": float(clock.current) * 1e6 if clock is not None else _cpu_hz(),
        "available_memory_bytes": float(
            available if limits.available_bytes is None else min(available, limits.available_bytes)
        ),
    }
    moment |= {} if gpu is None else gpu.read_moment()
    return {name: value for name, value in moment.items() if value > 0}


def _cpu_hz() -> float:
    """Return the highest clock that the CPU reports, or else the mean of what its cores run at now."""
    frequency = psutil.cpu_freq()
    if frequency is not None and (frequency.max or frequency.current):
        return float(frequency.max or frequency.current) * 1e6
    with contextlib.suppress(OSError):
        return clock_of_cpuinfo(Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace"))
    return 0.0


def clock_of_cpuinfo(text: str) -> float:
    """Return the mean clock in Hz of the cores in the text of /proc/cpuinfo; 0 if it names none."""
    clocks = [float(number) * 1e6 for number in _MHZ.findall(text)]
    return sum(clocks) / len(clocks) if clocks else 0.0


def probe_disk(directory: Path, *, num_bytes: int = PROBE_BYTES, limit_s: float = PROBE_S) -> float:
    """Write and sync at most ``num_bytes`` for about ``limit_s``; return bytes per second.

    0 if it cannot be written, or lies in memory.

    Each block is synced, so that it is the disk that is measured and not the memory before it.
    """
    block = os.urandom(1024 * 1024)
    try:
        if is_in_memory(directory):
            return 0.0
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            return _write_blocks(file.fileno(), [block] * max(1, num_bytes // len(block)), limit_s)
    except OSError:
        return 0.0


def _write_blocks(descriptor: int, blocks: Iterable[bytes], limit_s: float) -> float:
    start_s = time.monotonic()
    written_bytes, elapsed_s = 0, 0.0
    for block in blocks:
        written_bytes += os.write(descriptor, block)
        os.fsync(descriptor)
        elapsed_s = time.monotonic() - start_s
        if elapsed_s > limit_s:
            break
    return written_bytes / max(elapsed_s, 1e-9)
