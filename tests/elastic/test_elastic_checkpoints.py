"""Checkpoints of a job that loses ranks: whoever is left writes whole ones, and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mortal_fleets import run_mortals
from torch import nn

import syncline
from syncline.pytorch.fleet import Fleet

NUM_RANKS, NUM_STEPS = 3, 4


def make() -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("wait", [True, False], ids=["waited_for", "background"])
@pytest.mark.parametrize("victim", [0, 1])
def test_those_who_are_left_go_on_saving(victim: int, wait: bool, tmp_path: Path) -> None:
    """A rank dies before one of its calls, in training or in a save; the last checkpoint is of the last step."""
    for number, call in enumerate(range(3, 40, 9)):
        folder = tmp_path / str(number)

        def body(fleet: Fleet, mortal: Any, folder: Path = folder) -> list[torch.Tensor]:
            model, rank = make(), fleet.rank
            inner = torch.optim.Adam(model.parameters(), lr=0.1)
            model, optimizer = syncline.distribute(model, inner, syncline.AllReduce(), elastic=True, fleet=fleet)
            with mortal():
                for step in range(NUM_STEPS):
                    model(torch.full((2, 3), 0.1 * (step + rank))).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    syncline.save_checkpoint(folder, model, optimizer, keep=2, wait=wait)
            return [parameter.detach().clone() for parameter in model.parameters()]

        lived = run_mortals(NUM_RANKS, {victim: call}, body)
        values = [lived[rank] for rank in range(NUM_RANKS) if rank != victim]
        assert all(isinstance(one, list) for one in values), (call, lived)
        model = make()
        begin = syncline.resume(folder, model, torch.optim.Adam(model.parameters()))
        assert begin.iteration == NUM_STEPS, call
        assert all(map(torch.equal, values[0], model.parameters())), call
