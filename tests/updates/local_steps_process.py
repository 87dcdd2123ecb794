"""One rank of a job with local steps that loses ranks and takes newcomers in.

``local_steps_process.py FOLDER PLAN``: PLAN is JSON, as :mod:`growth_faults` has it; besides, at which step members
``leave`` (killed by themselves), after which step newcomers ``come`` (a process's number: the step; 0: when a switch
was begun), who is the ``door`` that writes where it listens into their pipes, how many switches there are
(``switches``), and what the rule is made with (``rule``). A job of several hosts has the file of its ``topology``, and
for each process its host (``hosts``). Who is ``idle`` makes steps without a backward pass.

Each ends its period ``LAST`` steps after the last switch, and tells what it has then: how often all ranks' steps count,
by rank and host.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import syncline
from growth_faults import count_switches, open_door, prepare, start

DEADLINE_S = 100.0
LAST = 6
NUM_NUMBERS = 8


class Tally(nn.Module):
    """Its gradient is the same wherever the parameters are: with a rate of 1, each step of a rank counts 1."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)  # newcomers and members begin with other values
        starts = [torch.zeros(NUM_NUMBERS) if seed == 0 else torch.randn(NUM_NUMBERS) for _ in range(3)]
        self.counts = nn.ParameterList([nn.Parameter(start.double()) for start in starts])
        self.register_buffer("last", torch.zeros(1))

    def forward(self, number: int) -> torch.Tensor:
        self.last.fill_(number)
        return -torch.stack([count[number] for count in self.counts]).sum()


def main(folder: Path, plan: dict[str, Any]) -> None:
    own = int(os.environ["RANK"])
    if "hosts" in plan:
        os.environ["SYNCLINE_HOST"] = plan["hosts"][own]
        if own < plan["members"]:
            os.environ["SYNCLINE_TOPOLOGY"] = plan["topology"]
    prepare(plan, own)
    begun = count_switches()
    fleet = start(folder, plan, own)
    is_newcomer = own >= plan["members"]
    model = Tally(own)
    settings = dict(plan["rule"])
    if settings.pop("momentum", False):
        settings["outer"] = syncline.Nesterov()
    if "bucket_bytes" in settings:
        settings["within"] = syncline.AllReduce(bucket_bytes=settings.pop("bucket_bytes"))
    make = torch.optim.Adam if plan.get("optimizer") == "adam" else torch.optim.SGD
    optimizer = make(model.parameters(), lr=0.5 if is_newcomer else 1.0)
    model, distributed = syncline.distribute(model, optimizer, syncline.LocalSteps(**settings), elastic=True)
    changes: list[syncline.MembershipChange] = []
    distributed.on_membership_change(changes.append)
    distributed.offer_extra(lambda: {"from": own})
    came = distributed.iteration
    if is_newcomer:
        assert distributed.extra is not None, "members offer something"
        begun[0] = plan["switches"]  # those that come in before are no members any more
    train(folder, plan, own, begun, (fleet, model, distributed))
    told = {
        "counts": [count.tolist() for count in model.counts],
        "last": float(model.last),
        "members": fleet.members,
        "iteration": distributed.iteration,
        "came": came,
        "rate": distributed.param_groups[0]["lr"],
        "parties": distributed.statistics().parties,
        "changes": [[change.lost, change.joined] for change in changes],
    }
    print("told", json.dumps(told), flush=True)
    fleet.close()


def train(folder: Path, plan: dict[str, Any], own: int, begun: list[int], parts: tuple[Any, Any, Any]) -> None:
    fleet, model, optimizer = parts
    until_s, waiting, num_last = time.monotonic() + DEADLINE_S, dict(plan["come"]), 0
    while num_last < LAST:
        assert time.monotonic() < until_s, f"{fleet.members} after step {optimizer.iteration}"
        step = optimizer.iteration + 1
        if plan.get("leave", {}).get(str(own)) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        num_last += begun[0] >= plan["switches"]
        optimizer.zero_grad()
        if own not in plan.get("idle", []):
            model(fleet.members[fleet.rank]).backward()
        optimizer.step()
        if own == plan.get("door", 0):
            open_door(folder, waiting, fleet, step, begun[0])
    optimizer.end_period()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
