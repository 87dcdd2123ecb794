"""Ranks at a segment that are killed or stopped in the middle of a call; and nothing is left after a close."""

import re
from pathlib import Path

import pytest

from rank_scripts import run_struck
from syncline.runtime.shared_memory.opening import can_share

pytestmark = pytest.mark.skipif(not can_share(2), reason="this platform has no segment")

VICTIM = 2


@pytest.mark.parametrize(
    ("signal_name", "reason"), [("SIGKILL", "its process died or was killed"), ("SIGSTOP", "sent nothing for")]
)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_rank_that_dies_or_freezes_is_named_by_all_others(tmp_path, signal_name, reason, moment):
    """Struck after it has put up its slot header, it has done its part of the call.

    Then the call is over for those who read that before they hear of the death, and the next one fails.
    """
    program = Path(__file__).with_name("shared_memory_rank_process.py")
    lines, _ = run_struck(program, tmp_path, 4, VICTIM, signal_name, moment)
    assert len(lines) == 3
    steps = "5" if moment == "before" else "[56]"
    for line in lines:
        assert line["error"] == "PeerLostError", line
        assert "rank 2 (host h2)" in line["text"]
        assert re.search(rf"during all_reduce, step {steps}\b", line["text"])
        assert reason in line["text"]
        assert line["mapped"] == 0
