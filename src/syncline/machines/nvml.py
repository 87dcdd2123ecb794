"""The GPU's clock and memory, from NVIDIA's management library where the driver has brought it.

Reached through ctypes: the library comes with the driver, needs no package, and starts no CUDA context. A machine
without it simply has no GPU features.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

LIBRARY = "libnvidia-ml.so.1"
_CLOCK_SM = 1


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def read_gpu(index: int = 0, *, load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> dict[str, float]:
    """Return `gpu_hz` (highest clock) and `gpu_memory_bytes` of a GPU, or nothing where there is none."""
    try:
        library = load(LIBRARY)
    except OSError:
        return {}
    if library.nvmlInit_v2() != 0:
        return {}
    try:
        return _read(library, index)
    finally:
        library.nvmlShutdown()


def _read(library: ctypes.CDLL, index: int) -> dict[str, float]:
    device = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != 0:
        return {}
    features: dict[str, float] = {}
    clock_mhz, memory = ctypes.c_uint(), _Memory()
    if library.nvmlDeviceGetMaxClockInfo(device, ctypes.c_int(_CLOCK_SM), ctypes.byref(clock_mhz)) == 0:
        features["gpu_hz"] = clock_mhz.value * 1e6
    if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0:
        features["gpu_memory_bytes"] = float(memory.total)
    return features
