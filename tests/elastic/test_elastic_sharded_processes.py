"""Real processes that shard state with spares and are killed in every place of a step."""

from __future__ import annotations

import signal
from pathlib import Path

from elastic_replay import check_equal, check_replayed, read_logs

from rank_scripts import run_script

SCRIPT = Path(__file__).with_name("elastic_process.py")
KILLED = -signal.SIGKILL


def test_eight_ranks_with_spares_die_one_after_another(tmp_path: Path) -> None:
    """Also rank 0, one before it has what others have stepped already, and one while the state of the last one moves.

    Rank 2 has no spare of the two before it: with rank 4, which has, owner and spare would be lost at once.
    """
    deaths = ["3:1:forward", "0:2:backward", "1:3:apply", "7:4:gather", "6:5:commit", "2:5:moving"]
    results = run_script(SCRIPT, 8, "spares", str(tmp_path), "8", *deaths)
    alive = [rank for rank, (status, _) in enumerate(results) if status == 0]
    assert alive == [4, 5], results
    assert {status for status, _ in results} == {0, KILLED}
    counted = check_equal(read_logs(tmp_path))
    assert counted[7] == [4, 5]
    check_replayed(tmp_path, 4, counted)


def test_owner_and_spare_that_die_at_once_are_named(tmp_path: Path) -> None:
    results = run_script(SCRIPT, 4, "spares", str(tmp_path), "4", "1+3:2:forward")
    assert [status for status, _ in results] == [1, KILLED, 1, KILLED], results
    for rank in (0, 2):
        assert "StateLostError: No rank that is left has the optimizer state of elements" in results[rank][1]
