"""What is said of a running job whose ranks were asked what they do."""

from __future__ import annotations

import base64
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from syncline.cli import explain as command
from syncline.errors import ConfigurationError
from syncline.report.job_trace import read_examination


def answer(rank: int, place: int, *, is_over: bool, seconds: float = 40.0) -> str:
    call = {"members": [0, 1, 2], "stream": 0, "place": place, "what": f"all_reduce {place}"}
    told = {
        "rank": rank,
        "name": f"rank {rank}",
        "pid": 7,
        "phase": "backward",
        "is_waiting": not is_over,
        "steps": 3,
        "calls": [call | {"is_over": is_over, "seconds": seconds}],
        "thread": "1",
        "stacks": {"1": ["read_batch (train.py:8)"], "2": ["other (x.py:1)"]},
        "events": [],
    }
    return base64.b64encode(zlib.compress(json.dumps(told).encode())).decode()


STUCK: dict[str, Any] = {
    "answers": {"0": answer(0, 5, is_over=False), "1": answer(1, 4, is_over=True)},
    "absent": [{"rank": 2, "name": "rank 2", "why": "its process is stopped", "silent_s": 30.0, "pid": os.getpid()}],
}


def test_who_has_not_begun_a_call_and_who_is_silent_are_told() -> None:
    held = read_examination(STUCK).held()
    assert held == {
        "rank 0 is in all_reduce 5 since 40 s; rank 1 has not begun it: backward; rank 2 gives no answer.": {1, 2}
    }


def test_nothing_is_said_of_calls_that_are_young_and_nonsense_is_refused() -> None:
    young = {"answers": {"0": answer(0, 5, is_over=False, seconds=0.5), "1": answer(1, 4, is_over=True)}, "absent": []}
    assert not read_examination(young).held()
    everyone = {str(rank): answer(rank, 5, is_over=False) for rank in range(3)}
    (line,) = read_examination({"answers": everyone, "absent": []}).held()
    assert "all of its ranks have begun it" in line
    for nonsense in ({}, {"answers": {"0": "no"}, "absent": []}, {"answers": {"x": ""}, "absent": []}):
        with pytest.raises(ConfigurationError, match="cannot be read"):
            read_examination(nonsense)


def test_the_command_shows_the_stack_of_the_rank_that_is_behind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def ask(*question: object, answer_s: float) -> dict[str, Any]:
        asked.append((*question, answer_s))
        return STUCK | {"namespace": command.process_namespace()}

    monkeypatch.setattr(command, "ask", ask)
    monkeypatch.setattr(command.shutil, "which", lambda _: None)
    command.explain_job("9470", seconds=1.0)
    out = capsys.readouterr().out
    assert asked == [("9470", "/explain?seconds=1", None, 1.0)]
    assert "rank 2 gives no answer, and has told nothing for 30 s: its process is stopped." in out
    assert "rank 1, process 7, training thread, innermost call first:\n    read_batch (train.py:8)" in out
    assert "other (x.py:1)" not in out
    assert f"rank 2 is process {os.getpid()}; py-spy, if it were installed here, shows its stacks" in out


SPIED = """\
echo "$@" > "$(dirname "$0")/asked"
echo "Process 7: python train.py"
echo
echo 'Thread 7 (idle): "MainThread"'
echo "    hold (train.py:6)"
"""


@pytest.mark.parametrize(
    ("script", "state", "shown"),
    [
        (
            SPIED,
            "",
            'rank 2, as py-spy sees it:\n    Process 7: python train.py\n    \n    Thread 7 (idle): "MainThread"',
        ),
        (SPIED, "its process is stopped", "        hold (train.py:6)"),
        (
            "echo 'Error: Permission Denied' >&2; exit 1",
            "",
            "py-spy cannot look at it, often for want of rights:\n    Err",
        ),
        ("echo 'Process 7: python train.py'", "", "py-spy cannot look at it, often for want of rights:\n    Process 7"),
    ],
)
def test_the_stacks_of_a_silent_rank_are_those_that_py_spy_sees(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    state: str,
    shown: str,
) -> None:
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\n{script}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(command, "process_state", lambda _: state)
    monkeypatch.setattr(command, "ask", lambda *_, **__: STUCK | {"namespace": command.process_namespace()})
    command.explain_job("9470", seconds=1.0)
    assert shown in capsys.readouterr().out
    if script is SPIED:
        asked = f"dump --pid {os.getpid()}" + " --nonblocking" * bool(state)
        assert (tmp_path / "asked").read_text().strip() == asked
