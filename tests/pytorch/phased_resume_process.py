"""One rank of a phased model that keeps versions, and may kill itself on the way.

    python phased_resume_process.py FOLDER RANK_TO_KILL MOMENT

MOMENT is a number of operations of the storage (0: none), or what the rank is about to do, and for which time:
"Update:3", as its machine says it, or "step:3", when it has stepped a shard whose new parameters nobody has yet.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from phased_crashes import CrashingFolder
from torch import nn

import syncline
from syncline.errors import PeerLostError
from syncline.updates.phased.driver import PairDriver
from syncline.updates.shard import Shard

NUM_STEPS = 4


def make_stage(number: int) -> nn.Module:
    """Build a stage with dropout and running statistics; one of them trains nothing."""
    torch.manual_seed(number)
    layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)).double()
    return layers.requires_grad_(number != 2)


def strike_at(name: str, number: int) -> None:
    """Let this process kill itself when it is about to obey its instruction ``name`` for that time."""
    obey, step = PairDriver._obey, Shard.step
    left = number

    def count(done: str) -> None:
        nonlocal left
        left -= done == name
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted_obey(driver: PairDriver, instructions: list[Any]) -> None:
        for one in instructions:
            count(type(one).__name__)
        obey(driver, instructions)

    def counted_step(shard: Shard, *arguments: Any) -> None:
        step(shard, *arguments)
        count("step")

    PairDriver._obey, Shard.step = counted_obey, counted_step


def main() -> None:
    """Train from where it ended; print how many steps were made before, and the losses."""
    folder, rank_to_kill, (name, _, number) = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].partition(":")
    fleet = syncline.init()
    is_struck = fleet.rank == rank_to_kill
    if is_struck and number:
        strike_at(name, int(number))
    last = int(name) if is_struck and not number and name != "0" else None
    storage = CrashingFolder(folder / str(fleet.rank), last=last, kills=True)
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
        print(f"told of rank {error.rank}: {error}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    main()
