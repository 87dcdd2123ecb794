"""Which samples of an epoch each member takes, batch by batch: alike on all ranks without a word between them.

The epoch is a sequence of *places* (in a shuffled order), of which those that are not given out are a sorted set. Each
batch takes the lowest of them, and divides them among the members. A batch counts when its step is made, not when it is
drawn: a loader with workers draws ahead. So when members change, what is drawn by then stays with those who live, what
lost members had of it goes back, and all after it is divided anew. Everything follows from what all ranks know alike:
the places, the members, and how many batches were made.

The way is Horovod's ``ElasticSampler`` (divide again what is left), but for whose count of samples ranks must talk, and
which cannot tell what was drawn from what was done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from syncline.schedule.layout import joined_ranges

Places = list[tuple[int, int]]
"""Half-open ranges, sorted, that neither overlap nor touch."""


@dataclass(slots=True, kw_only=True)
class SampleDivision:
    """The batches of one pass; ``shares`` has each member's part of a whole batch, in the order of ranks.

    With ``is_uneven`` a last batch of fewer samples than members is given out, and some members have one batch less;
    else every member has as many, for which the last ones may be larger, and what cannot be divided is left out.
    """

    left: Places
    """What no batch has yet."""
    shares: dict[int, int]
    is_uneven: bool = False
    num_made: int = 0
    """Batches whose steps are made."""
    batches: dict[int, dict[int, Places]] = field(default_factory=dict)
    """By its number, what each member has of a batch that is given out and not made."""
    newest: list[dict[int, Places]] = field(default_factory=list)
    """What each member had of the batches that the newest step has used."""

    def part(self, member: int, number: int) -> Places | None:
        """Return what ``member`` takes of batch ``number``; None if there is nothing for it any more."""
        while number >= self._end and self._give_batch():
            pass
        return self.batches.get(number, {}).get(member)

    def note_made(self, num_made: int) -> None:
        """Note that the newest step has used all batches up to ``num_made``."""
        self.newest = [self.batches.pop(number) for number in range(self.num_made, num_made)]
        self.num_made = num_made

    def change_members(
        self, shares: Mapping[int, int], *, numbers: Mapping[int, int], num_drawn: int, has_ended: bool
    ) -> None:
        """Divide all but the next ``num_drawn`` batches among the members of ``shares``.

        ``numbers`` has the new number of each member that stays; the newest step has used nothing of the others, and
        what they have of drawn batches goes back. Members that are new begin with the next batch; where the others have
        drawn all that is left, they take some of the same samples, to have as many batches. ``has_ended``: nobody asks
        for more batches if there are none, as was seen when the last one was drawn.
        """
        end = self.num_made + num_drawn
        while self._end < end and self._give_batch():
            pass
        for number in [number for number in self.batches if number >= end]:
            self.left = joined_ranges(chain(self.left, *self.batches.pop(number).values()))
        is_closed = has_ended and not self.batches and not self._can_give()
        known = [*self.newest, *self.batches.values()]
        returned = [part for parts in known for member, part in parts.items() if member not in numbers]
        self.left = [] if is_closed else joined_ranges(chain(self.left, *returned))
        for parts in known:
            kept = {numbers[member]: part for member, part in parts.items() if member in numbers}
            parts.clear()
            parts.update(kept)
        self.shares = dict(shares)
        for parts in self.batches.values():
            self._give_to_joined(parts, [member for member in shares if member not in numbers.values()])

    def remaining(self) -> Places:
        """Return what no step that is made has used, whoever has drawn it."""
        return joined_ranges(chain(self.left, *(part for parts in self.batches.values() for part in parts.values())))

    def state(self) -> dict[str, Any]:
        """Return everything but who made the newest step, in numbers and lists, as JSON has them."""
        batches = [[number, [[*one] for one in parts.items()]] for number, parts in self.batches.items()]
        return {
            "left": self.left,
            "shares": [[*one] for one in self.shares.items()],
            "is_uneven": self.is_uneven,
            "num_made": self.num_made,
            "batches": batches,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> SampleDivision:
        """Make one again from its :meth:`state`."""
        return cls(
            left=_as_places(state["left"]),
            shares=dict(state["shares"]),
            is_uneven=state["is_uneven"],
            num_made=state["num_made"],
            batches={
                number: {member: _as_places(places) for member, places in parts} for number, parts in state["batches"]
            },
        )

    def count_batches(self) -> int:
        """Return how many batches the pass has, as far as is known: those made, given out, and still to come."""
        size, total = count_places(self.left), sum(self.shares.values())
        whole, rest = divmod(size, total) if total else (0, 0)
        is_more = rest > 0 if self.is_uneven else rest >= len(self.shares)
        return self._end + whole + is_more

    @property
    def _end(self) -> int:
        return max(self.batches, default=self.num_made - 1) + 1

    def _can_give(self) -> bool:
        return bool(self.shares) and count_places(self.left) >= (1 if self.is_uneven else len(self.shares))

    def _give_batch(self) -> bool:
        if not self._can_give():
            return False
        size, total = count_places(self.left), sum(self.shares.values())
        rest = size - total
        is_last = rest < 0 or (0 < rest < len(self.shares) and not self.is_uneven)
        counts = apportion(size if is_last else total, self.shares)
        self.batches[self._end] = {member: self._take(count) for member, count in counts.items() if count}
        return True

    def _give_to_joined(self, parts: dict[int, Places], joined: Iterable[int]) -> None:
        whole = joined_ranges(chain(*parts.values()))
        for member in joined:
            part = self._take(self.shares[member])
            if not part and not self.is_uneven:
                part, _ = split_places(whole, self.shares[member])
            if part:
                parts[member] = part

    def _take(self, count: int) -> Places:
        taken, self.left = split_places(self.left, count)
        return taken


def apportion(count: int, shares: Mapping[int, float]) -> dict[int, int]:
    """Divide ``count`` in proportion to ``shares`` by largest remainders; each gets 1 at least, if there are as many.

    >>> apportion(10, {0: 3.0, 1: 1.0, 2: 1.0})
    {0: 6, 1: 2, 2: 2}
    >>> apportion(3, {0: 1.0, 1: 1.0, 2: 50.0})
    {0: 1, 1: 1, 2: 1}
    """
    total = sum(shares.values())
    least = 1 if count >= len(shares) else 0
    counts = {member: max(int(count * share / total), least) for member, share in shares.items()}
    # what rounding left, or took too much where shares are tiny, to whom it misses most, or who has most too much
    while (rest := count - sum(counts.values())) != 0:
        step = 1 if rest > 0 else -1
        able = [member for member in shares if step > 0 or counts[member] > least]
        chosen = max(able, key=lambda member: step * (count * shares[member] / total - counts[member]))
        counts[chosen] += step
    return counts


def _as_places(given: Iterable[Sequence[int]]) -> Places:
    return [(start, stop) for start, stop in given]


def split_places(places: Sequence[tuple[int, int]], count: int) -> tuple[Places, Places]:
    """Return the lowest ``count`` of ``places``, or all, and the rest."""
    taken: Places = []
    for number, (start, stop) in enumerate(places):
        if count <= stop - start:
            middle = start + count
            taken += [(start, middle)] if count else []
            return taken, ([(middle, stop)] if middle < stop else []) + list(places[number + 1 :])
        taken.append((start, stop))
        count -= stop - start
    return taken, []


def count_places(places: Collection[tuple[int, int]]) -> int:
    """Return how many places there are."""
    return sum(stop - start for start, stop in places)
