"""Those who are left after a loss go on in the same processes: in a group of the old world, or in a new world."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from rank_scripts import run_script

SCRIPT = Path(__file__).with_name("survivors_process.py")


@pytest.mark.parametrize("victim", [0, 1])
def test_survivors_go_on_in_the_same_store_as_one_process_would(victim: int, tmp_path: Path) -> None:
    """A file outlives each rank; the TCPStore of rank 0, all but that."""
    stores = [str(tmp_path / "store")] if victim == 0 else []
    ends = run_script(SCRIPT, 3, str(victim), *stores)
    assert ends[victim][0] == -signal.SIGKILL, ends
    for rank, (status, text) in enumerate(ends):
        if rank != victim:
            assert status == 0, text
            assert text.splitlines()[-2:] == ["in the old world", "in a new world"], text
