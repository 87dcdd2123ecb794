"""How ranks agree, through the segment alone, to make a call there: the rule, and why it has no race.

Calls are made one after another and numbered alike on all ranks. For call n a rank either *puts up* a slot header, with
a signature of what it calls and its payload beside it, or *passes by* and takes the engine; each chooses for itself (a
large buffer, an asynchronous call, another thread). Both raise its progress to n. A rank that put up its slot header
waits until every other has begun call n, and then

- if all have a slot header for n with its own signature, the call is *met*: it reads their payloads and is done;
- else it goes *elsewhere*: it hands the call to the engine, where that of the others is or will be.

**All decide alike.** A slot header for n never changes after the progress says n, until its owner writes the one of
call n + 2 (below). If somebody passed by, nobody ever sees all headers, and everyone who put one up goes to the engine.
If two signatures differ, everyone sees one that is not its own, and the engine, which compares whole descriptions,
names both calls on every rank. Otherwise everyone meets. A rank that gives up instead (its deadline is over, or a rank
is lost) ends the whole communicator, here and on the others; it writes nothing more, so who met or meets nonetheless
has read what was put up, and no half-written buffer.

**Nothing is read too late.** The payload of call n is used again by call n + 2, and only if every other rank's progress
says that it is done with n (:meth:`Segment.is_free`); otherwise the rank passes by. Nobody's own buffer is ever read by
others, so a call that is over, well or not, has no reader left.

**Nothing is read too early.** Payload, slot header and progress are stored in this order, each word by one aligned
store of eight bytes, and read in the reverse order. x86-64 keeps the order of stores and that of loads (a large copy
that goes around the caches ends with a fence), which is why there is no such segment on other processors.

**Nobody sleeps for ever.** A rank that waits for the progress of another sleeps on that very word, which only its owner
writes, and who wakes its sleepers after the store (:mod:`.futex`). It also looks up every LOOK_S, for a failure that
only its own communication thread can see: a rank that was killed or went silent, an error that another rank told.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Protocol

LOOK_S = 0.05


class Outcome(Enum):
    """How a meeting ends for one rank."""

    MET = "all ranks have put up the same call"
    ELSEWHERE = "some rank makes the call with the engine, or makes another"
    TROUBLED = "a rank is lost, or has failed"
    LATE = "some rank did not come in time"
    UNDER_WAY = "some rank has not come yet, and this one does not wait any longer for now"


class Slots(Protocol):
    """What a barrier sees of a segment."""

    def progress(self, rank: int) -> int:
        """How far a rank is."""

    def has_header(self, rank: int, number: int, signature: int) -> bool:
        """Whether a rank put up this very call."""

    def wait(self, rank: int, seen: int, timeout_s: float) -> None:
        """Sleep until the progress of a rank is no longer ``seen``."""


def meet(
    slots: Slots,
    others: list[int],
    number: int,
    signature: int,
    *,
    deadline_s: float,
    now_s: Callable[[], float],
    is_troubled: Callable[[], bool],
    is_stalled: Callable[[int], bool] = lambda _: False,
    until_s: float = math.inf,
) -> Outcome:
    """Wait for ``others`` in call ``number``, which this rank has put up; ``deadline_s`` by the clock ``now_s``.

    A rank that ``is_stalled`` is late at once. Who is there at ``until_s`` comes again later.
    """
    begun = 2 * number
    for rank in others:
        while (seen := slots.progress(rank)) < begun:
            # A rank that met us may leave at once: what it saw of the others is here before its loss is known.
            if is_troubled() and slots.progress(rank) < begun:
                return Outcome.TROUBLED
            left_s = deadline_s - now_s()
            if left_s <= 0 or is_stalled(rank):
                return Outcome.LATE
            here_s = until_s - now_s()
            if here_s <= 0:
                return Outcome.UNDER_WAY
            slots.wait(rank, seen, min(left_s, here_s, LOOK_S))
        if not slots.has_header(rank, number, signature):
            return Outcome.ELSEWHERE
    return Outcome.MET


def missing(slots: Slots, others: list[int], number: int) -> list[int]:
    """Return the ranks that have not begun call ``number``."""
    return [rank for rank in others if slots.progress(rank) < 2 * number]
