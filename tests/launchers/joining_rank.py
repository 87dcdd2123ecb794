"""A user's script that goes on by itself, with ranks that come while it runs.

    python joining_rank.py FOLDER RULE NUM_RANKS [VICTIM]

It trains epoch by epoch until NUM_RANKS have made all steps of one together after a change. After two steps rank 0
waits until a newcomer may wait, which says so in the pipe FOLDER/asked; the rank VICTIM kills itself before that. Each
rank writes what it trained on into a file of its own.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncline

NUM_SAMPLES, BATCH_SIZE, SEED = 36, 3, 5
ASKED_AT = 3
RULES = {
    "all-reduce": syncline.AllReduce(),
    "spares": syncline.Sharded(spares=1),
    "overlapped": syncline.Overlapped(period=2, max_staleness=0),  # whose steps are those of one process too
}


def make_model() -> Any:
    """Return the model as each rank begins with it."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def make_optimizer(model: nn.Module) -> Any:
    """Return its optimizer."""
    return torch.optim.Adam(model.parameters(), lr=0.01)


def main(folder: Path, rule: str, num_ranks: int, victim: int | None) -> None:
    """Train as the guide shows it."""
    joins = "SYNCLINE_JOIN" in os.environ
    with syncline.init() as fleet:
        if joins:
            (folder / "asked").write_text("a newcomer may wait")
        samples = torch.arange(NUM_SAMPLES, dtype=torch.float64)
        sampler = syncline.data.ElasticSampler(samples, BATCH_SIZE, seed=SEED)  # type: ignore[arg-type]
        loader = DataLoader(TensorDataset(samples), batch_sampler=sampler)
        model = make_model()
        model, optimizer = syncline.distribute(model, make_optimizer(model), RULES[rule], samples="batch")
        print("is in the job", flush=True)
        begun = syncline.resume(folder / "checkpoint", model, optimizer, sampler=sampler)
        assert (begun.iteration > 0) == joins
        sampler.follow(optimizer, loader)
        log = (folder / f"steps-{fleet.members[fleet.rank]}.jsonl").open("w")
        num_whole = 0
        for epoch in itertools.count(sampler.epoch):
            sampler.set_epoch(epoch)
            for (x,) in loader:
                step = optimizer.iteration + 1
                num_whole += fleet.epoch.number > 0 and fleet.world_size == num_ranks
                if step == ASKED_AT and fleet.rank == victim and not joins:
                    os.kill(os.getpid(), signal.SIGKILL)
                model(x[:, None] / NUM_SAMPLES).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                print(json.dumps([step, epoch, x.tolist()]), file=log, flush=True)
                if step == ASKED_AT and fleet.rank == 0:
                    (folder / "asked").read_text()
            if num_whole >= math.ceil(NUM_SAMPLES / (BATCH_SIZE * num_ranks)):
                break
        optimizer.end_period()
        syncline.save_checkpoint(folder / "checkpoint", model, optimizer, sampler=sampler)
        weights = [one.tolist() for one in model.parameters()]
        ended = {"members": fleet.members, "iteration": optimizer.iteration, "epoch": epoch, "weights": weights}
        (folder / f"end-{fleet.members[fleet.rank]}.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else None)
