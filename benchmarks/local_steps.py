"""Local steps, and fewer bytes, on two slow sites: seconds of a step in the lab.

    syncline lab run NETWORK -- syncline run benchmarks/local_steps.py --methods sharded clustered local ddp

Each rank computes 0.1 s by a timer, and has the parameters of the GPT; the lab's ranks share too few processors to
compute the GPT itself. How many steps a loss takes is told by ``syncline bench convergence``, which predicts what is
measured here.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from accelerator import Timer
from torch import nn
from torch.distributed.fsdp import fully_shard

import syncline

SITES = ((0, 1, 2, 3), (4, 5, 6, 7))
CODES: tuple[Any, ...] = ("bf16", "int8", "int4", "auto")
RULES: dict[str, Callable[[], Any]] = {
    "synchronous": syncline.AllReduce,
    "sharded": syncline.Sharded,
    "overlap-forward": partial(syncline.Sharded, overlap_forward=True),
    "overlapped": syncline.Overlapped,
    "clustered": lambda: syncline.Clustered(clusters=SITES),
    "forecast": lambda: syncline.Clustered(clusters=SITES, forecast=1.0),
    "local": lambda: syncline.LocalSteps(parties=None, period=16),
    "local-auto": lambda: syncline.LocalSteps(period="auto"),
    "local-default": syncline.LocalSteps,
    "local-16": lambda: syncline.LocalSteps(period=16),
    "patient": lambda: syncline.LocalSteps(parties=None, pace=syncline.Grace(seconds=0.2)),
    "patient-sites": lambda: syncline.LocalSteps(pace=syncline.Grace(seconds=0.2, quorum=1)),
    "quarters": lambda: syncline.LocalSteps(parties=None, period=16, fragments=4),
    "in-turn": lambda: syncline.LocalSteps(parties=None, fragments=1, overlap=False),
    "diloco": lambda: syncline.LocalSteps(parties=None, fragments=1, overlap=False, outer=syncline.Nesterov()),
    "sites": lambda: syncline.LocalSteps(parties=SITES, period=16),
    "sites-in-turn": lambda: syncline.LocalSteps(parties=SITES, fragments=1, overlap=False),
    **{f"all-reduce-{codes}": partial(syncline.AllReduce, compress=codes) for codes in CODES},
    **{f"sharded-{codes}": partial(syncline.Sharded, compress=codes) for codes in CODES},
}


def time_step(method: str, options: argparse.Namespace) -> None:
    """Print the seconds of a step: all of them over their number, without the first period."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(options.width, options.width) for _ in range(options.layers)))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-3)
    fleet = None
    if method in ("ddp", "fsdp2"):
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model) if method == "ddp" else _fully_sharded(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    else:
        fleet = syncline.init(insecure=True)
        model, optimizer = syncline.distribute(model, optimizer, RULES[method](), fleet=fleet)
    start_s, moments, pauses = 0.0, [], random.Random(int(os.environ["RANK"]))
    for step in range(options.leading + options.steps):
        if step == options.leading:
            start_s = time.monotonic()
        if step >= options.leading and pauses.random() < options.pause_share:
            time.sleep(options.pause_s)
        inputs = torch.randn(1, options.width, requires_grad=True)
        compute: Any = Timer.apply
        compute(model(compute(inputs, 0.02, True)), 0.03, False).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        moments.append(time.monotonic())
    taken_s = (moments[-1] - start_s) / options.steps
    if int(os.environ["RANK"]) == 0:
        each = " ".join(f"{b - a:.2f}" for a, b in pairwise(moments[-options.steps - 1 :]))
        told = "" if fleet is None else f"{optimizer.progress()} {optimizer.statistics()}"
        print(f"{method}: {taken_s:.3f} s, load {os.getloadavg()[0]:.1f}: {each}  {told}", flush=True)
    if fleet is None:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    else:
        fleet.close()


def _fully_sharded(model: nn.Module) -> Any:
    for layer in model.children():
        fully_shard(layer)
    return fully_shard(model)


def main() -> None:
    """Measure each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--leading", type=int, default=16, help="Steps before, not counted.")
    parser.add_argument("--pause-share", type=float, default=0.0, help="Of the steps in which a rank pauses.")
    parser.add_argument("--pause-s", type=float, default=1.0)
    parser.add_argument("--width", type=int, default=300)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for method in options.methods:
        time_step(method, options)


if __name__ == "__main__":
    main()
