"""One rank of a phased model that keeps versions, and may kill itself in an operation of its storage."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from phased_crashes import CrashingFolder
from torch import nn

import syncline
from syncline.errors import PeerLostError

NUM_STEPS = 4


def make_stage(number: int) -> nn.Module:
    """Build a stage with dropout and running statistics; one of them trains nothing."""
    torch.manual_seed(number)
    layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)).double()
    return layers.requires_grad_(number != 2)


def main() -> None:
    """Train from where it ended; print how many steps were made before, and the losses."""
    folder, rank_to_kill, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    fleet = syncline.init()
    kills = fleet.rank == rank_to_kill and last > 0
    storage = CrashingFolder(folder / str(fleet.rank), last=last if kills else None, kills=True)
    trainer = syncline.phase(
        [lambda number=number: make_stage(number) for number in range(5)],
        lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        loss=nn.functional.mse_loss,
        storage=storage,
        micro_batches=2,
        resume=True,
    )
    before = trainer.num_steps
    schedule = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)
    for _ in range(before):
        schedule.step()
    if not before:
        torch.manual_seed(3)
    try:
        losses = []
        for step in range(before, NUM_STEPS):
            batch = torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            losses.append(trainer.step(batch[:, :6], batch[:, 6:]).hex())
            schedule.step()
        trainer.synchronize()
        print(f"result {before} {' '.join(losses)}", flush=True)
    except PeerLostError as error:
        print(f"told of rank {error.rank}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    main()
