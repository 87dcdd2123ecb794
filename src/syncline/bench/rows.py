"""The rows of a benchmark, what one way of doing the work took and what stands beside that figure; and their tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter
from rich.table import Table

from syncline.bench.task import Order
from syncline.report.terminal import new_table
from syncline.units import format_size

COMPUTE_ALONE = "compute alone"
MISSING = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What one run put on the links, headers included; in the lab only."""

    link_bytes: Mapping[str, int] = field(default_factory=dict)
    """Each direction of each link, the one that was kept busy longest first."""
    sent_bytes: int = 0
    """What all hosts together sent."""
    num_dropped: int = 0
    """Packets that found a queue full (of a training step: in all steps of the run)."""
    num_resent: int = 0
    """TCP segments that were sent again, likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Carried):
    """One method in one order of ranks."""

    subject: str
    """The name of a collective, or ``training step``."""
    order: Order = "topology"
    size_bytes: int
    method: str
    times_s: tuple[float, ...]
    """Of each round, that of the slowest rank."""
    bound_s: float
    """What the wire needs at least for ``size_bytes`` of payload, however it is sent; 0 if rates are not emulated."""
    compute_s: float | None = None
    """Median of the same step without any communication."""
    predicted_s: float | None = None
    """What ``predict`` says of the schedule's communication."""
    planner: str = ""
    topology: str = ""
    """The network's name."""

    @property
    def median_s(self) -> float:
        """The figure."""
        return statistics.median(self.times_s)

    @property
    def least_s(self) -> float:
        """The fastest round."""
        return min(self.times_s)

    @property
    def most_s(self) -> float:
        """The slowest round."""
        return max(self.times_s)

    @property
    def times_bound(self) -> float | None:
        """How many times the wire's bound; None for work that the wire has no part in, or does not limit."""
        return self.median_s / self.bound_s if self.bound_s > 0 and self.method != COMPUTE_ALONE else None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, and the figures that follow from them, for JSON."""
        figures = {"median_s": self.median_s, "min_s": self.least_s, "max_s": self.most_s}
        return {**asdict(self), **figures, "times_bound": self.times_bound}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows that may be compared: the same subject, size and order of ranks, measured in turns."""

    title: str
    rows: tuple[Row, ...]

    @property
    def reference(self) -> Row:
        """What the others are compared with: this library's own default, which is measured first."""
        return next(row for row in self.rows if row.method != COMPUTE_ALONE)

    def ratio(self, row: Row) -> float | None:
        """How many times as long as the reference."""
        return None if row.method == COMPUTE_ALONE else row.median_s / self.reference.median_s


def group_rows(rows: Iterable[Row]) -> tuple[Group, ...]:
    """Put rows together that may be compared, in the order in which they come."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        where = f"{row.topology}: " if row.topology else ""
        title = f"{where}{row.subject}, {_size_in_words(row.size_bytes)}, ranks in {row.order} order"
        found.setdefault(title, []).append(row)
    return tuple(Group(title=title, rows=tuple(members)) for title, members in found.items())


def save_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows for :func:`load_rows`."""
    written = path.with_suffix(".part")
    written.write_text(json.dumps([row.to_dict() for row in rows]))
    written.replace(path)  # at once: whoever reads it after an interrupt finds these rows, or those before


def load_rows(path: Path) -> list[Row]:
    """Read what :func:`save_rows` wrote."""
    return TypeAdapter(list[Row]).validate_json(path.read_bytes())


def _size_in_words(num_bytes: int) -> str:
    """Write 16 MiB and 16 MB each as such."""
    return f"{num_bytes / 1e6:.4g} MB" if num_bytes % (1 << 18) else f"{num_bytes / (1 << 20):.4g} MiB"


def bench_table(group: Group) -> Table:
    """Lay out a group; times are seconds of the slowest rank. A column that says nothing of any row is left out."""
    columns = {heading: [cell(group, row) for row in group.rows] for heading, cell in _COLUMNS.items()}
    told = {heading: cells for heading, cells in columns.items() if set(cells) != {MISSING}}
    table = new_table(*told, title=f"{group.title} (s)")
    for row, cells in zip(group.rows, zip(*told.values(), strict=True), strict=True):
        table.add_row(*cells, style="green" if row is group.reference else "")
    return table


def _figure(value: float | None, *, digits: int = 3) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def _sent(row: Row) -> str:
    """Say what all hosts together sent."""
    return format_size(row.sent_bytes) if row.sent_bytes and row.method != COMPUTE_ALONE else MISSING


def busiest_link(row: Row) -> str:
    """Name the link that one run kept busy longest, and what it carried."""
    if not row.link_bytes or row.method == COMPUTE_ALONE:
        return MISSING
    name, num_bytes = next(iter(row.link_bytes.items()))
    return f"{name} {format_size(num_bytes)}"


_COLUMNS: Mapping[str, Callable[[Group, Row], str]] = MappingProxyType(
    {
        "method": lambda _, row: f"{row.method} ({row.planner})" if row.planner else row.method,
        "median": lambda _, row: _figure(row.median_s),
        "min": lambda _, row: _figure(row.least_s),
        "max": lambda _, row: _figure(row.most_s),
        "x Syncline": lambda group, row: _figure(group.ratio(row), digits=2),
        "bound": lambda _, row: _figure(row.bound_s or None),
        "x bound": lambda _, row: _figure(row.times_bound, digits=2),
        "predicted": lambda _, row: _figure(row.predicted_s),
        "compute": lambda _, row: _figure(row.compute_s),
        "all send": lambda _, row: _sent(row),
        "busiest link": lambda _, row: busiest_link(row),
    }
)
