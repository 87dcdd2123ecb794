"""How ranks of one machine come to a segment: all of them, or none.

The memory has no name in any file system (a memfd): the others open it through rank 0's ``/proc/PID/fd``, which the
kernel allows to the same user alone, and it is gone with the last process that has it mapped, however that ends. It is
sealed, so that nobody can shrink it under the others.

All ranks open one segment, or none does: they ask everybody twice, and with the first question goes rank 0's ticket.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import platform
import secrets
import stat
import struct
import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from syncline.runtime.shared_memory.segment import Segment

MAX_RANKS = 16

_TICKET = struct.Struct("<II32s")
TICKET_BYTES = _TICKET.size


def can_share(world_size: int) -> bool:
    """Whether a segment for so many ranks is worth while, and this platform is one on which it was tried."""
    is_tried = sys.platform == "linux" and platform.machine() == "x86_64"
    if not (is_tried and 1 < world_size <= MAX_RANKS):
        return False
    try:
        from syncline.fabric import _native
    except ImportError:
        return False
    return hasattr(_native, "Segment")  # an older one has none


class SegmentFile:
    """The segment's memory as rank 0 makes it; close it when all others have opened it."""

    def __init__(self, world_size: int) -> None:
        from syncline.runtime.shared_memory.segment import segment_bytes

        self._token = secrets.token_bytes(32)
        self._descriptor = os.memfd_create("syncline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self._descriptor, stat.S_IRUSR | stat.S_IWUSR)
            os.ftruncate(self._descriptor, segment_bytes(world_size))
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
    from syncline.runtime.shared_memory.segment import Segment, segment_bytes

    pid, number, token = _TICKET.unpack(ticket)
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size != segment_bytes(world_size):
            raise OSError(f"descriptor {number} of process {pid} is not the segment of {world_size} ranks")
        memory = mmap.mmap(descriptor, found.st_size)
    finally:
        os.close(descriptor)
    if not secrets.compare_digest(memory[: len(token)], token):
        raise OSError(f"descriptor {number} of process {pid} is the segment of another job")
    return Segment(memory, rank=rank, world_size=world_size)


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
