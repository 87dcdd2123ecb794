"""Pictures for the terminal: a curve of braille characters, and the table of links.

A curve's characters are each a grid of two by four dots, with numbers on the axes. The table says what crossed each
link in each direction, and how busy it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from syncline.topology import DirectedLink, Link, Node, Rank, Socket, Topology
from syncline.units import format_rate, format_size

MAX_WIDTH = 100
BRAILLE_BLANK = 0x2800
# The bit of each dot, by column (left, right) and row (top to bottom).
DOT_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
DOTS_ACROSS, DOTS_DOWN = 2, 4


def network_links(topology: Topology) -> list[tuple[str, Link, int]]:
    """List the links above switches and hosts, with their names and depth; the others are inside a machine.

    >>> [(name, depth) for name, _, depth in network_links(Topology.flat(2))]
    [('h0', 0), ('h1', 0)]
    """
    found: list[tuple[str, Link, int]] = []

    def visit(node: Node, depth: int) -> None:
        if isinstance(node, Rank | Socket):
            return
        if node.link is not None:
            found.append((node.name, node.link, depth))
        for child in node.children:
            visit(child, depth if node.link is None else depth + 1)

    visit(topology.root, 0)
    return found


def format_rates(link: Link) -> str:
    """Spell a link's rate in bits per second, or both where up and down differ.

    >>> from syncline.topology import Link
    >>> format_rates(Link(up_bytes_per_s=125e6, down_bytes_per_s=12.5e6))
    '1 Gbit/s / 100 Mbit/s'
    """
    up, down = format_rate(link.up_bytes_per_s), format_rate(link.down_bytes_per_s)
    return up if up == down else f"{up} / {down}"


def link_table(
    topology: Topology,
    amounts: Mapping[DirectedLink, int],
    *,
    title: str,
    beside: Mapping[str, Mapping[DirectedLink, int]] | None = None,
) -> Table:
    """Lay out ``amounts`` (bytes) for rich, a row for each link; the one that its bytes keep busy longest is marked.

    ``beside``: other amounts to compare with, by what stands above their columns: the bytes of the busier way.

    >>> from syncline.topology import DirectedLink
    >>> link_table(Topology.flat(2, rate=1e6), {DirectedLink("h0", "up"): 4096}, title="links").row_count
    2
    """
    links = network_links(topology)
    seconds = {name: _busy_s(name, link, amounts) for name, link, _ in links}
    busiest_s = max(seconds.values(), default=0.0)
    others = beside or {}
    above = "\n" if others else ""
    own = [f"{above}{heading}" for heading in ("up", "down", "rate", "needs")]
    compared = [heading for other in others for heading in (f"{other}\nbytes", "\nneeds")]
    table = new_table("link above", *own, *compared, title=title, collapse_padding=True)
    for name, link, depth in links:
        table.add_row(
            "  " * depth + name,
            format_size(amounts.get(DirectedLink(name, "up"), 0)),
            format_size(amounts.get(DirectedLink(name, "down"), 0)),
            format_rates(link),
            _format_s(seconds[name]),
            *(cell for each in others.values() for cell in _busier_way(name, link, each)),
            style="bold yellow" if seconds[name] == busiest_s > 0 else "",
        )
    return table


def _busier_way(name: str, link: Link, amounts: Mapping[DirectedLink, int]) -> tuple[str, str]:
    most = max(amounts.get(DirectedLink(name, "up"), 0), amounts.get(DirectedLink(name, "down"), 0))
    return format_size(most), _format_s(_busy_s(name, link, amounts))


def _format_s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds > 0 else "-"


def _busy_s(name: str, link: Link, amounts: Mapping[DirectedLink, int]) -> float:
    """How long the link is busy at least; its two directions work at once."""
    up_s = amounts.get(DirectedLink(name, "up"), 0) / link.up_bytes_per_s
    down_s = amounts.get(DirectedLink(name, "down"), 0) / link.down_bytes_per_s
    return max(up_s, down_s)


def new_console() -> Console:
    """Return a console for what commands tell people, no wider than what is read with ease."""
    console = Console(highlight=False)
    console.width = min(console.width, MAX_WIDTH)
    return console


def answer(told: Any, show: Callable[[Console], None], *, as_json: bool) -> None:
    """Print what a command found: ``told`` for programs, or for people what ``show`` makes of it."""
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        show(new_console())


def new_table(*headings: str, num_texts: int = 1, no_wrap: bool = False, **settings: Any) -> Table:
    """Return a table for rich, as all commands have it: texts in the first columns, and in the others numbers."""
    table = Table(title_justify="left", box=box.SIMPLE_HEAD, **{"pad_edge": False, **settings})
    for place, heading in enumerate(headings):
        justify: Literal["left", "right"] = "left" if place < num_texts else "right"
        table.add_column(heading, justify=justify, no_wrap=no_wrap, overflow="ellipsis" if no_wrap else "fold")
    return table


def draw_line_plot(
    x: Sequence[float], y: Sequence[float], *, width: int = 60, height: int = 10, x_label: str = ""
) -> str:
    """Draw ``y`` over ascending ``x``; ``width`` and ``height`` are in characters, without the axes.

    Several points that fall on one column are averaged, so a noisy curve stays readable. Raises ``ValueError`` where
    ``x`` and ``y`` differ in length.

    >>> len(draw_line_plot([0.0, 1.0, 2.0], [3.0, 1.0, 2.0], width=20, height=4).splitlines())
    5
    """
    if not x:
        return "(nothing to plot)"
    means = _column_means(x, y, width * DOTS_ACROSS)
    low, high = min(means.values()), max(means.values())
    rows = _rows(means, low, high, height * DOTS_DOWN)
    cells = [[BRAILLE_BLANK] * width for _ in range(height)]
    for column, row in _joined(rows):
        cells[row // DOTS_DOWN][column // DOTS_ACROSS] |= DOT_BITS[column % DOTS_ACROSS][row % DOTS_DOWN]
    return "\n".join([*_body(cells, low, high), _foot(x, width, x_label)])


def _column_means(x: Sequence[float], y: Sequence[float], num_columns: int) -> dict[int, float]:
    span = (x[-1] - x[0]) or 1.0
    columns: dict[int, list[float]] = {}
    for here, value in zip(x, y, strict=True):
        columns.setdefault(round((here - x[0]) / span * (num_columns - 1)), []).append(value)
    return {column: sum(values) / len(values) for column, values in sorted(columns.items())}


def _rows(means: dict[int, float], low: float, high: float, num_rows: int) -> dict[int, int]:
    span = (high - low) or 1.0
    return {column: round((high - mean) / span * (num_rows - 1)) for column, mean in means.items()}


def _joined(rows: dict[int, int]) -> list[tuple[int, int]]:
    """Join neighbouring points by straight lines; returns the dots as (column, row)."""
    dots = list(rows.items())[:1]
    for (left, from_row), (right, to_row) in zip(list(rows.items())[:-1], list(rows.items())[1:], strict=True):
        steps = max(right - left, abs(to_row - from_row))
        for step in range(1, steps + 1):
            part = step / steps
            dots.append((round(left + (right - left) * part), round(from_row + (to_row - from_row) * part)))
    return dots


def _body(cells: list[list[int]], low: float, high: float) -> list[str]:
    marks = {0: f"{high:.2f}", len(cells) - 1: f"{low:.2f}"}
    margin = max(len(mark) for mark in marks.values())
    return [f"{marks.get(k, ''):>{margin}} ┤{''.join(map(chr, row))}" for k, row in enumerate(cells)]


def _foot(x: Sequence[float], width: int, x_label: str) -> str:
    first, last = f"{x[0]:g}", f"{x[-1]:g} {x_label}".rstrip()
    return f"{'':>6}{first}{last:>{max(1, width - len(first) + len(x_label) // 2)}}"
