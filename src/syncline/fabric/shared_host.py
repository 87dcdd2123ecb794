"""Ranks on one machine: they read each other's memory, and each has its own cores for its communication thread.

The receiver copies a message straight out of the sender's memory, with one system call.

A loopback socket copies each byte twice and runs the whole TCP stack for it. ``process_vm_readv`` (Linux, "cross
memory attach", as MPI libraries use it) copies once, from the sender's buffer into the destination. The announcement of
a message then carries its address, the grant becomes the copy itself, and one frame tells the sender that it is done;
order by urgency, signatures and the posted destination stay as they are.

Whether two ranks share a machine is proved, not assumed: both ends of the control connection have the same address (so
ranks in different network namespaces, as in the lab, go through their network), and each reads a random token out of
the other's memory. Where the kernel refuses that (another user, a container without the right, Yama), sockets are used.

An offer names a process, and whoever accepts it copies from addresses that the peer chooses. So a token is sealed for
one direction between two ranks of one start of the job, and this process's own memory is read only where another rank
that lives in it has made the offer: no peer can hand this rank's own offer back, or name this rank's own threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import os
import secrets
import struct
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from syncline.fabric.frames import FrameError

NONCE_BYTES = 16
TOKEN_BYTES = 32
_OFFER = struct.Struct("!IQ32s")
OFFER_BYTES = _OFFER.size
_NOWHERE = 8
"""An address at which nothing lies."""


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


def has_ended(pid: int) -> bool:
    """Whether process ``pid``, whose memory could be read once, is known to have ended.

    The kernel lets go of a process's memory before it closes its sockets.
    """
    try:
        read_memory(pid, _NOWHERE, memoryview(bytearray(1)))
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


class Offer:
    """A token in this process's memory that one peer may read, to prove that it can."""

    def __init__(self, token: bytes) -> None:
        self._token = np.frombuffer(token, dtype=np.uint8).copy()
        _own_offers[self.address] = self

    @property
    def address(self) -> int:
        """Where the token lies."""
        return int(self._token.ctypes.data)

    @property
    def token(self) -> bytes:
        """The token itself."""
        return self._token.tobytes()

    def encode(self) -> bytes:
        """Return what the peer needs to find the token, and to know it again."""
        return _OFFER.pack(os.getpid(), self.address, self.token)


_own_offers: WeakValueDictionary[int, Offer] = WeakValueDictionary()
"""The offers of all ranks that live in this process, by their addresses."""


class MemoryOffers(NamedTuple):
    """By what one rank makes offers, and judges those of others; ``key`` comes from the job's handshake."""

    rank: int
    key: bytes

    def make(self, *, target: int) -> Offer:
        """Make the offer for rank ``target``, which holds as long as it is kept."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return Offer(nonce + self._seal(nonce, self.rank, target))

    def accept(self, payload: bytes, *, source: int) -> int | None:
        """Return the process id of rank ``source``, whose offer this is, if its memory can be read, else None.

        Raises ``FrameError`` if ``source`` has not made this offer for this rank.
        """
        pid, address, token = _OFFER.unpack(payload) if len(payload) == OFFER_BYTES else (0, 0, b"")
        nonce = token[:NONCE_BYTES]
        if not secrets.compare_digest(token[NONCE_BYTES:], self._seal(nonce, source, self.rank)):
            raise FrameError(f"it offers memory by a token that rank {source} has not made for rank {self.rank}")
        if is_this_process(pid):
            # Or, in a container of its own, the peer has the same number: then sockets are used, as everywhere else.
            own = _own_offers.get(address)
            if pid != os.getpid() or own is None or own.token != token:
                return None
        found = bytearray(TOKEN_BYTES)
        try:
            read_memory(pid, address, memoryview(found))
        except (OSError, ctypes.ArgumentError):
            return None
        return pid if secrets.compare_digest(bytes(found), token) else None

    def _seal(self, nonce: bytes, source: int, target: int) -> bytes:
        direction = struct.pack("!II", source, target)
        return hmac.digest(self.key, direction + nonce, "sha256")[: TOKEN_BYTES - NONCE_BYTES]


def is_this_process(pid: int) -> bool:
    """Whether ``pid`` is this process or one of its threads, whose ids the kernel takes as well."""
    return pid == os.getpid() or Path(f"/proc/self/task/{pid}").exists()


def divide_cores(cores: Iterable[int], *, place: int, num_places: int) -> frozenset[int]:
    """Return the share of ``place``: even runs of neighbouring cores; where there are too few, one, taken in turns."""
    ordered = sorted(cores)
    if num_places >= len(ordered):
        return frozenset(ordered[place % len(ordered) : place % len(ordered) + 1])
    start, stop = (edge * len(ordered) // num_places for edge in (place, place + 1))
    return frozenset(ordered[start:stop])


def unrestricted_cores() -> frozenset[int]:
    """Return the cores of this process; none if someone has restricted it already, or the platform cannot bind."""
    if not hasattr(os, "sched_getaffinity"):
        return frozenset()
    cores = frozenset(os.sched_getaffinity(os.getpid()))  # of the main thread, whatever this one is bound to
    return cores if len(cores) == os.cpu_count() else frozenset()


def bind_thread(rank: int, others: Iterable[int]) -> None:
    """Bind the calling thread to its rank's share of the machine's cores, on which the ``others`` run too.

    A kernel that wakes a thread tends to put it on the core of the thread that woke it, as the two seem to work
    together. Communication threads of one machine wake each other all the time, and so end up on one core, each waiting
    for the other to leave it, while another core is free. MPI launchers bind processes for that reason; this binds one
    thread only, and leaves those that compute where the kernel puts them.

    A main thread is the program's own, and is left alone.
    """
    if threading.current_thread() is threading.main_thread():
        return
    with contextlib.suppress(OSError):  # a core went away, or a sandbox refuses: nothing depends on it
        ranks = sorted({rank, *others})
        if cores := unrestricted_cores():
            os.sched_setaffinity(0, divide_cores(cores, place=ranks.index(rank), num_places=len(ranks)))
