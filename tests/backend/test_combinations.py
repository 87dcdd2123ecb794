"""Each pair of the table of combinations behaves as the table says: refused on all ranks, told by rank 0, or served."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_groups import run_groups
from torch import nn

from combination_table import NOT_ASKED, REQUESTS, TRAINERS, verdict
from syncline.errors import SynclineError, SynclineWarning
from syncline.pytorch.distribute import distribute
from syncline.pytorch.environment import BackendOptions
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.notices import Notice, Preemption
from syncline.pytorch.phased import phase
from syncline.updates.combinations import TrainingRequest
from thread_fleets import run_fleets

PAIRS = [(trainer, request) for trainer in TRAINERS for request in REQUESTS if (trainer, request) not in NOT_ASKED]
OF_TOPOLOGIES = {"phase()", "process groups"}
"""Who knows priorities from the topology alone."""


def ask(trainer: str, request: TrainingRequest, folder: Path, fleet: Fleet) -> None:
    """Begin what ``trainer`` stands for, with all that is asked for."""
    if request.preemption:
        fleet.preemption = Preemption(Notice[request.preemption.upper()])
    if trainer == "phase()":
        phase([nn.Linear(4, 4), nn.Linear(4, 4)], torch.optim.Adam, loss=nn.functional.mse_loss, fleet=fleet)
        return
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    distribute(
        model,
        torch.optim.Adam(model.parameters()),
        TRAINERS[trainer],
        priorities=request.priorities or True,
        elastic=request.elastic or False,
        save_on_failure=folder / "saved" if request.saves_on_failure else None,
        check_every=10 if request.checks else None,
        fleet=fleet,
    )


def run(trainer: str, request: TrainingRequest, folder: Path) -> list[Any]:
    """Return the errors of all ranks that are refused."""
    topology = request.topology
    if trainer in OF_TOPOLOGIES:
        topology = replace(topology, priorities=request.priorities)
    if trainer != "process groups":
        return run_fleets(topology, partial(ask, trainer, request, folder), accept=SynclineError)
    try:
        return run_groups(2, lambda _: None, options=BackendOptions(topology=topology))
    except SynclineError as error:
        return [error] * 2


@pytest.mark.parametrize(("trainer", "name"), PAIRS)
def test_a_pair_is_refused_told_or_served(
    trainer: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, expected = REQUESTS[name], verdict(trainer, name)
    if request.elastic is not None and trainer == "phase()":
        monkeypatch.setenv("SYNCLINE_ELASTIC", "on")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        errors = run(trainer, request, tmp_path)
    told = [str(one.message) for one in caught if one.category is SynclineWarning]
    if expected and expected[0].is_refused:
        said = re.escape(f"{expected[0].setting} does not go with {trainer.partition('(')[0]}")
        assert [bool(re.match(said, str(error))) for error in errors] == [True, True]
        assert all(expected[0].remedy in str(error) for error in errors)
        assert not told
    else:
        assert errors == [None, None]
        assert [text for text in told if "ignored" in text] == told
        assert len(told) == len(expected), "one rank tells, once"
        assert all(one.remedy in text for one, text in zip(expected, told, strict=True))
