"""How long the members of an elastic job wait for a rank that comes: it gets 100 MB of parameters and optimizer state.

    syncline lab run benchmarks/checks/gigabit.yaml -- \
        syncline run --elastic --restarts 1 --join-port 29600 benchmarks/join_pause.py [--rule sharded]

Rank 3 dies at step 5, is started again by its launcher, and joins (in the lab, as root: each host there has a network
namespace of its own). The others print how much longer than usual the step took at whose end it came in, together with
the next, in which those that are ready wait for those that send or receive.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import time

import torch
from torch import nn

import syncline

VICTIM, AT_STEP, STEPS_AFTER = 3, 5, 3
NUM_LAYERS, WIDTH = 8, 1024
"""8.4 million parameters, 33 MB, and twice as much state of Adam."""


def main() -> None:
    """Train on all ranks, and be lost or print the pause as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rule", choices=("allreduce", "sharded"), default="allreduce")
    options = parser.parse_args()
    torch.set_num_threads(1)
    is_newcomer = "SYNCLINE_JOIN" in os.environ
    with syncline.init() as fleet:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
        rule = syncline.AllReduce() if options.rule == "allreduce" else syncline.Sharded(spares=1)
        model, optimizer = syncline.distribute(model, torch.optim.Adam(model.parameters()), rule, elastic=True)
        times_s: list[float] = []
        inputs, came_at = torch.ones(2, WIDTH), -1 if is_newcomer else None
        while came_at is None or len(times_s) < came_at + STEPS_AFTER:
            size, start_s = fleet.world_size, time.monotonic()
            model(inputs).square().mean().backward()
            if fleet.rank == VICTIM and not is_newcomer and optimizer.iteration == AT_STEP:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            if fleet.world_size > size:
                came_at = len(times_s)
            times_s.append(time.monotonic() - start_s)
        if not is_newcomer:
            pause_s = sum(times_s[came_at : came_at + 2]) - 2 * statistics.median(times_s[:came_at])
            print(json.dumps({"rank": fleet.rank, "members": fleet.members, "pause_s": round(pause_s, 3)}), flush=True)


if __name__ == "__main__":
    main()
