"""Ranks as threads of one process, on the in-memory fabric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import thread_fleets
from syncline.runtime import Communicator


@pytest.fixture
def run_fleets() -> Callable[..., list[Any]]:
    """Run a function on every rank (see `thread_fleets`)."""
    return thread_fleets.run_fleets


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small buckets be cut into slices, as large ones are."""
    monkeypatch.setattr(Communicator, "bucket_slice_bytes", lambda _, num_bytes: max(1, num_bytes // 3))
