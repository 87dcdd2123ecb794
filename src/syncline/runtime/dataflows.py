"""The dataflows of one rank, compiled when they are first needed and remembered.

A slice may cover a window of the schedule's atoms only (:meth:`syncline.schedule.Layout.contiguous`); then most of the
schedule's transfers are empty. So dataflows are compiled for windows, and an operation never moves nothing because its
range lies outside.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from syncline.runtime.dataflow import Dataflow, compile_dataflow
from syncline.schedule import RankProgram, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFacts:
    """What the engine must know of a rank's program before it runs."""

    peers: frozenset[int]
    num_indices: int
    """One more than the largest number of a message."""


class Dataflows:
    """Compiles and remembers; ``max_kept`` dataflows at most."""

    def __init__(self, rank: int, max_kept: int = 4096) -> None:
        self._rank = rank
        self._max_kept = max_kept
        self._facts: OrderedDict[str, ProgramFacts] = OrderedDict()
        self._dataflows: OrderedDict[tuple[str, int, int], Dataflow] = OrderedDict()

    def facts(self, schedule: Schedule) -> ProgramFacts:
        """Return the facts of this rank's program."""
        facts = self._facts.get(schedule.digest)
        if facts is None:
            facts = _facts(schedule.program(self._rank))
            self._facts[schedule.digest] = facts
            if len(self._facts) > self._max_kept:
                self._facts.popitem(last=False)
        return facts

    def of_slice(self, schedule: Schedule, offsets: Sequence[int]) -> Dataflow:
        """Return what this rank does with a slice whose atoms lie at ``offsets``."""
        first = bisect_right(offsets, offsets[0]) - 1
        last = bisect_left(offsets, offsets[-1])
        key = (schedule.digest, first, last)
        dataflow = self._dataflows.get(key)
        if dataflow is None:
            dataflow = compile_dataflow(
                schedule.program(self._rank), rank=self._rank, num_atoms=schedule.num_atoms, window=(first, last)
            )
            self._dataflows[key] = dataflow
            if len(self._dataflows) > self._max_kept:
                self._dataflows.popitem(last=False)
        return dataflow


def _facts(program: RankProgram) -> ProgramFacts:
    sent = [(send.peer, send.index) for phase in program.phases for send in phase.sends]
    received = [(receive.peer, receive.index) for phase in program.phases for receive in phase.receives]
    messages = sent + received
    return ProgramFacts(
        peers=frozenset(peer for peer, _ in messages),
        num_indices=max((index for _, index in messages), default=-1) + 1,
    )
