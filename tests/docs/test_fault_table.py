"""The page of faults names tests that exist, and every kind of fault that a soak knows."""

import re
import sys

import pytest
from markdown_pages import ROOT, check_row, rows_of

sys.path.append(str(ROOT / "tests" / "soak"))

from soak_plan import KINDS

ROWS = rows_of((ROOT / "docs" / "faults.md").read_text(), "fault")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.partition(" | ")[0].strip("`"))
def test_a_row_names_tests_that_exist(row):
    check_row(row)


def test_every_kind_of_a_soak_has_its_row_and_every_row_its_kind():
    named = {kind for row in ROWS for kind in re.findall(r"`([a-z-]+)`", row.partition(" | ")[0])}
    assert named == set(KINDS)
