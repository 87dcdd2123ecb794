"""How long a checkpoint in the background holds up training: the time within save_checkpoint(..., wait=False).

    syncline run --ranks 2 benchmarks/checkpoint_stall.py FOLDER --megabytes 100

The model's size is chosen so that rank 0, which writes the most (the model, and its part of Adam's state), writes so
much. With ``--prepare``, ``prepare_save()`` is called after the first step, some steps before the first save. A save
begins when the one before is on the disk, and steps are made meanwhile. For comparison the same with ``wait=True``.
*busy* is the processor's time of the training thread alone, which a busy machine stretches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import syncline

WIDTH = 1024
STEPS_AHEAD = 20
"""Made between ``prepare_save()`` and the first save: a thread touches 100 MB meanwhile."""


def step(model: nn.Module, optimizer: Any, rank: int) -> None:
    """Make one step on random numbers."""
    model(torch.randn(4, WIDTH) + rank).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def measure(path: Path, model: nn.Module, optimizer: Any, *, wait: bool, number: int, rank: int) -> list[list[float]]:
    """Return for each of ``number`` saves how long it held up training, and the processor's part of it, in seconds."""
    held_s = []
    for _ in range(number):
        step(model, optimizer, rank)
        start_s, busy_s = time.perf_counter(), time.thread_time()
        work = syncline.save_checkpoint(path, model, optimizer, keep=1, wait=wait)
        held_s.append([time.perf_counter() - start_s, time.thread_time() - busy_s])
        while work is not None and not work.done():
            model(torch.randn(4, WIDTH) + rank)
        if work is not None:
            work.wait()
    return held_s


def main() -> None:
    """Measure on all ranks; rank 0 prints a table, and what it was made of as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--prepare", action="store_true", help="call prepare_save() before")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with syncline.init() as fleet:
        bytes_per_parameter = 4 + 8 / fleet.world_size
        num_layers = max(1, round(arguments.megabytes * 1e6 / (bytes_per_parameter * WIDTH * WIDTH)))
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
        inner = torch.optim.Adam(model.parameters(), lr=1e-4)
        model, optimizer = syncline.distribute(model, inner, syncline.Sharded())
        if arguments.prepare:
            step(model, optimizer, fleet.rank)
            syncline.prepare_save(model, optimizer)
            for _ in range(STEPS_AHEAD):
                step(model, optimizer, fleet.rank)
        found: dict[str, Any] = {}
        for name, wait in (("background", False), ("waited for", True)):
            path = arguments.folder / name
            found[name] = measure(path, model, optimizer, wait=wait, number=arguments.saves, rank=fleet.rank)
        found["model_bytes"] = sum(value.nbytes for value in model.state_dict().values()) * (fleet.rank == 0)
        found["state_bytes"] = optimizer.num_state_bytes
        told = fleet.all_gather_object(found)
    if fleet.rank == 0:
        for rank, one in enumerate(told):
            written = (one["state_bytes"] + one["model_bytes"]) / 1e6
            print(f"rank {rank}, {written:.0f} MB, {arguments.saves} saves; training was held up for (ms)")
            for name in ("background", "waited for"):
                for what, column in (("", 0), (", busy", 1)):
                    first, *rest = (1e3 * row[column] for row in one[name])
                    middle, most = statistics.median(rest), max(rest)
                    print(f"  {name + what:<17} first {first:7.1f}   median {middle:7.1f}   most {most:7.1f}")
        print(json.dumps(told))


if __name__ == "__main__":
    main()
