"""One rank, as every launcher here starts it: it trains a small model, and writes where it was and what it learnt.

    python launched_rank.py FOLDER

The file in FOLDER is named after the process, so that two that believe they are the same rank are both seen.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import syncline

NUM_STEPS = 3


def train(fleet: syncline.Fleet) -> list[float]:
    """Return the weights of a model that each rank trained on data of its own."""
    torch.manual_seed(fleet.rank)  # ranks differ at first: rank 0's values count
    model = nn.Linear(3, 2)
    model, optimizer = syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(NUM_STEPS):
        model(torch.randn(4, 3) + fleet.rank).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    syncline.synchronize()
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def main() -> None:
    """Join the job, add the ranks' numbers up, train, and say so."""
    with syncline.init() as fleet:
        total = torch.tensor([fleet.rank + 1.0])
        fleet.all_reduce(total)
        said: dict[str, Any] = {
            "rank": fleet.rank,
            "world_size": fleet.world_size,
            "host": fleet.topology.host_of(fleet.rank).name,
            "total": total.item(),
            "node": os.environ.get("SLURMD_NODENAME") or os.environ.get("SYNCLINE_HOST"),
            "weights": train(fleet),
            "has_secret": fleet.communicator._fabric._options.secret is not None,
        }
    (Path(sys.argv[1]) / f"{os.getpid()}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
