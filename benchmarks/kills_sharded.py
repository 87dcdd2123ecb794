"""An elastic training with ``Sharded(spares=1)`` for ``benchmarks/kills.py``, which kills its ranks and replays it.

    syncline run --ranks 4 --elastic --restarts 1000 benchmarks/kills_sharded.py FOLDER

Each rank writes into FOLDER, for each step, who counted in it and what the parameters are then; it ends with the step
that the file ``stop`` there names. Gradients are rounded so that means over one to four ranks are exact in any order,
and one process can come to the same bits.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import syncline

COMPUTE_S = 0.05
"""A step's computing, on an accelerator that two cores do not have: it is slept."""
GRAIN = 3 * 2.0**-15
"""Gradients are multiples of this: a third of one, and sums of a few of them, are exact in float32."""


def make_model() -> nn.Module:
    """Return the model as all begin with it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: (grad / GRAIN).round() * GRAIN)  # type: ignore[no-untyped-call]
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that has state; its products are exact."""
    return torch.optim.SGD(model.parameters(), lr=2.0**-5, momentum=0.5)


def loss_of(model: nn.Module, number: int, step: int) -> torch.Tensor:
    """Return the loss of the member with this number in a step."""
    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + number))
    return nn.functional.mse_loss(model(batch), batch[:, :8].sin())


def replay_step(model: nn.Module, optimizer: torch.optim.Optimizer, counted: list[int], step: int) -> None:
    """Make a step of all who counted in it, in one process."""
    optimizer.zero_grad()
    for number in counted:
        loss_of(model, number, step).backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= len(counted)
    optimizer.step()


def digest(model: nn.Module) -> str:
    """Return a hash of all bits of the parameters."""
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()


def main(folder: Path) -> None:
    """Train until the file ``stop`` says that it is enough."""
    torch.set_num_threads(1)
    with syncline.init() as fleet, (folder / f"{os.getpid()}-{time.time_ns()}.jsonl").open("w", buffering=1) as log:
        module = make_model()
        model, optimizer = syncline.distribute(module, make_optimizer(module), syncline.Sharded(spares=1), elastic=True)
        stop = folder / "stop"
        while not stop.exists() or optimizer.iteration < int(stop.read_text()):
            step, number = optimizer.iteration, fleet.members[fleet.rank]
            optimizer.zero_grad()
            time.sleep(COMPUTE_S)
            loss_of(model, number, step).backward()  # type: ignore[no-untyped-call]
            report = optimizer.training._collector.report
            assert report is not None
            assert report.ranks is not None
            counted = fleet.numbers_of(report.ranks)
            optimizer.step()
            line = {"step": step, "counted": counted, "digest": digest(module), "rank": fleet.rank}
            log.write(json.dumps({**line, "epoch": fleet.epoch.number, "at_s": time.monotonic()}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
