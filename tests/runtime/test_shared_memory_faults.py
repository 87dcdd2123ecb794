"""Ranks at a segment that are killed or stopped in the middle of a call; and nothing is left after a close."""

from pathlib import Path

import pytest

from rank_scripts import run_struck
from syncline.runtime.shared_memory import futex

pytestmark = pytest.mark.skipif(not futex.has_futex(), reason="this platform has no segment")

VICTIM = 2


@pytest.mark.parametrize(("signal_name", "is_silent"), [("SIGKILL", False), ("SIGSTOP", True)])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_rank_that_dies_or_freezes_is_named_by_all_others(tmp_path, signal_name, is_silent, moment):
    """Struck after it has put up its slot header, it has done its part of the call, and the next one fails."""
    program = Path(__file__).with_name("shared_memory_rank_process.py")
    lines, _ = run_struck(program, tmp_path, 4, VICTIM, signal_name, moment)
    assert len(lines) == 3
    step = 5 if moment == "before" else 6
    for line in lines:
        assert line["error"] == "PeerLostError", line
        assert "rank 2 (host h2)" in line["text"]
        assert f"during all_reduce, step {step}" in line["text"]
        # A kill is known from its connections, which it ends at once; only a stop is known from silence.
        assert ("sent nothing for" in line["text"]) is is_silent, line
        assert line["mapped"] == 0
