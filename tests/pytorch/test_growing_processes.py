"""A job of real processes that shrinks and grows: the same parameters on all after each step, on newcomers too."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from rank_scripts import run_script

SCRIPT = Path(__file__).with_name("growing_process.py")
KILLED = -9


def play(folder: Path, number: int, plan: dict[str, Any]) -> tuple[list[tuple[int, str]], list[list[Any]]]:
    """Run a plan (see the script) with ``number`` processes; return what each wrote, and what each told in JSON."""
    results = run_script(SCRIPT, number, str(folder), json.dumps(plan))
    told = [
        [json.loads(line.removeprefix("told ")) for line in output.splitlines() if line.startswith("told ")]
        for _, output in results
    ]
    return results, told


def check_equal(told: list[list[Any]]) -> dict[int, list[int]]:
    """All that live had the same parameters, rates and members after each step; return the members by step."""
    by_step: dict[int, list[Any]] = defaultdict(list)
    for lines in told:
        for line in lines:
            if isinstance(line, list):
                by_step[line[0]].append(line[1:])
    for step, entries in by_step.items():
        assert all(entry == entries[0] for entry in entries), f"step {step}: {entries}"
    return {step: entries[0][2] for step, entries in sorted(by_step.items())}


def test_a_newcomer_is_given_all_that_it_lacks(tmp_path: Path) -> None:
    plan = {"members": 2, "leave": {}, "die": {}, "come": {"2": 2}, "whole": [3, 4]}
    results, told = play(tmp_path, 3, plan)
    assert [status for status, _ in results] == [0, 0, 0], results
    members = check_equal(told)
    first = told[2][0][0]
    assert members[first - 2] == [0, 1]
    assert members[first] == [0, 1, 2], "it takes part from the first step on"
    assert told[0][-1]["changes"] == [[[], [2], first]]
    assert f"syncline: rank 2 came in after step {first - 1}; 3 ranks go on in epoch 1" in results[0][1]


def test_a_job_shrinks_to_one_rank_and_grows_back_to_eight(tmp_path: Path) -> None:
    """Also without the rank that led at the start: seven processes come to the one that is left."""
    leave = {"5": 2, "6": 2, "7": 2, "3": 3, "4": 3, "0": 4, "2": 5}
    come = {str(own): 5 for own in range(8, 15)}
    plan = {"members": 8, "leave": leave, "die": {}, "come": come, "whole": [8, 3]}
    results, told = play(tmp_path, 15, plan)
    assert [status for status, _ in results] == [KILLED if str(own) in leave else 0 for own in range(15)], results
    members = check_equal([told[1], *told[8:]])
    assert [1] in members.values()
    assert sorted(members[max(members)]) == [1, *range(8, 15)]
    joined = [number for change in told[1][-1]["changes"] for number in change[1]]
    assert joined == [*range(8, 15)]


@pytest.mark.parametrize(
    ("who", "place", "left", "told_newcomer"),
    [
        (4, "take", [0, 1, 2, 3], ""),
        (1, "meet", [0, 2, 3], "PeerLostError: rank 1"),
        (0, "give", [1, 2, 3], "PeerLostError: rank 0"),
    ],
)
def test_whoever_dies_in_a_switch_the_members_that_live_go_on(
    tmp_path: Path, who: int, place: str, left: list[int], told_newcomer: str
) -> None:
    plan = {"members": 4, "leave": {}, "die": {str(who): place}, "come": {"4": 2}, "whole": [len(left), 3]}
    results, told = play(tmp_path, 5, plan)
    for own, (status, output) in enumerate(results):
        assert status == (KILLED if own == who else 0 if own in left else 1), results
        assert own != 4 or told_newcomer in output
    members = check_equal([told[own] for own in left])
    assert members[max(members)] == left
