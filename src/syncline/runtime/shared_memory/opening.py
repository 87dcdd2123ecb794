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
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

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


@contextlib.contextmanager
def segment_file(world_size: int) -> Iterator[bytes]:
    """Make the segment's memory, and return the ticket by which others open it; what is mapped in the end stays."""
    from syncline.runtime.shared_memory.segment import segment_bytes

    token = secrets.token_bytes(32)
    descriptor = os.memfd_create("syncline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, stat.S_IRUSR | stat.S_IWUSR)
        os.ftruncate(descriptor, segment_bytes(world_size))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        os.pwrite(descriptor, token, 0)
        yield _TICKET.pack(os.getpid(), descriptor, token)
    finally:
        os.close(descriptor)


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


def open_together(
    rank: int, world_size: int, *, is_able: bool, sum_bytes: Callable[[bytearray], None]
) -> Segment | None:
    """Return this rank's view of a segment that all ranks have; None, on all of them, if one is not able.

    ``sum_bytes`` sums a few bytes over all ranks. All ranks call it alike. It ends when all have come; where there is
    no segment, it is no more than a barrier.
    """
    with contextlib.ExitStack() as stack:
        told = bytearray(1 + TICKET_BYTES)
        told[0] = is_able and can_share(world_size)
        if rank == 0 and told[0]:
            with contextlib.suppress(OSError):  # no memory, or a sandbox: the ticket that is sent opens nothing
                told[1:] = stack.enter_context(segment_file(world_size))
        sum_bytes(told)
        if told[0] != world_size:
            return None
        segment = None
        with contextlib.suppress(OSError):
            segment = open_segment(bytes(told[1:]), rank=rank, world_size=world_size)
        num_open = bytearray([segment is not None])
        sum_bytes(num_open)
        return segment if num_open[0] == world_size else None
