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

from syncline.fabric.slice_executor import Dataflow, Slices
from syncline.runtime.dataflow import compile_dataflow
from syncline.schedule import Layout, RankProgram, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFacts:
    """What the engine must know of a rank's program before it runs."""

    peers: frozenset[int]
    num_indices: int
    """One more than the largest number of a message."""


class Dataflows:
    """Compiles and remembers; ``max_kept`` dataflows and layouts at most."""

    def __init__(self, rank: int, max_kept: int = 4096) -> None:
        self._rank = rank
        self._max_kept = max_kept
        self._facts: OrderedDict[str, ProgramFacts] = OrderedDict()
        self._dataflows: OrderedDict[tuple[str, int, int], Dataflow] = OrderedDict()
        self._slices: OrderedDict[tuple[str, int], tuple[Layout, Slices]] = OrderedDict()

    def facts(self, schedule: Schedule) -> ProgramFacts:
        """Return the facts of this rank's program."""
        facts = self._facts.get(schedule.digest)
        if facts is None:
            facts = _facts(schedule.program(self._rank))
            self._facts[schedule.digest] = facts
            if len(self._facts) > self._max_kept:
                self._facts.popitem(last=False)
        return facts

    def slices(self, schedule: Schedule, layout: Layout) -> Slices:
        """Return what this rank does with each slice of ``layout``: the same object, as long as it is remembered."""
        key = (schedule.digest, id(layout))
        known = self._slices.get(key)
        if known is None:
            known = layout, tuple((self._of_slice(schedule, offsets), offsets) for offsets in layout.slices)
            self._slices[key] = known  # keeping the layout keeps its id from being used again
            if len(self._slices) > self._max_kept:
                self._slices.popitem(last=False)
        return known[1]

    def _of_slice(self, schedule: Schedule, offsets: Sequence[int]) -> Dataflow:
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
