"""What ``elastic=True`` costs as long as nobody is lost: jobs with and without it in turns, on this machine.

    python benchmarks/elastic_cost.py [--ranks 8] [--rounds 3]

Each job prints the median of its steps; a table shows the medians of the jobs. Of the first steps none counts. With
``Sharded`` an elastic job has a spare of each shard, whose gradients and steps are part of what it costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import syncline

STEPS, WARM_UPS = 40, 10
SIZES = {"small": 64, "large": 1024}
"""Width of four layers: 66 kB of parameters, where calls cost, and 17 MB, where bytes do."""


def train(rule_name: str, width: int, *, elastic: bool) -> None:
    """Be one rank; the first one prints its median."""
    torch.set_num_threads(1)
    with syncline.init() as fleet:
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        spares = 1 if elastic else 0
        rule = syncline.AllReduce() if rule_name == "allreduce" else syncline.Sharded(spares=spares)
        model, optimizer = syncline.distribute(model, torch.optim.Adam(model.parameters()), rule, elastic=elastic)
        inputs, times_s = torch.ones(2, width), []
        for _ in range(WARM_UPS + STEPS):
            start_s = time.monotonic()
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            times_s.append(time.monotonic() - start_s)
        if fleet.rank == 0:
            print(json.dumps(statistics.median(times_s[WARM_UPS:])), flush=True)


def run_job(ranks: int, rule: str, width: int, *, elastic: bool) -> float:
    """Return the median step of one job in seconds."""
    job = [str(Path(sys.executable).with_name("syncline")), "run", "--ranks", str(ranks), "--foreground", "0"]
    job += [str(Path(__file__).absolute()), "--as-rank", rule, str(width), "elastic" if elastic else "plain"]
    return float(subprocess.run(job, stdout=subprocess.PIPE, text=True, check=True, timeout=300).stdout)


def main() -> None:
    """Run the jobs in turns and print a table, or be a rank of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--as-rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        rule, width, kind = options.as_rank
        train(rule, int(width), elastic=kind == "elastic")
        return
    print("rule       parameters  plain ms  elastic ms")
    for rule in ("allreduce", "sharded"):
        for size, width in SIZES.items():
            pairs = [
                [run_job(options.ranks, rule, width, elastic=elastic) for elastic in (False, True)]
                for _ in range(options.rounds)
            ]
            plain_s, elastic_s = (statistics.median(column) for column in zip(*pairs, strict=True))
            print(f"{rule:10} {size:11} {1000 * plain_s:8.2f} {1000 * elastic_s:11.2f}", flush=True)


if __name__ == "__main__":
    main()
