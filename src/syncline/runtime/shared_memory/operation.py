"""What a call means over shared memory: which bytes a rank puts up, and what it makes of those of the others.

Sums are made in the order in which the schedule adds, so that a sum has the same bits on either way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import NamedTuple, TypeAlias

from syncline.runtime.call import CollectiveCall
from syncline.runtime.reduction import Reduction
from syncline.schedule import Collective, Layout, Schedule, Transfer

PAYLOAD_BYTES = 2 << 20
"""What a rank can put up of one call, where there are few ranks."""
Sum: TypeAlias = "int | tuple[Sum, ...]"
"""A rank's contribution, or sums that are added from left to right: ``((0, 1), (2, 3))``."""
Ranges = tuple[tuple[int, int], ...]
"""[start, stop) in bytes of a buffer: disjoint, none of them empty."""
_Key = tuple[int, int, str, str, str, str]
"""All that the ranks must agree on: schedule, layout, and what the numbers are and become."""


def find_sums(schedule: Schedule, *, owned_only: bool) -> list[Sum | None]:
    """Return how each rank comes to its result; None for those whose ranges differ in it, or that have none.

    ``owned_only``: of the ranges that a rank owns, as a reduce-scatter leaves them; else of all. Complexity:
    transfers times the atoms of each.
    """
    found: list[Sum | None] = []
    for rank, values in enumerate(_replay(schedule)):
        atoms = [atom for atom in range(schedule.num_atoms) if not owned_only or rank in schedule.owners[:, atom]]
        sums = {values[atom] for atom in atoms}
        found.append(sums.pop() if len(sums) == 1 else None)
    return found


def steps_of(terms: Sum) -> list[int]:
    """Return how the sum is made: ranks, whose contributions come one after another, and -1, which adds the last two.

    >>> steps_of(((0, 1), (2, 3)))
    [0, 1, -1, 2, 3, -1, -1]
    """
    if isinstance(terms, int):
        return [terms]
    first, *rest = terms
    return [*steps_of(first), *(step for term in rest for step in (*steps_of(term), -1))]


def leads(terms: Sum, own: int) -> bool:
    """Whether the contribution of ``own`` is among the first two that are added, so that it may be where the sum goes.

    >>> leads((0, 1, 2), 1), leads((0, 1, 2), 2)
    (True, False)
    """
    if isinstance(terms, int):
        return terms == own
    first, second = terms[:2]
    return own in (first, second) if isinstance(first, int) else leads(first, own)


def _replay(schedule: Schedule) -> list[list[Sum]]:
    """Return what each rank holds of each atom in the end, step by step as :class:`Schedule` defines it."""
    values: list[list[Sum]] = [[rank] * schedule.num_atoms for rank in range(schedule.num_ranks)]
    for _, rows in groupby(schedule.transfers, key=lambda row: row.step):
        _replay_step(values, list(rows))
    return values


def _replay_step(values: list[list[Sum]], rows: list[Transfer]) -> None:
    """Send what was there before the step; what is added is added in rank order, and the rest replaces."""
    received = [(row, atom, values[row.src][atom]) for row in rows for atom in range(row.first, row.last)]
    added: dict[tuple[int, int], list[tuple[int, Sum]]] = {}
    for row, atom, value in received:
        if row.add:
            added.setdefault((row.dst, atom), [(row.dst, values[row.dst][atom])]).append((row.src, value))
    for (rank, atom), terms in added.items():
        values[rank][atom] = tuple(term for _, term in sorted(terms, key=lambda term: term[0]))
    for row, atom, value in received:
        if not row.add:
            values[row.dst][atom] = value


def add_up(
    terms: Sum, into: memoryview, contribution: Callable[[int], memoryview], reduction: Reduction, *, own: int
) -> None:
    """Make ``into`` the sum; it holds the contribution of rank ``own`` at first, which others can be asked for too.

    A sum within a sum takes a temporary, unless it leads.
    """

    def value(term: Sum) -> memoryview:
        if isinstance(term, int):
            return contribution(term)
        partial = memoryview(bytearray(len(into)))
        add_up(term, partial, contribution, reduction, own=-1)
        return partial

    if isinstance(terms, int):
        if terms != own:
            into[:] = contribution(terms)
        return
    first, second, *rest = terms
    if isinstance(first, int):
        left, right = (into if term == own else value(term) for term in (first, second))
        reduction.add_both(into, left, right)
    else:
        add_up(first, into, contribution, reduction, own=own)
        reduction.add(into, value(second))
    for term in rest:
        reduction.add(into, value(term))


class Operation(NamedTuple):
    """One rank's part in a call. What a rank puts up lies in its payload where it lies in its buffer."""

    rank: int
    sent_bytes: tuple[int, ...]
    """What each rank reads of this one's payload."""
    puts: Ranges = ()
    copies: tuple[tuple[int, int, int], ...] = ()
    """What is copied: of which rank, and which range."""
    terms: Sum | None = None
    """How contributions are added, where they are."""
    sums: Ranges = ()
    """What is added."""

    def received_bytes(self, rank: int) -> int:
        """Return what this rank reads of the payload of another."""
        return _size(self.sums) + sum(stop - start for source, start, stop in self.copies if source == rank)

    def put(self, call: CollectiveCall, payload: memoryview) -> None:
        """Put up what the others will read."""
        for start, stop in self.puts:
            payload[start:stop] = call.buffer[start:stop] if call.own_part is None else call.own_part

    def take(self, buffer: memoryview, payload: Callable[[int], memoryview], reduction: Reduction) -> None:
        """Make the result of what all have put up."""
        for rank, start, stop in self.copies:
            buffer[start:stop] = payload(rank)[start:stop]
        for start, stop in self.sums:
            assert self.terms is not None, "what is added has an order"
            contribution = partial(_part_of, payload, start, stop)
            add_up(self.terms, buffer[start:stop], contribution, reduction, own=self.rank)


def operation_for(call: CollectiveCall, rank: int) -> Operation | None:
    """Return the part of ``rank`` in ``call``; None, for all ranks alike, if it has none in this memory.

    That is where a rank adds in another order from range to range, and where ranges have several owners.
    """
    schedule, num_bytes = call.schedule, call.buffer.nbytes
    num_ranks, collective, whole = schedule.num_ranks, schedule.collective, ((0, num_bytes),)
    if collective is Collective.BROADCAST:
        if rank == schedule.root:
            return Operation(rank=rank, puts=whole, sent_bytes=(num_bytes,) * num_ranks)
        return Operation(rank=rank, copies=((schedule.root, 0, num_bytes),), sent_bytes=(0,) * num_ranks)
    if collective is Collective.ALL_REDUCE:
        sums = find_sums(schedule, owned_only=False)
        everything = Operation(rank=rank, puts=whole, terms=sums[rank], sums=whole, sent_bytes=(num_bytes,) * num_ranks)
        return None if None in sums else everything
    return None if len(schedule.owners) > 1 else _divided(call, rank)


def _divided(call: CollectiveCall, rank: int) -> Operation | None:
    """Return the part of ``rank`` in a reduce-scatter, or in an all-gather, in which each range has one owner."""
    schedule, itemsize = call.schedule, call.reduction.itemsize
    owned = [
        tuple((start * itemsize, stop * itemsize) for start, stop in call.layout.owned_ranges(schedule, owner))
        for owner in range(schedule.num_ranks)
    ]
    of_others = sorted((*part, owner) for owner, parts in enumerate(owned) if owner != rank for part in parts)
    if schedule.collective is Collective.ALL_GATHER:
        copies = tuple((owner, start, stop) for start, stop, owner in of_others)
        sent_bytes = (_size(owned[rank]),) * schedule.num_ranks
        return Operation(rank=rank, puts=owned[rank], copies=copies, sent_bytes=sent_bytes)
    sums = find_sums(schedule, owned_only=True)
    if any(parts and terms is None for parts, terms in zip(owned, sums, strict=True)):
        return None
    puts, terms = tuple((start, stop) for start, stop, _ in of_others), sums[rank]
    if terms is not None and not leads(terms, rank):
        puts += owned[rank]  # what is added comes to lie on it before it is added
    return Operation(rank=rank, puts=puts, terms=terms, sums=owned[rank], sent_bytes=tuple(map(_size, owned)))


def _size(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _part_of(payload: Callable[[int], memoryview], start: int, stop: int, rank: int) -> memoryview:
    return payload(rank)[start:stop]


class Part(NamedTuple):
    """What a rank keeps of a call that it may make again."""

    schedule: Schedule
    layout: Layout
    signature: int
    operation: Operation


class Parts:
    """Prepares calls for the segment, and remembers them."""

    def __init__(self, rank: int, *, payload_bytes: int, max_parts: int = 256) -> None:
        self._rank = rank
        self._payload_bytes = payload_bytes
        self._max_parts = max_parts
        self._parts: dict[_Key, Part] = {}

    def of(self, call: CollectiveCall) -> Part | None:
        """Return this rank's part in ``call``; None if it is not for the segment."""
        if call.buffer.nbytes > self._payload_bytes:
            return None
        reduction = call.reduction
        key = (id(call.schedule), id(call.layout), reduction.dtype, reduction.op, call.op, call.elements)
        known = self._parts.get(key)
        return known if known is not None else self._prepare(key, call)

    def _prepare(self, key: _Key, call: CollectiveCall) -> Part | None:
        operation = operation_for(call, self._rank)
        if operation is None:
            return None
        if len(self._parts) >= self._max_parts:
            self._parts.clear()
        signature = call.describe().signature
        part = Part(schedule=call.schedule, layout=call.layout, signature=signature, operation=operation)
        self._parts[key] = part  # keeping schedule and layout keeps their ids from being used again
        return part
