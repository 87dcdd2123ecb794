"""Ranks as threads of one process, on the in-memory fabric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import thread_fleets


@pytest.fixture
def run_fleets() -> Callable[..., list[Any]]:
    """Run a function on every rank (see `thread_fleets`)."""
    return thread_fleets.run_fleets
