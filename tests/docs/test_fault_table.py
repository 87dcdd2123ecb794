"""The page of faults names tests that exist, and every kind of fault that a soak knows."""

import re
import sys

import pytest
from markdown_pages import ROOT

sys.path.append(str(ROOT / "tests" / "soak"))

from soak_plan import KINDS

PAGE = (ROOT / "docs" / "faults.md").read_text()
TABLES = re.findall(r"^\| fault .*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
ROWS = [row for table in TABLES for row in re.findall(r"^\| (.*) \|$", table, re.MULTILINE)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.partition(" | ")[0].strip("`"))
def test_a_row_names_tests_that_exist(row):
    fault, how, right, tested = row.split(" | ")
    assert all((fault, how, right))
    names = re.findall(r"`([^`]+)`", tested)
    assert names
    for name in names:
        path, _, test = name.partition("::")
        assert (ROOT / path).is_file(), name
        assert not test or f"def {test}(" in (ROOT / path).read_text(), name


def test_every_kind_of_a_soak_has_its_row_and_every_row_its_kind():
    named = {kind for row in ROWS for kind in re.findall(r"`([a-z-]+)`", row.partition(" | ")[0])}
    assert named == set(KINDS)
