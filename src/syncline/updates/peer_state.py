"""Optimizer state from other ranks: what each has is told, planned, and sent once to whoever is to keep it.

:func:`redistribute` is a collective of the ranks that are there now, on any thread; :func:`plan_redistribution` decides
for it, without I/O. Beside optimizer state it moves whatever else has a number for each element of a parameter, such as
combined gradients, under keys that begin with "~". A rank's memory holds what it had and what comes until the new owner
has taken its state from the source.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from syncline.errors import UpdateError
from syncline.tensors.memory import aligned, bytes_of
from syncline.updates.bucket import Slot
from syncline.updates.control import ControlStream
from syncline.updates.state import StateEntry, copied, decode_value, describe_state, joined_catalogues

BESIDE = "~"
"""Keys that begin so are no optimizer state."""
_BATCH_BYTES = 64 << 20
"""Of all ranks together, that are packed and sent at once, about."""


# Who sends whom which state, when the ranks that keep it change.
#
# After a loss, or when ranks have come, optimizer state is divided anew. What a rank is to keep and has already stays
# where it is; each range that it lacks comes from one rank that has it, the nearest, and of these the one that sends
# the least so far. All ranks plan from the same lists and come to the same plan. Complexity: O(parts x holders).


class StatePart(NamedTuple):
    """Elements ``start`` to ``stop`` of a parameter, in its memory order."""

    parameter: str
    start: int
    stop: int


class StateMove(NamedTuple):
    """One part on its way between two ranks."""

    source: int
    destination: int
    part: StatePart


class StateLostError(UpdateError):
    """Optimizer state that is needed was kept by lost ranks alone; ``parts`` are those ranges.

    ``step()`` or ``backward()`` of an elastic job raises it on every rank, with ``Sharded``, unless the job can go back
    to a checkpoint.

    >>> from syncline.updates.peer_state import StatePart
    >>> error = syncline.StateLostError([StatePart("weight", 0, 8), StatePart("bias", 2, 4)])
    >>> str(error).split(";")[0]
    "No rank that is left has the optimizer state of elements 0 to 8 of 'weight', 2 to 4 of 'bias'"
    """

    def __init__(self, parts: Sequence[StatePart]) -> None:
        named = ", ".join(f"{part.start} to {part.stop} of {part.parameter!r}" for part in parts[:_MOST_NAMED])
        more = f", and {len(parts) - _MOST_NAMED} more ranges" if len(parts) > _MOST_NAMED else ""
        super().__init__(
            f"No rank that is left has the optimizer state of elements {named}{more}; go on from a checkpoint, as "
            "Elastic(checkpoint=folder) does by itself, and take Sharded(spares=1) if there were no spares"
        )
        self.parts = tuple(parts)


_MOST_NAMED = 4


def plan_redistribution(
    held: Sequence[Iterable[StatePart]],
    wanted: Sequence[Iterable[StatePart]],
    *,
    distance: Callable[[int, int], int] | None = None,
) -> tuple[list[StateMove], list[StatePart]]:
    """Return how each rank comes by what is wanted of it, and what nobody has; ``held`` and ``wanted`` are by rank.

    Parts of one rank may overlap, and need not be those of another. ``distance`` of two ranks: lower is nearer. All
    ranks have the moves in one order, and what comes to one of them does not overlap.

    >>> old = [[StatePart("w", 0, 6)], [StatePart("w", 4, 8)]]
    >>> new = [[StatePart("w", 0, 2)], [StatePart("w", 2, 8)]]
    >>> plan_redistribution(old, new)
    ([StateMove(source=0, destination=1, part=StatePart(parameter='w', start=2, stop=4))], [])
    """
    sent = Counter[int]()
    moves: list[StateMove] = []
    missing: dict[StatePart, None] = {}
    for destination, part, having in _lacking(held, wanted):
        if not having:
            missing[part] = None
            continue
        source = min(having, key=lambda rank: (distance(rank, destination) if distance else 0, sent[rank], rank))
        sent[source] += part.stop - part.start
        moves.append(StateMove(source, destination, part))
    return moves, list(missing)


def _lacking(
    held: Sequence[Iterable[StatePart]], wanted: Sequence[Iterable[StatePart]]
) -> Iterator[tuple[int, StatePart, frozenset[int]]]:
    """Yield what each rank is to have and has not, and who has it."""
    holders: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for rank, parts in enumerate(held):
        for part in parts:
            holders[part.parameter].append((part.start, part.stop, rank))
    needed = ((destination, part) for destination, parts in enumerate(wanted) for part in sorted(set(parts)))
    for destination, part in needed:
        for first, last, having in _by_holders(part, holders[part.parameter]):
            if destination not in having:
                yield destination, StatePart(part.parameter, first, last), having


def _by_holders(part: StatePart, holders: Sequence[tuple[int, int, int]]) -> Iterable[tuple[int, int, frozenset[int]]]:
    """Yield the ranges of a part within which the same ranks have it."""
    near = [one for one in holders if one[0] < part.stop and one[1] > part.start]
    cuts = {part.start, part.stop, *(end for first, last, _ in near for end in (first, last))}
    inside = sorted(cut for cut in cuts if part.start <= cut <= part.stop)
    for first, last in pairwise(inside):
        yield first, last, frozenset(rank for start, stop, rank in near if start <= first and stop >= last)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldState:
    """What a rank has of one part of a parameter: 1-D tensors of ``part.stop - part.start`` elements, and values."""

    part: StatePart
    divided: Mapping[str, torch.Tensor] = field(default_factory=dict)
    single: Mapping[str, Any] = field(default_factory=dict)

    def entries(self, *, is_spare: bool = False) -> Iterator[StateEntry]:
        """Yield the same key by key."""
        name, start, stop = self.part
        for key, value in self.divided.items():
            yield StateEntry(parameter=name, key=key, value=value, start=start, stop=stop, is_spare=is_spare)
        for key, value in self.single.items():
            yield StateEntry(parameter=name, key=key, value=value, is_spare=is_spare)


class PeerState:
    """A :class:`~syncline.updates.state.StateSource` of what this rank has and what it was sent."""

    def __init__(self, kinds: Mapping[str, Mapping[str, Any]], held: Iterable[HeldState]) -> None:
        self._kinds = kinds
        self._held: dict[str, list[HeldState]] = defaultdict(list)
        for one in held:
            self._held[one.part.parameter].append(one)

    def values(self, parameter: str) -> Mapping[str, Any]:
        """Return a parameter's state: a number type for what has one value for each element, else the value."""
        kinds = self._kinds.get(parameter, {})
        return {key: copied(value) for key, value in kinds.items() if not key.startswith(BESIDE)}

    def fill(self, slot: Slot, key: str, start: int, target: torch.Tensor) -> None:
        """Write elements of the parameter, from ``start`` in memory order, into the 1-D ``target``."""
        self.copy(StatePart(slot.name, start, start + target.numel()), key, target)

    def copy(self, part: StatePart, key: str, target: torch.Tensor) -> None:
        """Write what ``key`` has for the elements of ``part`` into ``target``."""
        place = part.start
        while place < part.stop:
            one = self._find(part.parameter, key, place)
            if one is None:
                raise UpdateError(f"{key!r} of {part.parameter!r} was not redistributed from element {place} on")
            last = min(part.stop, one.part.stop)
            values = one.divided[key][place - one.part.start : last - one.part.start]
            target[place - part.start : last - part.start].copy_(values)
            place = last

    def take(self, moved: Iterable[HeldState]) -> None:
        """Take what has come."""
        for one in moved:
            self._held[one.part.parameter].append(one)

    def _find(self, parameter: str, key: str, place: int) -> HeldState | None:
        for one in self._held[parameter]:
            if one.part.start <= place < one.part.stop and key in one.divided:
                return one
        return None


def redistribute(
    control: ControlStream,
    held: Sequence[HeldState],
    wanted: Sequence[Sequence[StatePart]],
    *,
    distance: Callable[[int, int], int] | None = None,
    label: str = "redistribution of state",
) -> PeerState:
    """Return a source of all that this rank is to keep; every rank of ``control`` calls it, and none of them goes on.

    ``held`` is what this rank has, ``wanted`` what each rank is to have, in rank order and alike on all ranks. Raises
    :class:`StateLostError` on every rank if nobody has some of it, and what a collective does.
    """
    catalogue = describe_state(entry for one in held for entry in one.entries())
    told = control.all_gather(([one.part for one in held], catalogue), label)
    kinds = {
        name: {key: decode_value(value) for key, value in values.items()}
        for name, values in joined_catalogues(keys for _, keys in told).items()
    }
    having = [[StatePart(*part) for part in parts] for parts, _ in told]
    moves, missing = plan_redistribution(having, wanted, distance=distance)
    if missing:
        raise StateLostError(missing)
    source = PeerState(kinds, held)
    for batch in _batches(moves, kinds):
        source.take(list(_exchange(control, batch, kinds, source, label)))
    return source


def _divided(part: StatePart, kinds: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, torch.dtype]]:
    """Yield what has a number for each element of a part, in the order in which it is packed."""
    for key, kind in sorted(kinds.get(part.parameter, {}).items()):
        if isinstance(kind, torch.dtype):
            yield key, kind


def _num_bytes(part: StatePart, kinds: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the size of a part when it is packed."""
    return sum(aligned((part.stop - part.start) * dtype.itemsize) for _, dtype in _divided(part, kinds))


def _batches(moves: Iterable[StateMove], kinds: Mapping[str, Mapping[str, Any]]) -> Iterator[list[StateMove]]:
    batch: list[StateMove] = []
    num_bytes = 0
    for move in moves:
        batch.append(move)
        num_bytes += _num_bytes(move.part, kinds)
        if num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if num_bytes:
        yield batch


def _exchange(
    control: ControlStream,
    batch: Sequence[StateMove],
    kinds: Mapping[str, Mapping[str, Any]],
    source: PeerState,
    label: str,
) -> Iterator[HeldState]:
    """Send and receive one batch; yield what has come, as views of the memory that it came in."""
    going, coming = defaultdict[int, list[StatePart]](list), defaultdict[int, list[StatePart]](list)
    for move in batch:
        if move.source == control.rank:
            going[move.destination].append(move.part)
        elif move.destination == control.rank:
            coming[move.source].append(move.part)
    outgoing = {peer: _packed(parts, kinds) for peer, parts in going.items()}
    incoming = {peer: _packed(parts, kinds) for peer, parts in coming.items()}
    for peer, parts in going.items():
        for part, arrays in _unpacked(outgoing[peer], parts, kinds):
            for key, array in arrays.items():
                source.copy(part, key, array)
    work = control.exchange(
        tuple((peer, bytes_of(memory)) for peer, memory in sorted(outgoing.items()) if len(memory)),
        tuple((peer, bytes_of(memory)) for peer, memory in sorted(incoming.items()) if len(memory)),
        label,
    )
    work.wait()
    for peer, parts in coming.items():
        for part, arrays in _unpacked(incoming[peer], parts, kinds):
            yield HeldState(part=part, divided=arrays)


def _packed(parts: Iterable[StatePart], kinds: Mapping[str, Mapping[str, Any]]) -> torch.Tensor:
    return torch.empty(sum(_num_bytes(part, kinds) for part in parts), dtype=torch.uint8)


def _unpacked(
    memory: torch.Tensor, parts: Iterable[StatePart], kinds: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[StatePart, dict[str, torch.Tensor]]]:
    """Yield each part with the places of its arrays in packed memory."""
    start = 0
    for part in parts:
        arrays = {}
        for key, dtype in _divided(part, kinds):
            num_bytes = (part.stop - part.start) * dtype.itemsize
            arrays[key] = memory[start : start + num_bytes].view(dtype)
            start += aligned(num_bytes)
        yield part, arrays
