"""Transfers in columns: a million of them is six numpy arrays, not a million objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


class Transfer(NamedTuple):
    """One row: at ``step``, ``src`` sends the atoms [first, last) to ``dst``, which adds or overwrites.

    >>> next(iter(PLANNERS["ring"].plan(Topology.flat(2), Collective.ALL_GATHER).draft.transfers))
    Transfer(step=0, src=0, dst=1, first=0, last=1, add=False)
    """

    step: int
    src: int
    dst: int
    first: int
    last: int
    add: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfers:
    """Columns of equal length, ordered by step; within a step, a rank sends in the order in which its rows stand.

    int32, but ``add`` is bool; each is 1-D, and read-only. The columns are those of :class:`Transfer`.

    >>> transfers = PLANNERS["ring"].plan(Topology.flat(3), Collective.ALL_GATHER).draft.transfers
    >>> len(transfers), transfers.src.shape
    (6, (6,))
    """

    step: IntArray
    src: IntArray
    dst: IntArray
    first: IntArray
    last: IntArray
    add: BoolArray

    def __post_init__(self) -> None:
        for column in fields(self):
            dtype = np.bool_ if column.name == "add" else np.int32
            array: npt.NDArray[Any] = np.ascontiguousarray(getattr(self, column.name), dtype=dtype)
            assert array.shape == (len(self.step),), "columns have equal length"
            array = array.view()
            array.flags.writeable = False
            object.__setattr__(self, column.name, array)

    def __len__(self) -> int:
        return len(self.step)

    def __iter__(self) -> Iterator[Transfer]:
        return map(Transfer._make, zip(*(getattr(self, name).tolist() for name in Transfer._fields), strict=True))

    @classmethod
    def of(cls, rows: Sequence[Transfer]) -> Transfers:
        """Build from rows; they are put in order of their steps."""
        columns: Any = np.array(rows, dtype=np.int64).reshape(-1, 6).T
        return cls(**dict(zip(Transfer._fields, columns, strict=True))).in_order()

    @classmethod
    def concatenate(cls, parts: Sequence[Transfers]) -> Transfers:
        """Put several one behind the other."""
        if not parts:
            return cls.of(())
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in Transfer._fields})

    def take(self, rows: npt.NDArray[Any]) -> Transfers:
        """Return the rows that an index array or a mask picks."""
        return Transfers(**{column.name: getattr(self, column.name)[rows] for column in fields(self)})

    def in_order(self) -> Transfers:
        """Return the rows in order of their steps; rows of one step keep their order."""
        if bool((self.step[1:] >= self.step[:-1]).all()):
            return self
        return self.take(np.argsort(self.step, kind="stable"))

    def shifted(self, num_steps: int) -> Transfers:
        """Return the same rows, ``num_steps`` later."""
        return replace(self, step=self.step + np.int32(num_steps))

    def reversed(self) -> Transfers:
        """Return the same moves backwards in time: receivers send and senders overwrite. Gathers what was scattered."""
        last_step = int(self.step[-1]) if len(self) else 0
        return Transfers(
            step=last_step - self.step[::-1],
            src=self.dst[::-1],
            dst=self.src[::-1],
            first=self.first[::-1],
            last=self.last[::-1],
            add=np.zeros(len(self), dtype=np.bool_),
        )

    def merged(self) -> Transfers:
        """Return the rows with those joined that touch: same step, source, destination and kind, contiguous atoms."""
        if len(self) < 2:
            return self
        order = np.lexsort((self.first, self.add, self.dst, self.src, self.step))
        row = self.take(order)
        joins = (row.step[1:] == row.step[:-1]) & (row.src[1:] == row.src[:-1]) & (row.dst[1:] == row.dst[:-1])
        joins &= (row.add[1:] == row.add[:-1]) & (row.first[1:] == row.last[:-1])
        if not joins.any():
            return self
        starts = np.flatnonzero(np.concatenate(([True], ~joins)))
        ends = np.append(starts[1:], len(order)) - 1
        position = np.minimum.reduceat(order, starts)
        merged = Transfers(
            step=row.step[starts],
            src=row.src[starts],
            dst=row.dst[starts],
            first=row.first[starts],
            last=row.last[ends],
            add=row.add[starts],
        )
        return merged.take(np.argsort(position, kind="stable"))
