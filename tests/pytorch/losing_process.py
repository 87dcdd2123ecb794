"""One rank of an all-reduce job of which some are killed: the others save what they have, and say where."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import torch
from torch import nn

import syncline
from syncline.errors import CheckpointError
from syncline.pytorch.checkpoint import storage


def main(folder: Path, victims: list[int], deadly_step: int, moment: str) -> None:
    """Train until a loss; ``moment``: in the backward pass, or while a checkpoint is written in the background."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))
    with syncline.init(timeout_s=30.0) as fleet:

        def die(*_: object, **__: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model, optimizer = syncline.distribute(
            model, optimizer, syncline.AllReduce(), save_on_failure=folder / "run1", check_every=None
        )
        if fleet.rank in victims and moment == "backward":
            model[0].register_full_backward_hook(lambda *_: die() if optimizer.iteration == deadly_step else None)
        last = None
        for step in range(deadly_step + 1):
            if step == deadly_step and moment == "saving":
                if last is not None:
                    last.wait()
                if fleet.rank in victims:
                    storage.write_chunks = lambda *_, **__: threading.Event().wait()
                work = syncline.save_checkpoint(folder / "other", model, optimizer, wait=False)
                fleet.barrier()
                if fleet.rank in victims:
                    die()
                try:
                    work.wait()
                except CheckpointError as error:
                    print(f"told: {error}", flush=True)
            loss = model(torch.full((4, 6), 0.1 * (step + fleet.rank), requires_grad=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            last = syncline.save_checkpoint(folder / "run1", model, optimizer, keep=3, wait=False)
    print("not lost", flush=True)


if __name__ == "__main__":
    place, told, at, moment = sys.argv[1:]
    main(Path(place), [int(rank) for rank in told.split(",")], int(at), moment)
