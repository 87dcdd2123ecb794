"""A foreign call that holds the interpreter's lock is no death, and a stopped process still is one."""

from __future__ import annotations

from pathlib import Path

from rank_scripts import run_script

SCRIPT = Path(__file__).with_name("held_process.py")
QUICK = {"SYNCLINE_SILENCE": "1.5"}


def test_a_rank_whose_interpreter_is_held_is_waited_for() -> None:
    for status, output in run_script(SCRIPT, 2, "held", extra=QUICK):
        assert status == 0, output
        assert "all are there" in output


def test_a_rank_that_is_stopped_is_lost(tmp_path: Path) -> None:
    (status, output), (killed, _) = run_script(SCRIPT, 2, "stopped", str(tmp_path / "process"), extra=QUICK)
    assert status == 0, output
    assert killed == -9
    assert "told: rank 1 " in output
    assert "sent nothing for" in output
