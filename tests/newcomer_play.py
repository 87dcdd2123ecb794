"""Plays of jobs that lose ranks and take newcomers in (see `newcomer_process`), and what must come of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from growth_faults import batch
from newcomer_process import PERIOD, model_of
from rank_scripts import run_script

SCRIPT = Path(__file__).with_name("newcomer_process.py")
KILLED = -9


def play(folder: Path, number: int, plan: dict[str, Any]) -> tuple[list[tuple[int, str]], list[list[Any]]]:
    """Run a plan (see the script) with ``number`` processes; return what each wrote, and what each told in JSON."""
    for newcomer in plan["come"]:
        os.mkfifo(folder / f"come-{newcomer}")
    results = run_script(SCRIPT, number, str(folder), json.dumps({"leave": {}} | plan))
    told = [
        [json.loads(line.removeprefix("told ")) for line in output.splitlines() if line.startswith("told ")]
        for _, output in results
    ]
    return results, told


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
