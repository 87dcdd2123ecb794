"""The tables of a benchmark: one for each group of rows that may be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from rich import box
from rich.table import Table

from syncline.bench.rows import COMPUTE_ALONE, Group, Row
from syncline.units import format_size

MISSING = "-"


def bench_table(group: Group) -> Table:
    """Lay out a group; times are seconds of the slowest rank. A column that says nothing of any row is left out."""
    columns = {heading: [cell(group, row) for row in group.rows] for heading, cell in _COLUMNS.items()}
    told = {heading: cells for heading, cells in columns.items() if set(cells) != {MISSING}}
    table = Table(title=f"{group.title} (s)", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in told:
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for row, cells in zip(group.rows, zip(*told.values(), strict=True), strict=True):
        table.add_row(*cells, style="green" if row is group.reference else "")
    return table


def _seconds(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3f}"


def _times(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}"


def _sent(row: Row) -> str:
    """Say what all hosts together sent."""
    return format_size(row.sent_bytes) if row.sent_bytes and row.method != COMPUTE_ALONE else MISSING


def _busiest(row: Row) -> str:
    """Name the link that one run kept busy longest, and what it carried."""
    if not row.link_bytes or row.method == COMPUTE_ALONE:
        return MISSING
    name, num_bytes = next(iter(row.link_bytes.items()))
    return f"{name} {format_size(num_bytes)}"


_COLUMNS: Mapping[str, Callable[[Group, Row], str]] = MappingProxyType(
    {
        "method": lambda _, row: f"{row.method} ({row.planner})" if row.planner else row.method,
        "median": lambda _, row: _seconds(row.median_s),
        "min": lambda _, row: _seconds(row.least_s),
        "max": lambda _, row: _seconds(row.most_s),
        "x Syncline": lambda group, row: _times(group.ratio(row)),
        "bound": lambda _, row: _seconds(row.bound_s or None),
        "x bound": lambda _, row: _times(row.times_bound),
        "predicted": lambda _, row: _seconds(row.predicted_s),
        "compute": lambda _, row: _seconds(row.compute_s),
        "all send": lambda _, row: _sent(row),
        "busiest link": lambda _, row: _busiest(row),
    }
)
