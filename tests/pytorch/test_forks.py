"""Ranks that fork: a child neither uses its parent's fleet, nor hides its death, nor hangs at its own end."""

from __future__ import annotations

from pathlib import Path

from rank_scripts import run_script

SCRIPT = Path(__file__).with_name("fork_process.py")


def test_a_child_that_touches_the_fleet_is_told_so_and_ends() -> None:
    for status, output in run_script(SCRIPT, 2, "child", finalizes=True):
        assert status == 0, output
        told = [line.rsplit(" ", 1)[1] for line in output.splitlines() if line.startswith("child was told")]
        assert told == ["all_reduce", "barrier", "statistics"], output
        assert "child ended with 0" in output


def test_a_child_that_sends_or_receives_is_told_so() -> None:
    """Messages between ranks of one machine pass through memory that a child does not have."""
    for status, output in run_script(SCRIPT, 2, "group_child", finalizes=True):
        assert status == 0, output
        told = [line.rsplit(" ", 1)[1] for line in output.splitlines() if line.startswith("child was told")]
        assert told == ["send", "receive"], output
        assert "child ended with 0" in output


def test_a_child_keeps_no_socket() -> None:
    for status, output in run_script(SCRIPT, 2, "sockets", finalizes=True):
        assert status == 0, output
        assert "had some: True kept: 0" in output


def test_a_killed_rank_is_noticed_though_its_workers_live(tmp_path: Path) -> None:
    """By the kernel, not by silence: that would take longer than this test may."""
    extra = {"SYNCLINE_SILENCE": "600", "SYNCLINE_TIMEOUT": "600"}
    (status, output), (killed, _) = run_script(
        SCRIPT, 2, "workers", str(tmp_path / "pids"), extra=extra, finalizes=True
    )
    assert killed == -9
    assert status == 0, output
    assert "told: rank 1 " in output
    assert "its process died or was killed" in output
