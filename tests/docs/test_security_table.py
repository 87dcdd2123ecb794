"""The guide says who can do what to a job, and names tests that exist."""

import pytest
from markdown_pages import ROOT, check_row, rows_of

ROWS = rows_of((ROOT / "docs" / "guide" / "security.md").read_text(), "who")
WHO = {
    "another user of the machine",
    "a machine on the network, without the secret",
    "who can read the traffic",
    "who can change the traffic",
    "a peer of the job",
    "whoever writes the checkpoint",
    "whoever writes the topology file",
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.partition(" | ")[0])
def test_a_row_names_tests_that_exist(row):
    check_row(row)


def test_nobody_is_left_out():
    assert {row.partition(" | ")[0] for row in ROWS} == WHO


@pytest.mark.parametrize(
    "row", ["a | b | c | ", "a | b | c | `tests/none.py`", "a | b |  | `README.md`", "a | b | `README.md`"]
)
def test_a_row_that_says_less_is_found(row):
    with pytest.raises(AssertionError):
        check_row(row)
