"""The segment: memory that all ranks of one machine share, with a slot for each; a rank writes into its own alone.

A slot holds a *progress* word, two *headers* and two *payloads*. Calls are numbered from 1; call n uses slot header and
payload n mod 2. The words only rise:

- progress is 2n once call n has begun, over shared memory or past it, and 2n + 1 once this rank reads nothing of it any
  more;
- a slot header names the call that it is for and the call's signature, and is written before the progress.

Compiled code reads and writes the words (``fabric/native/segment.hpp``), and waits for them. Behind the slots lies what
messages from one rank to another pass through (``fabric/native/inboxes.hpp``).
"""

from __future__ import annotations

import mmap
import os

from syncline.fabric import _native
from syncline.runtime.reduction import Reduction
from syncline.runtime.shared_memory.operation import PAYLOAD_BYTES, Sum, steps_of

PAGE_BYTES = 4096
MOST_BYTES = 64 << 20
"""Of all payloads. Pages that no call has used cost nothing."""
SPIN_S = 50e-6
"""How long a thread looks for the others before it sleeps: about what it takes to be woken."""


class Segment(_native.Segment):
    """One rank's mapping of the segment. ``memory`` begins with the token that its ticket names."""

    def __init__(self, memory: mmap.mmap, *, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.payload_bytes = payload_bytes(world_size)
        memory.madvise(mmap.MADV_DONTFORK)
        self._view = memoryview(memory)
        whose = {"rank": rank, "num_ranks": world_size}
        super().__init__(self._view, **whose, payload_bytes=self.payload_bytes, spin_s=SPIN_S)
        # A message has one receiver: where ranks share cores, its sender may need that one's.
        spin_s = SPIN_S if world_size <= len(os.sched_getaffinity(0)) else 0.0
        self.inboxes = _native.Inboxes(self._view[_inboxes_start(world_size) :], **whose, spin_s=spin_s)
        starts = [PAGE_BYTES + place * _slot_bytes(world_size) for place in range(world_size)]
        self._payloads = [
            tuple(self._view[start + PAGE_BYTES + half * self.payload_bytes :][: self.payload_bytes] for half in (0, 1))
            for start in starts
        ]

    def __repr__(self) -> str:
        progress = ", ".join(f"{self.progress(rank) / 2:g}" for rank in range(self.world_size))
        return f"<Segment of {self.world_size} ranks at {progress}, seen by rank {self.rank}>"

    def payload(self, rank: int, number: int) -> memoryview:
        """Return where ``rank`` puts up what it has to say in call ``number``."""
        return self._payloads[rank][number & 1]

    def order_of(self, reduction: Reduction, terms: Sum) -> _native.SumOrder:
        """Return how compiled code adds all contributions."""
        return _native.SumOrder(reduction.dtype, reduction.op, steps_of(terms), self.world_size)


def payload_bytes(world_size: int) -> int:
    """Return the size of a payload."""
    return min(PAYLOAD_BYTES, MOST_BYTES // (2 * world_size) // PAGE_BYTES * PAGE_BYTES)


def segment_bytes(world_size: int) -> int:
    """Return the size of all of it."""
    return _inboxes_start(world_size) + _native.Inboxes.size_bytes(world_size)


def _slot_bytes(world_size: int) -> int:
    return PAGE_BYTES + 2 * payload_bytes(world_size)


def _inboxes_start(world_size: int) -> int:
    return PAGE_BYTES + world_size * _slot_bytes(world_size)
