"""A rank of a phased model as a user writes it, of which one is killed in the first attempts, if it is told so.

    python struck_phased_rank.py FOLDER [KILLS]

FOLDER gets what stages are stored in, and from each rank that comes to the end a file with its losses.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import syncline
from syncline.updates.shard import Shard

NUM_STEPS = 6


def make_stage(number: int) -> nn.Module:
    """Return a stage with dropout; it kills its process when the kills of this attempt say so."""
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2)).double()


def strike() -> None:
    """Kill rank 0 within a stage in the first attempt, and in the second rank 1 when its third step is made.

    That takes three shards a step. A stage is updated once it is stored as of the step before, and so once the one
    before that is stored everywhere: here the first.
    """
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    left = {(0, 0): 9, (1, 1): 9}.get((attempt, rank), 0)
    kind = nn.Dropout if rank == 0 else Shard
    name = "forward" if rank == 0 else "step"
    method = getattr(kind, name)

    def counted(*arguments: object, **options: object) -> object:
        nonlocal left
        result = method(*arguments, **options)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(kind, name, counted)


def main(folder: Path) -> None:
    """Train to the end, be it in several attempts."""
    with syncline.init() as fleet:
        trainer = syncline.phase(
            [lambda number=number: make_stage(number) for number in range(4)],
            lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
            loss=nn.functional.mse_loss,
            storage=folder,
            micro_batches=2,
            resume=True,
        )
        begun, losses = trainer.num_steps, []
        for step in range(begun, NUM_STEPS):
            batch = torch.randn(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            losses.append(trainer.step(batch[:, :6], batch[:, 6:]).hex())
        trainer.synchronize()
        (folder / f"end-{fleet.rank}.json").write_text(json.dumps({"begun": begun, "losses": losses}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 2:
        strike()
    main(Path(sys.argv[1]))
