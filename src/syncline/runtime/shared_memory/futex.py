"""Waiting for a word in shared memory to change, and waking who waits: the kernel's futex, called directly.

The kernel compares the word with what the caller has seen before it lets the caller sleep, and does so under the lock
that a waker takes too; so whoever stores first and wakes then is never missed. Calls release the interpreter's lock.

Only on Linux on x86-64: elsewhere the number of the system call is another, and stores may be seen in another order
than they were made, which Python offers no fence against.
"""

from __future__ import annotations

import ctypes
import platform
import sys

_FUTEX = 202
_WAIT, _WAKE = 0, 1
_EVERYONE = 0x7FFFFFFF
_LOW_HALF = 0xFFFFFFFF


def has_futex() -> bool:
    """Whether this platform is one that the calls below are written for."""
    is_known = sys.platform == "linux" and platform.machine() == "x86_64" and ctypes.sizeof(ctypes.c_void_p) == 8
    return is_known and wake(ctypes.addressof(ctypes.c_uint64(0))) == 0


def _load() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None).syscall
    function.restype = ctypes.c_long
    function.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    )
    return function


_syscall = _load() if sys.platform == "linux" else None


def wait(address: int, seen: int, timeout_s: float) -> None:
    """Sleep until the 8-byte word at ``address`` is no longer ``seen`` or someone wakes, at most ``timeout_s``.

    It may return for no reason: look again. Only the lower half is compared.
    """
    assert _syscall is not None
    seconds = int(timeout_s)
    limit = (ctypes.c_int64 * 2)(seconds, int((timeout_s - seconds) * 1e9))
    _syscall(_FUTEX, address, _WAIT, seen & _LOW_HALF, ctypes.addressof(limit), None, 0)


def wake(address: int) -> int:
    """Wake all who wait for the word at ``address``, in any process; return how many; negative if that cannot be."""
    assert _syscall is not None
    return int(_syscall(_FUTEX, address, _WAKE, _EVERYONE, None, None, 0))
