"""Ranks on one machine: the receiver copies a message straight out of the sender's memory, with one system call.

A loopback socket copies each byte twice and runs the whole TCP stack for it. ``process_vm_readv`` (Linux, "cross
memory attach", as MPI libraries use it) copies once, from the sender's buffer into the destination. The announcement of
a message then carries its address, the grant becomes the copy itself, and one frame tells the sender that it is done;
order by urgency, signatures and the posted destination stay as they are.

Whether two ranks share a machine is proved, not assumed: both ends of the control connection have the same address (so
ranks in different network namespaces, as in the lab, go through their network), and each reads a random token out of
the other's memory. Where the kernel refuses that (another user, a container without the right, Yama), sockets are used.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import struct

import numpy as np

TOKEN_BYTES = 32
_OFFER = struct.Struct("!IQ32s")
OFFER_BYTES = _OFFER.size


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _load() -> ctypes._NamedFuncPointer | None:
    """Return the C library's function; None where there is none (musl before 1.2, not Linux)."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if function is not None:
        function.restype = ctypes.c_ssize_t
        function.argtypes = (
            ctypes.c_int,
            ctypes.POINTER(_IoVec),
            ctypes.c_ulong,
            ctypes.POINTER(_IoVec),
            ctypes.c_ulong,
            ctypes.c_ulong,
        )
    return function


_process_vm_readv = _load()


def address_of(view: memoryview) -> int:
    """Return where the bytes of ``view`` (C-contiguous, not empty) lie in this process."""
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def read_memory(pid: int, address: int, destination: memoryview) -> None:
    """Copy ``destination.nbytes`` bytes at ``address`` of process ``pid``; OSError says why that cannot be.

    The interpreter's lock is released while the kernel copies.
    """
    if _process_vm_readv is None:
        raise OSError("the C library has no process_vm_readv")
    base, length = address_of(destination), destination.nbytes
    done = 0
    while done < length:
        local = _IoVec(base + done, length - done)
        remote = _IoVec(address + done, length - done)
        copied = _process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if copied <= 0:
            error = ctypes.get_errno()
            raise OSError(error, f"reading the memory of process {pid}: {os.strerror(error)}")
        done += copied


class Offer:
    """A token in this process's memory that a peer may read, to prove that it can."""

    def __init__(self) -> None:
        self._token = np.frombuffer(secrets.token_bytes(TOKEN_BYTES), dtype=np.uint8).copy()

    def encode(self) -> bytes:
        """Return what the peer needs to find the token, and to know it again."""
        return _OFFER.pack(os.getpid(), self._token.ctypes.data, self._token.tobytes())


def accept_offer(payload: bytes) -> int | None:
    """Return the process id of the peer that made the offer if its memory can be read, else None."""
    if len(payload) != OFFER_BYTES:
        return None
    pid, address, token = _OFFER.unpack(payload)
    found = bytearray(TOKEN_BYTES)
    try:
        read_memory(pid, address, memoryview(found))
    except (OSError, ctypes.ArgumentError):
        return None
    return pid if secrets.compare_digest(bytes(found), token) else None
