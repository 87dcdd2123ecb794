"""The rows of a trace: each category is one, and spans that overlap get rows of their own.

Perfetto draws the spans of one row as a stack of calls, so two that overlap without nesting would be drawn wrong.
Collectives do overlap: ``communication`` therefore has as many rows as there were collectives at once, and so have the
pushes and pulls of the buckets of an overlapped update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FIRST_ROWS = ("step", "compute", "wait", "update", "call", "communication")
"""In the order in which they are shown; other categories follow as they come."""

_LANED = frozenset({"call", "communication", "push", "pull"})


class Rows:
    """Gives each event of one rank the number of its row; call with the events in chunks, in any order within one."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._numbers: dict[tuple[str, int], int] = {}
        self._lane_ends_ns: dict[str, list[int]] = {}
        self._new: list[dict[str, Any]] = []

    def place(
        self, events: Sequence[tuple[str, str, str, int, int, dict[str, Any]]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Metadata of rows that are new, and the events in the Chrome format, ordered by their start."""
        placed = [self._place(*event) for event in sorted(events, key=lambda event: (event[3], -event[4]))]
        new, self._new = self._new, []
        return new, placed

    def _place(
        self, phase: str, name: str, category: str, start_ns: int, end_ns: int, args: dict[str, Any]
    ) -> dict[str, Any]:
        event: dict[str, Any] = {"ph": phase, "name": name, "pid": self._rank, "ts": start_ns / 1000}
        if category:
            event["cat"] = category
            event["tid"] = self._row(category, self._lane(phase, category, start_ns, end_ns))
        if phase == "X":
            event["dur"] = (end_ns - start_ns) / 1000
        elif phase == "i":
            event["s"] = "t"
        if args:
            event["args"] = args
        return event

    def _lane(self, phase: str, category: str, start_ns: int, end_ns: int) -> int:
        """Find the first lane that is free; spans come in chunks, so an older one may open a lane late."""
        if phase != "X" or category not in _LANED:
            return 0
        ends_ns = self._lane_ends_ns.setdefault(category, [])
        for lane, lane_end_ns in enumerate(ends_ns):
            if lane_end_ns <= start_ns:
                ends_ns[lane] = end_ns
                return lane
        ends_ns.append(end_ns)
        return len(ends_ns) - 1

    def _row(self, category: str, lane: int) -> int:
        number = self._numbers.get((category, lane))
        if number is None:
            number = self._new_row(category, lane)
        return number

    def _new_row(self, category: str, lane: int) -> int:
        order = FIRST_ROWS.index(category) if category in FIRST_ROWS else len(FIRST_ROWS)
        number = len(self._numbers) + 1
        self._numbers[category, lane] = number
        name = category if lane == 0 else f"{category} {lane + 1}"
        for key, args in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": 100 * order + lane})):
            self._new.append({"ph": "M", "name": key, "pid": self._rank, "tid": number, "args": args})
        return number
