"""Ranks as processes over TCP; one of them is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rank_scripts import run_script

SCRIPT = Path(__file__).with_name("overlapped_process.py")


@pytest.mark.parametrize("deadly_step", [-1, 37])
def test_a_killed_worker_does_not_stop_the_others(deadly_step: int) -> None:
    """Periods of 16 iterations, so step 37 is in the third; rank 1 hosts shards."""
    results = run_script(SCRIPT, 3, str(deadly_step), "16", "96")
    survivors = [rank for rank in range(3) if rank != 1 or deadly_step < 0]
    said = [results[rank][1].strip().splitlines()[-1].split() for rank in survivors]
    for rank, words in zip(survivors, said, strict=True):
        assert results[rank][0] == 0, results[rank][1]
        assert words[0] == "hash", results[rank][1]
        assert words[1] == said[0][1], "parameters differ"
        assert words[-1] == "6"
        assert deadly_step < 0 or "1" in results[rank][1].split("lost")[1].split("periods")[0]
