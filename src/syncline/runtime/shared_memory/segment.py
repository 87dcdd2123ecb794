"""The segment: memory that all ranks of one machine share, with a slot for each; a rank writes into its own alone.

A slot holds a *progress* word, two *headers* and two *payloads*. Calls are numbered from 1; call n uses slot header and
payload n mod 2. The words only rise:

- progress is 2n once call n has begun, over shared memory or past it, and 2n + 1 once this rank reads nothing of it any
  more;
- a slot header names the call that it is for and the call's signature, and is written before the progress.

The memory has no name in any file system (a memfd): the others open it through rank 0's ``/proc/PID/fd``, which the
kernel allows to the same user alone, and it is gone with the last process that has it mapped, however that ends. It is
sealed, so that nobody can shrink it under the others.

All ranks open one segment, or none does: they ask everybody twice, and with the first question goes rank 0's ticket.

Who waits for a word there sleeps by the kernel's futex, called directly. The kernel compares the word with what the
caller has seen before it lets the caller sleep, and does so under the lock that a waker takes too; so whoever stores
first and wakes then is never missed. Calls release the interpreter's lock. That is only for Linux on x86-64: elsewhere
the number of the system call is another, and stores may be seen in another order than they were made, which Python
offers no fence against.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import secrets
import stat
import struct
import sys
from typing import Protocol

import numpy as np

PAYLOAD_BYTES = 2 << 20
"""What one call can put up, where there are few ranks."""
MOST_BYTES = 64 << 20
"""Of a whole segment. Pages that no call has used cost nothing."""
MAX_RANKS = 16

_TICKET = struct.Struct("<II32s")
TICKET_BYTES = _TICKET.size
_PAGE = 4096
_CARDS = (64, 128)
"""Where a slot's headers begin; each is a number and a signature."""


class Segment:
    """One rank's mapping of the segment. ``memory`` begins with the token that its ticket names."""

    def __init__(self, memory: mmap.mmap, *, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.payload_bytes = payload_bytes(world_size)
        slot_bytes = _slot_bytes(world_size)
        starts = [_PAGE + place * slot_bytes for place in range(world_size)]
        memory.madvise(mmap.MADV_DONTFORK)
        self._view = memoryview(memory)
        self._words = self._view.cast("Q")
        base = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
        self._addresses = [base + start for start in starts]
        self._progress = [start // 8 for start in starts]
        self._headers = [tuple((start + header) // 8 for header in _CARDS) for start in starts]
        self._payloads = [
            tuple(self._view[start + _PAGE + half * self.payload_bytes :][: self.payload_bytes] for half in range(2))
            for start in starts
        ]
        self._others = [place for place in range(world_size) if place != rank]
        self._last_numbers = [0, 0]

    def __repr__(self) -> str:
        progress = ", ".join(f"{self.progress(rank) / 2:g}" for rank in range(self.world_size))
        return f"<Segment of {self.world_size} ranks at {progress}, seen by rank {self.rank}>"

    def progress(self, rank: int) -> int:
        """Return how far ``rank`` is: 2n when it has begun call n, 2n + 1 when it is done with it."""
        return self._words[self._progress[rank]]

    def has_header(self, rank: int, number: int, signature: int) -> bool:
        """Whether ``rank``, which has begun call ``number``, put it up here, with this signature."""
        header = self._headers[rank][number & 1]
        return self._words[header] == number and self._words[header + 1] == signature

    def payload(self, rank: int, number: int) -> memoryview:
        """Return where ``rank`` puts up what it has to say in call ``number``."""
        return self._payloads[rank][number & 1]

    def is_free(self, number: int) -> bool:
        """Whether nobody reads any more what this rank put up where call ``number`` would be."""
        last = self._last_numbers[number & 1]
        return all(self.progress(rank) > 2 * last for rank in self._others) if last else True

    def put_up(self, number: int, signature: int) -> None:
        """Tell everyone that this rank has begun call ``number``, and that its payload is there."""
        header = self._headers[self.rank][number & 1]
        self._last_numbers[number & 1] = number
        self._words[header + 1] = signature
        self._words[header] = number
        self._advance(2 * number)

    def pass_by(self, number: int) -> None:
        """Tell everyone that this rank makes call ``number`` elsewhere."""
        self._advance(2 * number + 1)

    def finish(self, number: int) -> None:
        """Tell everyone, without haste, that this rank reads nothing more of call ``number``."""
        self._words[self._progress[self.rank]] = 2 * number + 1

    def wait(self, rank: int, seen: int, timeout_s: float) -> None:
        """Sleep until the progress of ``rank`` is no longer ``seen``, at most ``timeout_s``, or for no reason."""
        _futex_wait(self._addresses[rank], seen, timeout_s)

    def _advance(self, progress: int) -> None:
        self._words[self._progress[self.rank]] = progress
        _futex_wake(self._addresses[self.rank])


def can_share(world_size: int) -> bool:
    """Whether a segment for so many ranks is worth while, and this platform has what it needs."""
    return 1 < world_size <= MAX_RANKS and hasattr(os, "memfd_create") and has_futex()


def payload_bytes(world_size: int) -> int:
    """Return the size of a payload."""
    return min(PAYLOAD_BYTES, MOST_BYTES // (2 * world_size) // _PAGE * _PAGE)


class SegmentFile:
    """The segment's memory as rank 0 makes it; close it when all others have opened it."""

    def __init__(self, world_size: int) -> None:
        self._token = secrets.token_bytes(32)
        self._descriptor = os.memfd_create("syncline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self._descriptor, stat.S_IRUSR | stat.S_IWUSR)
            os.ftruncate(self._descriptor, _segment_bytes(world_size))
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)
            os.pwrite(self._descriptor, self._token, 0)
        except OSError:
            self.close()
            raise

    @property
    def ticket(self) -> bytes:
        """What another rank needs to open it, and to know that it is this one."""
        return _TICKET.pack(os.getpid(), self._descriptor, self._token)

    def close(self) -> None:
        """Let go of the file; what is mapped stays."""
        os.close(self._descriptor)


def open_segment(ticket: bytes, *, rank: int, world_size: int) -> Segment:
    """Map the segment that ``ticket`` names; OSError says why that cannot be."""
    pid, number, token = _TICKET.unpack(ticket)
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size != _segment_bytes(world_size):
            raise OSError(f"descriptor {number} of process {pid} is not the segment of {world_size} ranks")
        memory = mmap.mmap(descriptor, found.st_size)
    finally:
        os.close(descriptor)
    if not secrets.compare_digest(memory[: len(token)], token):
        raise OSError(f"descriptor {number} of process {pid} is the segment of another job")
    return Segment(memory, rank=rank, world_size=world_size)


def _slot_bytes(world_size: int) -> int:
    return _PAGE + 2 * payload_bytes(world_size)


def _segment_bytes(world_size: int) -> int:
    return _PAGE + world_size * _slot_bytes(world_size)


class _Talk(Protocol):
    """What is needed of a communicator."""

    rank: int
    world_size: int

    def sum_bytes(self, numbers: bytearray, *, label: str) -> None:
        """Sum a few bytes over all ranks."""


def open_together(talk: _Talk, *, is_able: bool) -> Segment | None:
    """Return this rank's view of a segment that all ranks have; None, on all of them, if one is not able.

    All ranks call it alike. It ends when all have come; where there is no segment, it is no more than a barrier.
    """
    with contextlib.ExitStack() as stack:
        told = bytearray(1 + TICKET_BYTES)
        told[0] = is_able and can_share(talk.world_size)
        if talk.rank == 0 and told[0]:
            with contextlib.suppress(OSError):  # no memory, or a sandbox: the ticket that is sent opens nothing
                file = SegmentFile(talk.world_size)
                stack.callback(file.close)
                told[1:] = file.ticket
        talk.sum_bytes(told, label="segment")
        if told[0] != talk.world_size:
            return None
        segment = None
        with contextlib.suppress(OSError):
            segment = open_segment(bytes(told[1:]), rank=talk.rank, world_size=talk.world_size)
        num_open = bytearray([segment is not None])
        talk.sum_bytes(num_open, label="segment")
        return segment if num_open[0] == talk.world_size else None


_FUTEX = 202
_WAIT, _WAKE = 0, 1
_EVERYONE = 0x7FFFFFFF
_LOW_HALF = 0xFFFFFFFF


def has_futex() -> bool:
    """Whether this platform is one that the calls below are written for."""
    is_known = sys.platform == "linux" and platform.machine() == "x86_64" and ctypes.sizeof(ctypes.c_void_p) == 8
    return is_known and _futex_wake(ctypes.addressof(ctypes.c_uint64(0))) == 0


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


def _futex_wait(address: int, seen: int, timeout_s: float) -> None:
    """Sleep until the 8-byte word at ``address`` is no longer ``seen`` or someone wakes, at most ``timeout_s``.

    It may return for no reason: look again. Only the lower half is compared.
    """
    assert _syscall is not None
    seconds = int(timeout_s)
    limit = (ctypes.c_int64 * 2)(seconds, int((timeout_s - seconds) * 1e9))
    _syscall(_FUTEX, address, _WAIT, seen & _LOW_HALF, ctypes.addressof(limit), None, 0)


def _futex_wake(address: int) -> int:
    """Wake all who wait for the word at ``address``, in any process; return how many; negative if that cannot be."""
    assert _syscall is not None
    return int(_syscall(_FUTEX, address, _WAKE, _EVERYONE, None, None, 0))
