"""Checkpoints of the same numbers by this library and by torch.distributed.checkpoint, in turns: MB/s of save and load.

    syncline run --ranks 2 benchmarks/checkpoint_speed.py FOLDER --megabytes 300

A model and Adam's state, 12 bytes for each parameter. Ours is of ``Sharded()``, of which each rank keeps a part of the
state; DCP is given the same model with all of its state on each rank, as DDP has it, and divides what it writes among
ranks. Both write files that are on the disk when ``save`` returns. Which is first changes from round to round, as what
others left to write costs the next one. Rank 0 prints medians, and each figure as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import syncline

WIDTH, BYTES_PER_PARAMETER = 1024, 12


def build(megabytes: float) -> tuple[nn.Module, Any]:
    """Return a model and Adam."""
    num_layers = max(1, round(megabytes * 1e6 / (BYTES_PER_PARAMETER * WIDTH * WIDTH)))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
    return model, torch.optim.Adam(model.parameters(), lr=1e-4)


def step(model: nn.Module, optimizer: Any) -> None:
    """Make one step, after which there is state."""
    model(torch.ones(4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def timed(call: Callable[[], object]) -> float:
    """Return how long all ranks take."""
    dist.barrier()
    start_s = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - start_s


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return what DCP is given, as its tutorial says."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def save_by_dcp(path: Path, model: nn.Module, optimizer: Any) -> None:
    """Save what is there."""
    save(state_of(model, optimizer), checkpoint_id=path)


def load_by_dcp(path: Path, model: nn.Module, optimizer: Any) -> None:
    """Load into the state that is there."""
    state = state_of(model, optimizer)
    load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def measure(folder: Path, megabytes: float, rounds: int, rank: int) -> dict[str, list[float]]:
    """Return the seconds of each call."""
    own, other = build(megabytes), build(megabytes)
    own = syncline.distribute(*own, syncline.Sharded())
    for trained in (own, other):
        step(*trained)
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        ours, theirs = folder / f"ours-{number}", folder / f"dcp-{number}"
        calls: dict[str, Callable[[], object]] = {
            "ours, save": partial(syncline.save_checkpoint, ours, *own, keep=1),
            "DCP, save": partial(save_by_dcp, theirs, *other),
            "ours, load": partial(syncline.load_checkpoint, ours, *own),
            "DCP, load": partial(load_by_dcp, theirs, *other),
        }
        saves, loads = list(calls)[:2], list(calls)[2:]
        for name in (*saves, *loads) if number % 2 else (*saves[::-1], *loads[::-1]):
            os.sync()  # what the one before has left to write is not this one's
            found.setdefault(name, []).append(timed(calls[name]))
        if rank == 0:
            for path in (ours, theirs):
                shutil.rmtree(path)
    return found


def main() -> None:
    """Measure on all ranks; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=float, default=300.0)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with syncline.init() as fleet:
        found = measure(arguments.folder, arguments.megabytes, arguments.rounds, fleet.rank)
        if fleet.rank == 0:
            for name, seconds in found.items():
                rates = [arguments.megabytes / each for each in seconds]
                print(f"{name}: {statistics.median(rates):6.0f} MB/s   ({min(rates):.0f} to {max(rates):.0f})")
            print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
