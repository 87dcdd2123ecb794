"""Checks of speed: each measures on this machine, says what it measured, and fails where a claim does not hold.

They are no part of ``make test``: on a busy machine they fail and nothing is broken. ``make bench-check`` runs them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2] / "tests"
sys.path.extend(str(TESTS / folder) for folder in ("", "runtime", "schedule", "updates/clustered"))
SAID = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Begin with nothing measured; arithmetic has one thread, as in the tests."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config.stash[SAID] = []


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Return what notes a measured figure; all of them are printed at the end, whether the check held or not."""
    lines, name = request.config.stash[SAID], request.node.name

    def note(text: str) -> None:
        lines.append(f"{name}: {text}")

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what was measured."""
    terminalreporter.section("measured")
    for line in config.stash[SAID]:
        terminalreporter.write_line(line)


@pytest.fixture
def as_root() -> None:
    """Fail without root, which network namespaces need."""
    if os.geteuid() != 0:
        pytest.fail("this check makes network namespaces and needs root; run `make bench-check` with sudo")
