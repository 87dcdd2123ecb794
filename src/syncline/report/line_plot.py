"""A curve as text: braille characters, each a grid of two by four dots, with numbers on the axes."""

from __future__ import annotations

from collections.abc import Sequence

BRAILLE_BLANK = 0x2800
# The bit of each dot, by column (left, right) and row (top to bottom).
DOT_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
DOTS_ACROSS, DOTS_DOWN = 2, 4


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
