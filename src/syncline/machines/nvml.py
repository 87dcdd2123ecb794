"""The GPU's clock and memory, from NVIDIA's management library where the driver has brought it.

Reached through ctypes: the library comes with the driver, needs no package, and starts no CUDA context. A machine
without it simply has no GPU features.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Mapping

from syncline.variables import process_variables

LIBRARY = "libnvidia-ml.so.1"
_CLOCK_SM = 1


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
"""Where torchrun, Open MPI, MPICH and Slurm say which of its host's processes this is."""


def find_gpu(ordinal: int | None = None, environment: Mapping[str, str] | None = None) -> int | str | None:
    """Return the index or the UUID of a GPU as the library knows it; None if this process may use none.

    ``ordinal`` is its number among this process's CUDA devices (default: the launcher's number of this process on its
    host, around those that there are, or 0), which CUDA_VISIBLE_DEVICES names. Without that list it is taken to be the
    index: so CUDA numbers them too, where all GPUs are of one kind or CUDA_DEVICE_ORDER is PCI_BUS_ID.
    """
    known = process_variables() if environment is None else environment
    local_rank = next((known[name] for name in LOCAL_RANKS if known.get(name)), "")
    number = ordinal if ordinal is not None else int(local_rank) if local_rank.isdecimal() else 0
    listed = known.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return number
    names: list[str] = []
    for name in map(str.strip, listed.split(",")):
        if not name or name.startswith("-"):  # what stands behind what is no device does not count
            break
        names.append(name)
    if not names or (ordinal is not None and ordinal >= len(names)):
        return None
    chosen = names[number % len(names)]
    return int(chosen) if chosen.isdecimal() else chosen


class Gpu:
    """A GPU, as far as the library tells of it; nothing where there is none. To be closed."""

    def __init__(self, which: int | str | None = 0, *, load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> None:
        self._library: ctypes.CDLL | None = None
        self._device = ctypes.c_void_p()
        self._has_device = False
        if which is None:
            return
        try:
            library = load(LIBRARY)
        except OSError:
            return
        if library.nvmlInit_v2() == 0:
            self._library = library
            if isinstance(which, str):
                found = library.nvmlDeviceGetHandleByUUID(which.encode(), ctypes.byref(self._device))
            else:
                found = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(which), ctypes.byref(self._device))
            self._has_device = found == 0

    def read_kind(self) -> dict[str, float]:
        """Return `gpu_hz`, its highest clock, and `gpu_memory_bytes`."""
        return self._clock("nvmlDeviceGetMaxClockInfo") | self._memory(gpu_memory_bytes="total")

    def read_moment(self) -> dict[str, float]:
        """Return `gpu_hz`, its clock now, and `available_gpu_memory_bytes`."""
        return self._clock("nvmlDeviceGetClockInfo") | self._memory(available_gpu_memory_bytes="free")

    def close(self) -> None:
        """Release the library."""
        if self._library is not None:
            self._library.nvmlShutdown()
        self._library, self._has_device = None, False

    def _clock(self, call: str) -> dict[str, float]:
        clock_mhz = ctypes.c_uint()
        if self._library is None or not self._has_device:
            return {}
        is_told = getattr(self._library, call)(self._device, ctypes.c_int(_CLOCK_SM), ctypes.byref(clock_mhz)) == 0
        return {"gpu_hz": clock_mhz.value * 1e6} if is_told else {}

    def _memory(self, **parts: str) -> dict[str, float]:
        memory = _Memory()
        if self._library is None or not self._has_device:
            return {}
        is_told = self._library.nvmlDeviceGetMemoryInfo(self._device, ctypes.byref(memory)) == 0
        return {name: float(getattr(memory, part)) for name, part in parts.items()} if is_told else {}


def read_gpu(which: int | str | None = 0, *, load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> dict[str, float]:
    """Return the kind of a GPU, or nothing where there is none."""
    with contextlib.closing(Gpu(which, load=load)) as gpu:
        return gpu.read_kind()
