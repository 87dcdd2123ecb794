"""What a call means over shared memory: which bytes a rank puts up, and what it makes of those of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from syncline.runtime.call import CollectiveCall, Describer
from syncline.runtime.reduction import Reduction
from syncline.runtime.shared_memory.sums import Sum, add_up, find_sum
from syncline.schedule import Collective, Layout, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One rank's part in a call; ranges are [start, stop) in bytes of its buffer."""

    rank: int
    put_range: tuple[int, int]
    copies: tuple[tuple[int, int, int], ...] = ()
    """What is copied: from which rank's payload, from its beginning, to which range."""
    terms: Sum | None = None
    """How contributions are added, where they are."""
    sum_range: tuple[int, int] = (0, 0)
    sent_bytes: tuple[int, ...]
    """What each rank reads of this one's payload."""

    def received_bytes(self, rank: int) -> int:
        """Return what this rank reads of the payload of another."""
        copied = sum(stop - start for source, start, stop in self.copies if source == rank)
        return copied + self.sum_range[1] - self.sum_range[0]

    def put(self, call: CollectiveCall, payload: memoryview) -> None:
        """Put up what the others will read."""
        start, stop = self.put_range
        payload[: stop - start] = call.buffer[start:stop] if call.own_part is None else call.own_part

    def take(self, buffer: memoryview, payload: Callable[[int], memoryview], reduction: Reduction) -> None:
        """Make the result of what all have put up."""
        for rank, start, stop in self.copies:
            buffer[start:stop] = payload(rank)[: stop - start]
        start, stop = self.sum_range
        if self.terms is not None and start < stop:
            add_up(self.terms, buffer[start:stop], lambda rank: payload(rank)[start:stop], reduction, own=self.rank)


def operation_for(call: CollectiveCall, rank: int) -> Operation | None:
    """Return the part of ``rank`` in ``call``; None if its sums differ from range to range."""
    num_ranks, num_bytes = call.schedule.num_ranks, call.buffer.nbytes
    parts = [call.own_range(place) for place in range(num_ranks)]
    collective = call.schedule.collective
    if collective is Collective.BROADCAST:
        return _broadcast(call.schedule.root, num_bytes, rank=rank, num_ranks=num_ranks)
    if collective is Collective.ALL_GATHER:
        own_bytes = parts[rank][1] - parts[rank][0]
        others = tuple((source, *part) for source, part in enumerate(parts) if source != rank)
        return Operation(rank=rank, put_range=parts[rank], copies=others, sent_bytes=(own_bytes,) * num_ranks)
    is_scattered = collective is Collective.REDUCE_SCATTER
    terms = find_sum(call.schedule, rank, owned_only=is_scattered)
    if terms is None:
        return None
    return Operation(
        rank=rank,
        put_range=(0, num_bytes),
        terms=terms,
        sum_range=parts[rank] if is_scattered else (0, num_bytes),
        sent_bytes=tuple(stop - start for start, stop in parts) if is_scattered else (num_bytes,) * num_ranks,
    )


def _broadcast(root: int, num_bytes: int, *, rank: int, num_ranks: int) -> Operation:
    if rank != root:
        return Operation(rank=rank, put_range=(0, 0), copies=((root, 0, num_bytes),), sent_bytes=(0,) * num_ranks)
    return Operation(rank=rank, put_range=(0, num_bytes), sent_bytes=(num_bytes,) * num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a rank keeps of a call that it may make again."""

    schedule: Schedule
    layout: Layout
    signature: int
    operation: Operation


_Key = tuple[int, int, str, str, str, str]
"""All that the ranks must agree on: schedule, layout, and what the numbers are and become."""


class Parts:
    """Prepares calls for the segment, and remembers them."""

    def __init__(self, rank: int, *, payload_bytes: int, max_parts: int = 256) -> None:
        self._rank = rank
        self._payload_bytes = payload_bytes
        self._max_parts = max_parts
        self._describer = Describer(max_parts)
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
        signature = self._describer.describe(call).signature
        part = Part(schedule=call.schedule, layout=call.layout, signature=signature, operation=operation)
        self._parts[key] = part  # keeping schedule and layout keeps their ids from being used again
        return part
