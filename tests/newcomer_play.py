"""Plays of jobs that lose ranks and take newcomers in (see `newcomer_process`), and what must come of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore

from growth_faults import batch
from newcomer_process import PERIOD, model_of
from rank_scripts import run_script

SCRIPT = Path(__file__).with_name("newcomer_process.py")
KILLED = -9
DEATHS = pytest.mark.parametrize(
    ("who", "place", "left", "told_newcomer"),
    [
        (4, "take", [0, 1, 2, 3], ""),
        (4, "resume", [0, 1, 2, 3], ""),
        (1, "meet", [0, 2, 3], "PeerLostError: rank 1"),
        (0, "give", [1, 2, 3], "PeerLostError: rank 0"),
    ],
)
"""Who dies at which place of a switch, of four members and newcomer 4, which is told so; who is left."""
SPLITS = pytest.mark.parametrize(
    ("miss", "num_come", "left"),
    [([1, 2, 3], 3, [1, 2, 3]), ([3], 1, [0, 1, 2, 4])],
    ids=["most go back", "one goes back"],
)
"""Which of four members go back once all have met, with how many newcomers; who goes on, whatever newcomers say."""
Played = tuple[list[tuple[int, str]], list[list[Any]]]


def play(folder: Path, number: int, plan: dict[str, Any], *, script: Path = SCRIPT) -> Played:
    """Run a plan (see the script) with ``number`` processes; return what each wrote, and what each told in JSON."""
    for newcomer in plan["come"]:
        os.mkfifo(folder / f"come-{newcomer}")
    results = run_script(script, number, str(folder), json.dumps({"leave": {}} | plan))
    told = [
        [json.loads(line.removeprefix("told ")) for line in output.splitlines() if line.startswith("told ")]
        for _, output in results
    ]
    return results, told


def play_return(folder: Path, victim: int, plan: dict[str, Any], *, script: Path = SCRIPT) -> tuple[Played, list[int]]:
    """Let one of three members be killed, and newcomer 3 come; return what is played, and who is left."""
    plan = {"members": 3, "leave": {str(victim): 7}, "come": {"3": 8}, "door": 1, "switches": 1, "last": 2} | plan
    results, told = play(folder, 4, plan, script=script)
    assert [status for status, _ in results] == [KILLED if own == victim else 0 for own in range(4)], results
    return (results, told), [*(own for own in range(3) if own != victim), 3]


def check_return(played: Played, left: list[int], victim: int) -> None:
    """All steps were those of one process over the batches of who was there, and one training is left of two."""
    (results, told), door = played, 1
    all_left = [told[own] for own in left]
    came = told[3][0][0]
    assert members_at_last(all_left) == left
    assert told[door][-1] == {"changes": [[[victim], [], 9], [[], [3], came + 1]], "num_updaters": 1}
    assert f"syncline: rank 3 came in after step {came}; 3 ranks go on in epoch 1" in results[left[0]][1]
    check_replayed(all_left, unlike=range(7, came + 1))


def play_death(
    folder: Path, death: tuple[int, str, list[int], str], plan: dict[str, Any], *, script: Path = SCRIPT
) -> list[list[Any]]:
    """Play one of :data:`DEATHS`, after which newcomer 5 comes in; return what those told that are left then."""
    who, place, left, told_newcomer = death
    plan = {
        "members": 4,
        "die": {str(who): place},
        "come": {"4": 4, "5": 0},
        "door": 2,
        "switches": 2,
        "last": 2,
    } | plan
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results, told = play(folder, 6, plan | {"meeting_port": store.port}, script=script)
    for own, (status, output) in enumerate(results):
        assert status == (KILLED if own == who else 0 if own in (*left, 5) else 1), results
        assert own != 4 or told_newcomer in output
    return [told[own] for own in (*left, 5)]


def play_split(
    folder: Path, split: tuple[list[int], int, list[int]], plan: dict[str, Any], *, script: Path = SCRIPT
) -> list[list[Any]]:
    """Play one of :data:`SPLITS`; return what those told that go on. The others hear that they are too few."""
    miss, num_come, left = split
    come = {str(own): 4 for own in range(4, 4 + num_come)}
    plan = {"members": 4, "miss": miss, "come": come, "together": num_come, "switches": 1, "last": 3} | plan
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results, told = play(folder, 4 + num_come, plan | {"meeting_port": store.port}, script=script)
    for own, (status, output) in enumerate(results):
        assert status == (0 if own in left else 1), results
        assert own in left or "QuorumLostError" in output or (own >= 4 and "PeerLostError" in output), output
    return [told[own] for own in left]


def ends_of(told: list[list[Any]]) -> dict[int, tuple[list[int], list[float]]]:
    """All had the same members, parameters and rates when a period ended; return the first two by iteration."""
    by_iteration: dict[int, list[Any]] = {}
    for lines in told:
        for line in lines:
            if isinstance(line, list):
                known = by_iteration.setdefault(line[0], line[1:4])
                assert known == line[1:4], f"{line[0]}: {known[0]} and {line[1]}, rates {known[2]} and {line[3]}"
    return {iteration: (line[0], line[1]) for iteration, line in sorted(by_iteration.items())}


def members_at_last(told: list[list[Any]]) -> list[int]:
    """Return who was in the job when the last period ended."""
    ends = ends_of(told)
    return ends[max(ends)][0]


def check_replayed(told: list[list[Any]], *, unlike: range = range(0)) -> None:
    """From one period's end to the next, all steps were those of one process over the batches of all members.

    ``unlike`` are steps in which some of ``fleet.members`` were lost.
    """
    ends, values, num_replayed = ends_of(told), nn.utils.parameters_to_vector(model_of(0).parameters()).tolist(), 0
    members = ends[PERIOD][0]
    for iteration, (now, reached) in ends.items():
        steps = range(iteration - PERIOD + 1, iteration + 1)
        if set(steps).isdisjoint(unlike):
            found = torch.tensor(reached, dtype=torch.float64)
            torch.testing.assert_close(found, replay(values, members, steps), rtol=1e-7, atol=1e-9)
            num_replayed += 1
        values, members = reached, now
    assert num_replayed >= 2, "before and after a change"


def replay(values: list[float], members: list[int], steps: range) -> torch.Tensor:
    """Train in one process over the batches of all members, from ``values`` on."""
    model = model_of(0)
    nn.utils.vector_to_parameters(torch.tensor(values, dtype=torch.float64), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps:
        optimizer.zero_grad()
        for number in members:
            x, y = batch(step, number)
            (nn.functional.mse_loss(model(x), y) / len(members)).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()
