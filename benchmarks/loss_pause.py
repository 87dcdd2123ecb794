"""From the loss of a rank to the end of the next step: an elastic job of any rule that goes on.

    syncline run --ranks 8 --keep-going benchmarks/loss_pause.py FOLDER
    syncline lab run two-racks-5-3 -- syncline run --keep-going benchmarks/loss_pause.py FOLDER --how silent

The victim either dies of SIGKILL, in the middle of its backward pass, or its host's network goes down in silence, as
with a cable that is pulled (in the lab, as root: each host there has a network namespace of its own). It notes the time
in FOLDER just before; all clocks of a machine are one. The others print when their next step had ended after that.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import torch
from torch import nn

import syncline

WIDTH = 512


def be_lost(how: str, note: Path) -> None:
    """Note the time, and be lost."""
    links = json.loads(subprocess.check_output(["ip", "-json", "link"])) if how == "silent" else []
    note.write_text(str(time.monotonic()))
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    for link in links:
        if link["ifname"] != "lo":
            subprocess.run(["ip", "link", "set", link["ifname"], "down"], check=True)


def main() -> None:
    """Train on all ranks; those that are left print the pause as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--how", choices=("killed", "silent"), default="killed")
    parser.add_argument("--victim", type=int, default=3)
    parser.add_argument("--rule", choices=("allreduce", "sharded"), default="allreduce")
    parser.add_argument("--step", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    note = options.folder / "lost"
    with syncline.init() as fleet:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        rule = syncline.AllReduce() if options.rule == "allreduce" else syncline.Sharded(spares=1)
        inner = torch.optim.Adam(model.parameters())
        model, optimizer = syncline.distribute(model, inner, rule, elastic=True)
        rank, world_size = fleet.rank, fleet.world_size
        while optimizer.iteration < options.step or fleet.world_size == world_size:
            loss = model(torch.ones(2, WIDTH)).square().mean()
            if rank == options.victim and optimizer.iteration == options.step:
                be_lost(options.how, note)
            loss.backward()
            optimizer.step()
            ended_s = time.monotonic()
            optimizer.zero_grad()
        pause_s = ended_s - float(note.read_text())
        print(json.dumps({"rank": rank, "members": fleet.members, "pause_s": round(pause_s, 3)}), flush=True)


if __name__ == "__main__":
    main()
