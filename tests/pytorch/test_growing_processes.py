"""A job of real processes that shrinks and grows: the same parameters on all after each step, on newcomers too."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from growing_process import model_of, optimizer_of, scheduler_of
from torch import nn
from torch.distributed import TCPStore

from growth_faults import batch
from rank_scripts import run_script

SCRIPT = Path(__file__).with_name("growing_process.py")
KILLED = -9
RULES = ["all-reduce", "spares"]


def play(folder: Path, number: int, plan: dict[str, Any]) -> tuple[list[tuple[int, str]], list[list[Any]]]:
    """Run a plan (see the script) with ``number`` processes; return what each wrote, and what each told in JSON."""
    for newcomer in plan["come"]:
        os.mkfifo(folder / f"come-{newcomer}")
    results = run_script(SCRIPT, number, str(folder), json.dumps(plan))
    told = [
        [json.loads(line.removeprefix("told ")) for line in output.splitlines() if line.startswith("told ")]
        for _, output in results
    ]
    return results, told


def check_equal(told: list[list[Any]]) -> dict[int, list[int]]:
    """All that live had the same parameters and rates after each step; return whose batches counted, by step."""
    return {step: entries[0][0] for step, entries in _by_step(told).items()}


def check_replayed(folder: Path, own: int, told: list[list[Any]]) -> None:
    """The parameters of a process at its end are those of one process that trains with whose batches counted."""
    model = model_of(0)
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    for step, entries in _by_step(told).items():
        counted = entries[0][0]
        optimizer.zero_grad()
        for number in counted:
            x, y = batch(step, number)
            (nn.functional.mse_loss(model(x), y) / len(counted)).backward()
        optimizer.step()
        scheduler.step()
    found = torch.load(folder / f"end-{own}.pt")
    for name, value in model.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-7, atol=1e-9)


def _by_step(told: list[list[Any]]) -> dict[int, list[Any]]:
    """Return what was told of each step, but for the last one of a killed process: the others may make it without."""
    by_step: dict[int, list[Any]] = defaultdict(list)
    for lines in told:
        is_killed = bool(lines) and isinstance(lines[-1], list)
        for line in lines[: len(lines) - is_killed]:
            if isinstance(line, list):
                by_step[line[0]].append(line[1:])
    for step, entries in by_step.items():
        assert all(entry == entries[0] for entry in entries), f"step {step}: {entries}"
    return dict(sorted(by_step.items()))


@pytest.mark.parametrize("rule", RULES)
def test_a_newcomer_is_given_all_that_it_lacks(rule: str, tmp_path: Path) -> None:
    plan = {"rule": rule, "members": 2, "leave": {}, "die": {}, "come": {"2": 2}, "whole": [3, 4]}
    results, told = play(tmp_path, 3, plan)
    assert [status for status, _ in results] == [0, 0, 0], results
    members = check_equal(told)
    first = told[2][0][0]
    assert members[first - 2] == [0, 1]
    assert members[first] == [0, 1, 2], "it takes part from the first step on"
    assert told[0][-1]["changes"] == [[[], [2], first]]
    assert [lines[-1]["num_updaters"] for lines in told] == [1, 1, 1], "what has the memory of the smaller job is gone"
    assert f"syncline: rank 2 came in after step {first - 1}; 3 ranks go on in epoch 1" in results[0][1]
    check_replayed(tmp_path, 2, told)


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
    check_replayed(tmp_path, 1, told)


def test_a_job_with_spares_loses_a_rank_and_grows_beyond_what_it_was(tmp_path: Path) -> None:
    plan = {"rule": "spares", "members": 4, "leave": {"1": 3}, "die": {}, "come": {"4": 4, "5": 6}, "whole": [5, 3]}
    results, told = play(tmp_path, 6, plan)
    assert [status for status, _ in results] == [0, KILLED, 0, 0, 0, 0], results
    members = check_equal(told)
    assert members[2] == [0, 1, 2, 3]
    assert members[3] == [0, 2, 3]
    assert sorted(members[max(members)]) == [0, 2, 3, 4, 5]
    check_replayed(tmp_path, 5, told)


@pytest.mark.parametrize(
    ("rule", "who", "place", "left", "told_newcomer"),
    [
        ("all-reduce", 4, "take", [0, 1, 2, 3], ""),
        ("all-reduce", 1, "meet", [0, 2, 3], "PeerLostError: rank 1"),
        ("all-reduce", 0, "give", [1, 2, 3], "PeerLostError: rank 0"),
        ("spares", 0, "give", [1, 2, 3], "PeerLostError: rank 0"),
        ("spares", 4, "admit", [0, 1, 2, 3], ""),
        ("spares", 2, "admitted", [0, 1, 3, 4], ""),
    ],
)
def test_whoever_dies_in_a_switch_those_that_live_go_on(
    tmp_path: Path, rule: str, who: int, place: str, left: list[int], told_newcomer: str
) -> None:
    plan = {"rule": rule, "members": 4, "leave": {}, "die": {str(who): place}, "come": {"4": 2}}
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results, told = play(tmp_path, 5, plan | {"whole": [len(left), 3], "meeting_port": store.port})
    for own, (status, output) in enumerate(results):
        assert status == (KILLED if own == who else 0 if own in left else 1), results
        assert own != 4 or told_newcomer in output
    members = check_equal([told[own] for own in left])
    assert members[max(members)] == left
    check_replayed(tmp_path, left[-1], told)


@pytest.mark.parametrize(
    ("miss", "num_come", "left"),
    [([1, 2, 3], 3, [1, 2, 3]), ([3], 1, [0, 1, 2, 4]), ([2, 3, 4], 1, [])],
    ids=["most go back", "one goes back", "half go back and the newcomer leaves"],
)
def test_members_that_are_split_between_two_fabrics_go_on_in_one(
    tmp_path: Path, miss: list[int], num_come: int, left: list[int]
) -> None:
    """Whatever newcomers say: where most of the members went back, rank 0 stops, though four of seven are with it.

    Where neither part is enough, all stop, whoever waits for a newcomer too.
    """
    come = {str(own): 2 for own in range(4, 4 + num_come)}
    plan = {"members": 4, "leave": {}, "die": {}, "miss": miss, "come": come, "together": num_come}
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results, told = play(tmp_path, 4 + num_come, plan | {"whole": [len(left), 3], "meeting_port": store.port})
    for own, (status, output) in enumerate(results):
        assert status == (0 if own in left else 1), results
        assert own in left or ("PeerLostError" if own in miss and own >= 4 else "QuorumLostError") in output
    members = check_equal([told[own] for own in left])
    if left:
        assert members[max(members)] == left
        check_replayed(tmp_path, left[0], [told[own] for own in left])
