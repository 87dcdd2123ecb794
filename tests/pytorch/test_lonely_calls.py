"""Calls that every rank must make, made by one alone: the errors on all ranks say so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from syncline.errors import DeadlineError, MismatchError, SynclineError
from syncline.pytorch.checkpoint import load_checkpoint, save_checkpoint
from syncline.pytorch.checkpoint.loading import resume
from syncline.pytorch.control import clip_grad_norm_
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.updates import AllReduce, Sharded, UpdateRule

CALLS: dict[str, Callable[[Path, nn.Module, Any], object]] = {
    "save_checkpoint": save_checkpoint,
    "load_checkpoint": load_checkpoint,
    "resume": resume,
    "optimizer.state_dict": lambda _, __, optimizer: optimizer.state_dict(),
    "clip_grad_norm_": lambda _, model, __: clip_grad_norm_(model, 1.0),
}


WORLD = 3
FAILURES = (MismatchError, DeadlineError)
"""Closing a fleet raises what went wrong since the last step once more."""


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("save_checkpoint", AllReduce()),
        ("save_checkpoint", Sharded()),
        ("load_checkpoint", AllReduce()),
        ("load_checkpoint", Sharded()),
        ("resume", AllReduce()),
        ("resume", Sharded()),
        ("optimizer.state_dict", Sharded()),
        ("clip_grad_norm_", Sharded()),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.parametrize("lonely_rank", [0, 2])
def test_the_error_on_every_rank_says_to_call_it_on_every_rank(
    lonely_rank: int, name: str, rule: UpdateRule, run_fleets: Any, tmp_path: Path
) -> None:
    have_failed = threading.Barrier(WORLD)
    errors: list[SynclineError] = []

    def go_on(model: nn.Module, optimizer: Any) -> None:
        for _ in range(10):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def body(fleet: Fleet) -> None:
        torch.manual_seed(0)
        module = nn.Linear(4, 4)
        model, optimizer = distribute(module, torch.optim.AdamW(module.parameters()), rule, fleet=fleet)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        with pytest.raises(FAILURES) as caught:
            CALLS[name](tmp_path / "run", model, optimizer) if fleet.rank == lonely_rank else go_on(model, optimizer)
        errors.append(caught.value)
        have_failed.wait(60)

    run_fleets(WORLD, body, timeout_s=30.0, accept=FAILURES)
    assert len(errors) == WORLD
    for error in errors:
        assert str(error).startswith(f"{name}() must be called on every rank; rank {lonely_rank} (host memory) called")
        assert error.ranks_at_fault == (lonely_rank,)
