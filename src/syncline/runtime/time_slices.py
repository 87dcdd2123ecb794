"""When the communication thread gets a core that a training thread has: as soon as something arrives, or in its turn.

A thread that moves messages works for some ten microseconds at a time, but a core that computes makes it wait for the
end of the other's slice, some milliseconds each time, and a message takes several threads to come and go. Linux 6.12
and later let a thread ask for a shorter slice: it gets no more of the core than before, but gets it sooner (EEVDF,
Stoica and Abdel-Wahab, 1995). Any thread may ask; kernels that do not know the wish ignore it.

Where no step waits for a message, the thread had better stand back: each time that it interrupts a computation it costs
that one its caches, too. Then it comes in its turn, and finds more to do at once (Linux's policy for batches).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading

SLICE_NS = 100_000
"""The shortest that Linux grants."""

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274}
"""The number of the system call, which Python has no name for."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""The kernel's ``sched_attr``: size, policy, flags, nice, priority, runtime, deadline, period."""


def ask_for_short_slices() -> bool:
    """Ask the kernel to run the calling thread in slices of ``SLICE_NS``; return whether it took the wish.

    A thread of another policy than the default one was given it by someone who knows why, and is left alone.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if platform.system() != "Linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, SLICE_NS, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0)


def stand_back() -> bool:
    """Let the calling thread interrupt no other from now on; return whether the kernel took the wish.

    It keeps its share of the cores. A thread of another policy than the default one is left alone.
    """
    if platform.system() != "Linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    return True
