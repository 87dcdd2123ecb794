"""How all ranks open one segment, or none does: two questions to everybody, and a ticket from rank 0 in between."""

from __future__ import annotations

import contextlib
from typing import Protocol

from syncline.runtime.reduction import Reduction, numpy_reduction
from syncline.runtime.shared_memory.segment import TICKET_BYTES, Segment, SegmentFile, can_share, open_segment
from syncline.runtime.work import Work


class Talk(Protocol):
    """What is needed of a communicator."""

    rank: int
    world_size: int

    def all_reduce(self, buffer: memoryview, reduction: Reduction, *, label: str) -> Work:
        """Sum a buffer over all ranks."""

    def broadcast(self, buffer: memoryview, *, label: str) -> Work:
        """Give everyone what rank 0 has."""


def open_together(talk: Talk, *, is_able: bool) -> Segment | None:
    """Return this rank's view of a segment that all ranks have; None, on all of them, if one is not able.

    All ranks call it alike. It ends when all have come; where there is no segment, it is no more than a barrier.
    """
    if not _agree(talk, is_able=is_able and can_share(talk.world_size)):
        return None
    with contextlib.ExitStack() as stack:
        ticket = bytearray(TICKET_BYTES)
        segment = None
        if talk.rank == 0:
            with contextlib.suppress(OSError):  # no memory, or a sandbox: the ticket that is sent opens nothing
                file = SegmentFile(talk.world_size)
                stack.callback(file.close)
                ticket[:] = file.ticket
        talk.broadcast(memoryview(ticket), label="segment").wait()
        with contextlib.suppress(OSError):
            segment = open_segment(bytes(ticket), rank=talk.rank, world_size=talk.world_size)
        return segment if _agree(talk, is_able=segment is not None) else None


def _agree(talk: Talk, *, is_able: bool) -> bool:
    count = bytearray([is_able])
    talk.all_reduce(memoryview(count), numpy_reduction("uint8"), label="segment").wait()
    return count[0] == talk.world_size
