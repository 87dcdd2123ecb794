"""A job as it runs, in lines."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from syncline.cli.launcher.terminal import Terminal
from syncline.runtime import communicators_in_memory
from syncline.runtime.live import LINE_EVERY, render, summary, write_view


def rank(number: int, **changes: Any) -> dict[str, Any]:
    told = {"rank": number, "name": f"rank {number}", "phase": "backward", "is_waiting": True, "silent_s": 0.0}
    told |= {"steps": 7, "steps_per_s": 2.5, "samples_per_s": None, "loss": None, "waited": 0.5, "lacked": 0.1}
    return told | changes


VIEW = {
    "seconds": 8.0,
    "ranks": [rank(0), rank(1, waited=0.1, steps=9, loss=0.5, is_waiting=False, silent_s=12.0)],
    "links": [{"link": "a up", "rate": 125e6, "use": 0.9, "lost": 0.03}],
    "said": ["rank 1 holds the others up"],
}


def test_a_job_is_one_line_or_a_table() -> None:
    line = "8 s: step 7 to 9, 2.5 steps/s, loss 0.5, waits 10% (rank 1) to 50%, link of a up 90% full"
    assert summary(VIEW) == line
    assert render(VIEW) == [
        line,
        "rank       step  steps/s  waits  no proc  where",
        "rank 0        7      2.5    50%      10%  waits in backward",
        "rank 1        9      2.5    10%      10%  silent for 12 s, was: backward",
        "link of a up             [##################  ]   90% of 1 Gbit/s, 3% lost",
        "rank 1 holds the others up",
    ]
    many = {**VIEW, "ranks": [rank(number, waited=1 - number / 100) for number in range(64)]}
    shown = render(many, height=12)
    assert len(shown) <= 12
    assert shown[-3] == "... and 59 that wait more"
    assert shown[2].startswith("rank 59"), "who waits least is shown"


def test_a_view_goes_to_a_file_or_now_and_then_to_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_view(VIEW, str(tmp_path / "view.json"))
    assert json.loads((tmp_path / "view.json").read_text()) == VIEW
    assert len(list(tmp_path.iterdir())) == 1
    write_view(VIEW, str(tmp_path / "none" / "view.json"))  # it must not end the job
    for _ in range(2 * LINE_EVERY):
        write_view(VIEW, "on")
    assert capsys.readouterr().err.count("syncline: 8 s: step 7 to 9") == 2


def test_what_is_shown_stays_below_what_is_written() -> None:
    out = io.StringIO()
    terminal = Terminal(stdout=out, stderr=out)
    terminal.show(["one", "two"])
    terminal.write_lines(["text"], label="", colour=0, is_error=False)
    terminal.show([])
    assert out.getvalue() == "one\ntwo\n\x1b[2F\x1b[Jtext\none\ntwo\n\x1b[2F\x1b[J"
    assert not terminal.is_screen


@pytest.mark.usefixtures("usual_signal")
def test_rank_0_lets_all_ranks_write_their_last_calls(tmp_path: Path) -> None:
    communicators = communicators_in_memory(2)
    try:
        for communicator in communicators:
            communicator.write_flight(tmp_path)
        communicators[0].dump_flights()
        works = [communicator.barrier() for communicator in communicators]
        for work in works:
            work.wait()
        assert {path.name for path in tmp_path.iterdir()} == {"flight_rank_0", "flight_rank_1"}
        assert communicators[1].view() is None
    finally:
        for communicator in communicators:
            communicator.close()
