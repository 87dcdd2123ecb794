"""Real processes that are killed in every place of a step: those that are left train as one process would."""

from __future__ import annotations

import signal
from pathlib import Path

from elastic_replay import check_equal, check_replayed, read_logs

from rank_scripts import run_script

SCRIPT = Path(__file__).with_name("elastic_process.py")
KILLED = -signal.SIGKILL


def test_eight_ranks_die_one_after_another_until_one_is_left(tmp_path: Path) -> None:
    deaths = [
        "3:1:forward",
        "5:2:backward",
        "1:3:between",
        "7:4:commit",
        "6:5:commit",
        "4:5:agreement",  # of the loss of 6
        "2:7:buffers",
    ]
    results = run_script(SCRIPT, 8, str(tmp_path), "10", *deaths)
    assert [status for status, _ in results] == [0, *[KILLED] * 7], results
    assert "members [0] epoch" in results[0][1]
    assert "rank 3 (host h3) lost in step 2; 7 ranks go on in epoch 1" in results[0][1]
    logs = read_logs(tmp_path)
    counted = check_equal(logs)
    assert [len(counted[step]) for step in range(10)] == [8, 7, 6, 6, 4, 2, 2, 2, 1, 1]
    assert logs[0][-1]["changes"][0] == [1, 2, [3]]
    check_replayed(tmp_path, 0, counted)


def test_rank_0_dies_and_others_in_the_way_to_the_next_epoch(tmp_path: Path) -> None:
    results = run_script(SCRIPT, 6, str(tmp_path), "6", "0:2:step", "1:2:entering", "2:4:commit", "5:4:settling")
    alive = [rank for rank, (status, _) in enumerate(results) if status == 0]
    assert alive == [3, 4], results
    counted = check_equal(read_logs(tmp_path))
    assert counted[5] == [3, 4]
    check_replayed(tmp_path, 3, counted)


def test_of_two_ranks_the_lower_one_goes_on(tmp_path: Path) -> None:
    results = run_script(SCRIPT, 2, str(tmp_path), "4", "1:2:forward")
    assert [status for status, _ in results] == [0, KILLED], results
    check_replayed(tmp_path, 0, check_equal(read_logs(tmp_path)))
    results = run_script(SCRIPT, 2, str(tmp_path), "4", "0:2:commit")
    assert [status for status, _ in results] == [KILLED, 1], results
    assert "QuorumLostError: 1 of 2 ranks are in reach: rank 0" in results[1][1]


def test_fewer_than_min_ranks_stop(tmp_path: Path) -> None:
    results = run_script(SCRIPT, 3, "min=3", str(tmp_path), "4", "1:1:backward")
    assert [status for status, _ in results] == [1, KILLED, 1]
    told = [results[rank][1] for rank in (0, 2)]
    assert all("QuorumLostError" in output for output in told), results
    assert any("needs 3 of 3 ranks, but 2 are left" in output for output in told), "the first that stops says why"


def test_a_rank_that_was_stopped_for_too_long_is_told_when_it_comes_back(tmp_path: Path) -> None:
    results = run_script(SCRIPT, 3, str(tmp_path), "5", "1:2:stop", extra={"SYNCLINE_SILENCE": "2"})
    assert [status for status, _ in results] == [0, 1, 0], results
    assert "rank 1 (host h1) lost in step 3; 2 ranks go on" in results[0][1]
    assert "QuorumLostError: 1 of 3 ranks are in reach" in results[1][1]
    assert "who may live and go on elsewhere" in results[1][1]
    logs = read_logs(tmp_path)
    assert [entry["step"] for entry in logs[1]] == [0, 1], "it made no step after the others had gone on"
    check_replayed(tmp_path, 0, check_equal(logs))
