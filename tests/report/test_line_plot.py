"""Curves drawn with characters."""

from syncline.report import draw_line_plot


def dots_of(plot):
    """The drawn dots as (column, row), counted from the upper left."""
    dots = set()
    for y, line in enumerate(line for line in plot.splitlines() if "┤" in line):
        for x, character in enumerate(line.split("┤")[1]):
            bits = ord(character) - 0x2800
            places = {0x01: (0, 0), 0x02: (0, 1), 0x04: (0, 2), 0x40: (0, 3)}
            places |= {0x08: (1, 0), 0x10: (1, 1), 0x20: (1, 2), 0x80: (1, 3)}
            dots |= {(2 * x + dx, 4 * y + dy) for bit, (dx, dy) in places.items() if bits & bit}
    return dots


def test_a_straight_line_is_straight():
    plot = draw_line_plot(range(8), [7 - k for k in range(8)], width=4, height=2)
    assert dots_of(plot) == {(k, k) for k in range(8)}


def test_axes_carry_the_extremes():
    lines = draw_line_plot([0, 400], [1.5, 5.5], width=20, height=3, x_label="steps").splitlines()
    assert lines[0].startswith("5.50 ┤")
    assert lines[2].startswith("1.50 ┤")
    assert lines[3].split() == ["0", "400", "steps"]


def test_points_in_one_column_are_averaged():
    plot = draw_line_plot([0, 0, 1], [0.0, 2.0, 1.0], width=1, height=1)
    assert dots_of(plot) == {(0, 0), (1, 0)}


def test_neighbours_are_joined_without_gaps():
    dots = dots_of(draw_line_plot([0, 1], [0.0, 1.0], width=10, height=5))
    assert {column for column, _ in dots} == set(range(20))
    assert {row for _, row in dots} == set(range(20))


def test_little_data_is_no_error():
    assert draw_line_plot([], []) == "(nothing to plot)"
    assert len(dots_of(draw_line_plot([3], [2.0], width=5, height=2))) == 1
