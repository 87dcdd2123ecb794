"""One rank of the job in which ``hidden_faults.py`` hides faults: it trains until the folder has no file ``go``.

Its argument is a JSON object: the folder, the kind of job, the rule, the model's width, and the batch. It has a fault
by itself while the folder has a file of the fault's name with its number: it computes three times as much, its batches
come late, it writes checkpoints to the disk, or it reads memory that is a file.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hidden_faults_kinds import FLAGS, MAPPED_BYTES

import syncline

SAVED_BYTES, SAVED_EVERY = 1 << 17, 4
TOUCHED_PAGES = 1200
LATE_S, USUAL_S = 0.12, 0.002
"""Until a batch is there."""
NUM_LAYERS = 6
RULES: dict[str, Any] = {
    "AllReduce": syncline.AllReduce(),
    "Sharded": syncline.Sharded(),
    "Sharded, overlap_forward": syncline.Sharded(overlap_forward=True),
    "LocalSteps": syncline.LocalSteps(),
    "Overlapped": syncline.Overlapped(),
}


def read_batch(seconds: float) -> None:
    """Wait for a batch."""
    time.sleep(seconds)


def save(descriptor: int) -> None:
    """Write a checkpoint in place, and to the disk: new blocks would be a matter of the file system's, and of all."""
    os.pwrite(descriptor, os.urandom(SAVED_BYTES), 0)
    os.fdatasync(descriptor)


def map_file(path: Path) -> mmap.mmap:
    """Return a file as memory, of which nothing is in memory yet."""
    with path.open("a+b") as file:
        mapped = mmap.mmap(file.fileno(), MAPPED_BYTES, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_RANDOM)
    return mapped


def start(task: dict[str, Any], model: torch.nn.Module) -> tuple[int, torch.nn.Module, torch.optim.Optimizer]:
    """Join the job; return the rank, the model and the optimizer."""
    if task["job"] == "group":
        dist.init_process_group("syncline")
        model = torch.nn.parallel.DistributedDataParallel(model)
        return dist.get_rank(), model, torch.optim.SGD(model.parameters(), lr=0.01)
    number, optimizer = syncline.init().rank, torch.optim.SGD(model.parameters(), lr=0.01)
    model, distributed = syncline.distribute(model, optimizer, RULES[task["rule"]])
    return number, model, distributed


def main() -> None:
    """Train, with whatever faults it has at the moment."""
    task = json.loads(sys.argv[1])
    folder, width, batch = Path(task["folder"]), task["width"], task["batch"]
    layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(NUM_LAYERS)))
    number, model, optimizer = start(task, layers)
    print(f"pid {number} {os.getpid()}", flush=True)
    step, draw = 0, random.Random(number)
    saved = os.open(folder / f"saved-{number}", os.O_RDWR | os.O_CREAT)
    mapped = map_file(folder / "mapped")
    while (folder / "go").exists():
        has = {name for name in FLAGS if (folder / f"{name}-{number}").exists()}
        read_batch(LATE_S if "loader" in has else USUAL_S)
        if step % SAVED_EVERY == 0:
            save(saved)
        if "memory" in has:
            sum(mapped[draw.randrange(MAPPED_BYTES)] for _ in range(TOUCHED_PAGES))
        else:
            mapped.madvise(mmap.MADV_DONTNEED)
        loss = model(torch.randn(batch, width))
        for _ in range(2 if "computing" in has else 0):
            loss = loss + 0.0 * model(torch.randn(batch, width))
        loss.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    os._exit(0)


if __name__ == "__main__":
    main()
