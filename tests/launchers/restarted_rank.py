"""A rank that is killed once on the way, in a job that goes on: from its checkpoint, or without that rank.

    python restarted_rank.py FOLDER checkpoint|elastic VICTIM

At its third step the rank VICTIM kills itself, before its gradients are told. FOLDER gets a file for each step that a
rank has made, with the samples that it took, and one for each rank that came to the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncline

NUM_SAMPLES, BATCH_SIZE, SEED = 24, 2, 5
STRUCK_AT = 3


def make_model() -> Any:
    """Return the model as each rank begins with it."""
    torch.manual_seed(1)
    return nn.Linear(1, 1).double()


def make_optimizer(model: nn.Module) -> Any:
    """Return its optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.001)


def main(folder: Path, way: str, victim: int) -> None:
    """Train one epoch, be it in several attempts."""
    saved = folder / "checkpoint"
    with syncline.init() as fleet:
        samples = torch.arange(float(NUM_SAMPLES))
        sampler = syncline.data.ElasticSampler(samples, BATCH_SIZE, seed=SEED)  # type: ignore[arg-type]
        loader = DataLoader(TensorDataset(samples), batch_sampler=sampler)
        model = make_model()
        model, optimizer = syncline.distribute(model, make_optimizer(model), syncline.AllReduce())
        begun = syncline.resume(saved, model, optimizer, sampler=sampler).iteration if way == "checkpoint" else 0
        sampler.follow(optimizer, loader)
        for iteration, (batch,) in enumerate(loader, start=begun + 1):
            if fleet.rank == victim and iteration == STRUCK_AT and not (folder / "struck").exists():
                (folder / "struck").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            model(batch[:, None].double()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            taken = {"world_size": fleet.world_size, "samples": batch.tolist()}
            (folder / f"step-{iteration}-{fleet.rank}.json").write_text(json.dumps(taken))
            if way == "checkpoint" and iteration % 2 == 0:
                syncline.save_checkpoint(saved, model, optimizer, keep=2, sampler=sampler)
        ended = {"begun": begun, "iteration": iteration, "weights": [one.item() for one in model.parameters()]}
        (folder / f"end-{fleet.rank}.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
