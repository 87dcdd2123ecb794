"""How all ranks open one segment, or none does: two questions to everybody; with the first goes rank 0's ticket."""

from __future__ import annotations

import contextlib
from typing import Protocol

from syncline.runtime.shared_memory.segment import TICKET_BYTES, Segment, SegmentFile, can_share, open_segment


class Talk(Protocol):
    """What is needed of a communicator."""

    rank: int
    world_size: int

    def sum_bytes(self, numbers: bytearray, *, label: str) -> None:
        """Sum a few bytes over all ranks."""


def open_together(talk: Talk, *, is_able: bool) -> Segment | None:
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
