"""What one rank does with one slice, as operations and what each of them waits for.

A schedule speaks in steps; waiting for whole steps would leave links idle. What must really be kept is the order of
those accesses to the buffer that touch the same range, so that is what is compiled here, once per schedule:

- a *send* reads its range: it waits for the last writers of that range in earlier steps;
- an *apply* writes a range with what has landed in temporaries (adds it, in the order of the sources' ranks, with the
  own value at its own place): it waits for the earlier writers and for the earlier sends that still read the range;
- a *copy* lets a message land directly in the buffer: its receive may be posted only when no earlier access is left;
- a *landing* lets a message land in a temporary: it waits for nothing, so it is posted as soon as the slice starts.

A copy whose range is also accessed by an operation of its *own* step takes the way of a landing and an apply. Otherwise
two ranks that swap a range could wait for each other: each send ends only when the peer's receive is posted. With this
rule the sends of a step depend on earlier steps alone, so by induction every step ends on every rank.

Complexity: one numpy comparison over the accesses of the rank for each of its operations.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from syncline.fabric.slice_executor import Dataflow, Kind, Operation, Slices
from syncline.schedule import Layout, Phase, Receive, Schedule, Send

# The dataflows of one rank, compiled when they are first needed and remembered.
#
# A slice may cover a window of the schedule's atoms only (:meth:`syncline.schedule.Layout.contiguous`); then most of
# the schedule's transfers are empty. So dataflows are compiled for windows, and an operation never moves nothing
# because its range lies outside.


MOST_KEPT = 4096
"""Dataflows, and layouts."""


class ProgramFacts(NamedTuple):
    """What the engine must know of a rank's program before it runs."""

    peers: frozenset[int]
    num_indices: int
    """One more than the largest number of a message."""


class Dataflows:
    """Compiles and remembers."""

    def __init__(self, rank: int) -> None:
        self.facts = lru_cache(MOST_KEPT)(partial(_facts, rank))
        """The facts of this rank's program in a schedule."""
        of_window = lru_cache(MOST_KEPT)(partial(_compile_window, rank))
        self.slices = lru_cache(MOST_KEPT)(partial(_slices, of_window))
        """What this rank does with each slice of a schedule's layout: the same object, as long as it is remembered."""


def _facts(rank: int, schedule: Schedule) -> ProgramFacts:
    program = schedule.program(rank)
    messages = [(message.peer, message.index) for phase in program for message in phase.sends + phase.receives]
    return ProgramFacts(
        peers=frozenset(peer for peer, _ in messages),
        num_indices=max((index for _, index in messages), default=-1) + 1,
    )


def _slices(of_window: Callable[[Schedule, int, int], Dataflow], schedule: Schedule, layout: Layout) -> Slices:
    def dataflow(offsets: Sequence[int]) -> Dataflow:
        return of_window(schedule, bisect_right(offsets, offsets[0]) - 1, bisect_left(offsets, offsets[-1]))

    return tuple((dataflow(offsets), offsets) for offsets in layout.slices)


def _compile_window(rank: int, schedule: Schedule, first: int, last: int) -> Dataflow:
    return compile_dataflow(schedule.program(rank), rank=rank, num_atoms=schedule.num_atoms, window=(first, last))


T = TypeVar("T", Send, Receive)


def compile_dataflow(
    program: Sequence[Phase], *, rank: int, num_atoms: int, window: tuple[int, int] | None = None
) -> Dataflow:
    """Compile what ``rank`` does with the atoms of ``window``, of ``num_atoms`` in all (None: with all of them)."""
    compiler = _Compiler(rank, num_atoms)
    for phase in program:
        compiler.add_phase(phase if window is None else _clip(phase, *window))
    return compiler.finish()


def _clip(phase: Phase, first: int, last: int) -> Phase:
    def clip(message: T) -> T:
        return message._replace(first=max(message.first, first), last=min(message.last, last))

    return Phase(
        step=phase.step,
        sends=tuple(clip(send) for send in phase.sends if send.first < last and send.last > first),
        receives=tuple(clip(receive) for receive in phase.receives if receive.first < last and receive.last > first),
    )


class _Compiler:
    def __init__(self, rank: int, num_atoms: int) -> None:
        self._rank = rank
        self._operations: list[dict[str, object]] = []
        self._waits: list[set[int]] = []
        self._last_writer = np.full(num_atoms, -1, np.int64)
        self._reads: list[tuple[int, int, int]] = []
        """Operations that read, and which range: [first, last)."""

    def add_phase(self, phase: Phase) -> None:
        phase_start = len(self._operations)
        for send in phase.sends:
            self._add_send(send)
        self._add_sums([receive for receive in phase.receives if receive.add])
        for receive in phase.receives:
            if not receive.add:
                self._add_copy(receive, phase_start)

    def finish(self) -> Dataflow:
        then: list[list[int]] = [[] for _ in self._operations]
        for waiting, waits in enumerate(self._waits):
            for operation in waits:
                then[operation].append(waiting)
        operations = tuple(
            Operation(**fields, then=tuple(then[i]))  # type: ignore[arg-type]
            for i, fields in enumerate(self._operations)
        )
        ready = [i for i, waits in enumerate(self._waits) if not waits]
        return Dataflow(
            operations=operations,
            num_waits=tuple(len(waits) for waits in self._waits),
            first=tuple(sorted(ready, key=lambda i: (operations[i].kind == Kind.SEND, i))),
        )

    def _add(self, waits: set[int], **fields: object) -> int:
        self._operations.append(fields)
        self._waits.append(waits)
        return len(self._operations) - 1

    def _add_send(self, send: Send) -> None:
        operation = self._add(
            self._writers(send.first, send.last), kind=Kind.SEND, **_range(send), peer=send.peer, index=send.index
        )
        self._reads.append((operation, send.first, send.last))

    def _add_sums(self, receives: Sequence[Receive]) -> None:
        """Cut at every breakpoint, so that each apply has the same contributions over its whole range."""
        landings = {self._add_landing(receive): receive for receive in receives}
        breakpoints = sorted({edge for receive in receives for edge in (receive.first, receive.last)})
        for first, last in pairwise(breakpoints):
            used = [
                (receive.peer, receive.index, landing)
                for landing, receive in landings.items()
                if receive.first <= first and last <= receive.last
            ]
            if used:
                used.sort()
                before = tuple(landing for peer, _, landing in used if peer < self._rank)
                after = tuple(landing for peer, _, landing in used if peer > self._rank)
                self._add_apply(first, last, before=before, after=after)

    def _add_copy(self, receive: Receive, phase_start: int) -> None:
        waits = self._accessors(receive.first, receive.last)
        if waits and max(waits) >= phase_start:
            landing = self._add_landing(receive)
            self._add_apply(receive.first, receive.last, after=(landing,), replaces=True)
            return
        operation = self._add(waits, kind=Kind.COPY, **_range(receive), peer=receive.peer, index=receive.index)
        self._wrote(operation, receive.first, receive.last)

    def _add_landing(self, receive: Receive) -> int:
        return self._add(set(), kind=Kind.LAND, **_range(receive), peer=receive.peer, index=receive.index)

    def _add_apply(
        self,
        first: int,
        last: int,
        *,
        before: tuple[int, ...] = (),
        after: tuple[int, ...] = (),
        replaces: bool = False,
    ) -> None:
        operation = self._add(
            self._accessors(first, last),
            kind=Kind.APPLY,
            first=first,
            last=last,
            before=before,
            after=after,
            replaces=replaces,
        )
        for landing in before + after:
            fields = self._operations[landing]
            fields["applies"] = (*_indices(fields.get("applies", ())), operation)
        self._wrote(operation, first, last)

    def _writers(self, first: int, last: int) -> set[int]:
        return set(self._last_writer[first:last].tolist()) - {-1}

    def _accessors(self, first: int, last: int) -> set[int]:
        readers = {reader for reader, start, stop in self._reads if start < last and stop > first}
        return self._writers(first, last) | readers

    def _wrote(self, operation: int, first: int, last: int) -> None:
        self._last_writer[first:last] = operation
        # Who waits for this writer waits for those that it waits for.
        self._reads = [read for read in self._reads if read[1] < first or read[2] > last]


def _range(message: Send | Receive) -> dict[str, int]:
    return {"first": message.first, "last": message.last}


def _indices(value: object) -> Iterable[int]:
    assert isinstance(value, tuple)
    return value
