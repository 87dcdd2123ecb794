"""Who sends whom which state, when the ranks that keep it change; without I/O.

After a loss, or when ranks have come, optimizer state is divided anew. What a rank is to keep and has already stays
where it is; each range that it lacks comes from one rank that has it, the nearest, and of these the one that sends the
least so far. All ranks plan from the same lists and come to the same plan. Complexity: O(parts x holders).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from syncline.errors import UpdateError


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RedistributionPlan:
    """All moves, in an order that all ranks share, and what nobody has; parts do not overlap on one destination."""

    moves: tuple[StateMove, ...]
    missing: tuple[StatePart, ...]


class StateLostError(UpdateError):
    """Optimizer state that is needed was kept by lost ranks alone; ``parts`` are those ranges.

    ``step()`` or ``backward()`` of an elastic job raises it on every rank, with ``Sharded``, unless the job can go back
    to a checkpoint.

    >>> from syncline.updates.redistribution import StatePart
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
) -> RedistributionPlan:
    """Return how each rank comes by what is wanted of it; ``held`` and ``wanted`` are by rank.

    Parts of one rank may overlap, and need not be those of another. ``distance`` of two ranks: lower is nearer.

    >>> old = [[StatePart("w", 0, 6)], [StatePart("w", 4, 8)]]
    >>> new = [[StatePart("w", 0, 2)], [StatePart("w", 2, 8)]]
    >>> plan_redistribution(old, new).moves
    (StateMove(source=0, destination=1, part=StatePart(parameter='w', start=2, stop=4)),)
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
    return RedistributionPlan(moves=_joined(moves), missing=tuple(missing))


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


def _joined(moves: Iterable[StateMove]) -> tuple[StateMove, ...]:
    """Join what touches and goes the same way."""
    joined: list[StateMove] = []
    for move in moves:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last[:2] == move[:2]
            and last.part.parameter == move.part.parameter
            and last.part.stop == move.part.start
        ):
            joined[-1] = last._replace(part=last.part._replace(stop=move.part.stop))
        else:
            joined.append(move)
    return tuple(joined)
