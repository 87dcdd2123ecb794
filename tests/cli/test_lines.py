"""Lines of a rank's output: whole, bounded, and calm while a progress bar redraws itself."""

from hypothesis import given, strategies as st

from syncline.cli.launcher.session import LIMIT_BYTES, REDRAW_INTERVAL_S, LineSplitter


def test_a_partial_line_waits_for_its_end():
    splitter = LineSplitter()
    assert splitter.feed(b"one\ntw", 0.0) == ["one"]
    assert splitter.feed(b"o\n\nthree", 0.0) == ["two", ""]
    assert splitter.finish() == ["three"]
    assert splitter.finish() == []


@given(st.lists(st.text(alphabet="abä€😀 "), min_size=1, max_size=5), st.integers(1, 7))
def test_lines_do_not_depend_on_how_the_bytes_arrive(lines, piece):
    data = "\n".join(lines).encode() + b"\n"
    splitter = LineSplitter()
    found = [line for k in range(0, len(data), piece) for line in splitter.feed(data[k : k + piece], 0.0)]
    assert found == lines


def test_a_line_without_end_is_cut_at_the_limit():
    splitter = LineSplitter()
    assert splitter.feed(b"x" * (2 * LIMIT_BYTES + 1), 0.0) == ["x" * LIMIT_BYTES] * 2
    assert splitter.finish() == ["x"]


def test_only_the_last_state_of_a_redrawn_line_is_shown():
    assert LineSplitter().feed(b"10 %\r50 %\r100 %\n", 0.0) == ["100 %"]


def test_a_line_that_ends_as_on_windows_is_one_line():
    splitter = LineSplitter()
    assert splitter.feed(b"one\r", 0.0) == []
    assert splitter.feed(b"\n", 0.0) == ["one"]


def test_an_unfinished_progress_bar_is_shown_now_and_then():
    splitter = LineSplitter()
    assert splitter.feed(b"\r1 %", 0.0) == []
    assert splitter.feed(b"\r2 %", 0.1) == ["1 %"]
    assert splitter.feed(b"\r3 %", 0.2) == []
    assert splitter.feed(b"\r4 %", 0.1 + REDRAW_INTERVAL_S) == ["3 %"]
    assert splitter.feed(b"\n", 5.0) == ["4 %"]


def test_bytes_that_are_not_text_do_no_harm():
    assert LineSplitter().feed(b"\xff\xfe\n", 0.0) == ["\ufffd\ufffd"]
