"""Tables with a column of tests name at least one in each row, and each of them exists, with its parameters."""

import os
import re
import subprocess
import sys

import pytest
from markdown_pages import ROOT

FOLDERS = ("tests/backend", "tests/examples", "tests/frameworks", "tests/launchers", "tests/pytorch", "tests/updates")
PAGES = ("docs/backend.md", "docs/frameworks.md", "docs/launchers/README.md", "docs/torch-tests.md")
TABLE = re.compile(r"^\|(?P<head>.*)\|\n\|[-|]+\|\n(?P<rows>(?:\|.*\|\n)+)", re.MULTILINE)


def rows_with_tests(text):
    """Return each row of the tables that have such a column, and the names in it."""
    found = []
    for table in TABLE.finditer(text):
        head = cells_of(table["head"])
        if column := {"test", "tests"} & set(head):
            place = head.index(column.pop())
            rows = table["rows"].splitlines()
            found += [(row, re.findall(r"`([^`]+)`", cells_of(row.strip("|"))[place])) for row in rows]
    return found


def cells_of(row):
    return [cell.strip() for cell in row.split("|")]


@pytest.fixture(scope="module")
def known():
    """The names of the tests that pytest finds, with and without parameters."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "-p", "no:cacheprovider", *FOLDERS]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = {line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line}
    return whole | {name.partition("[")[0] for name in whole}


@pytest.mark.parametrize("page", PAGES)
def test_each_row_names_tests_that_exist(page, known):
    found = rows_with_tests((ROOT / page).read_text())
    assert found
    for row, names in found:
        assert names, f"no test in {row}"
        assert set(names) <= known, f"{set(names) - known} in {row}"


def test_each_of_pytorchs_tests_is_told_of_once() -> None:
    """By its section, its file and its name: with a counterpart, or with a reason why not."""
    seen = []
    for section in (ROOT / "docs/torch-tests.md").read_text().split("\n## ")[1:]:
        title = section.partition("\n")[0]
        for row in re.findall(r"^\|(.*)\|$", section, re.MULTILINE):
            *file, names, _ = cells_of(row)
            seen += [(title, *file, name) for name in re.findall(r"`(test\w+)`", names)]
    assert len(seen) > 250
    assert sorted(seen) == sorted(set(seen))
