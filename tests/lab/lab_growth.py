"""One rank of a job in a lab that loses a rank, which comes back: `python lab_growth.py STATE_BYTES [MEMBER]`.

The last rank is killed by itself after two steps. Who is given the address of a MEMBER comes into its place, and says
so once it may wait; the members make no step between the loss and a line on their input, so that the steps' own bytes
are few. The model has a large part that is not trained, so that what links carry is what a newcomer lacks. Rank 0 tells
its address; all tell at the end how long their longest step took.
"""

import json
import os
import signal
import sys
import time

import torch
from torch import nn

import syncline

SIDE = 8
NUM_STEPS = 5
"""Steps with all ranks, after which a rank ends."""


class Model(nn.Module):
    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.trained = nn.Linear(SIDE, SIDE)
        self.frozen = nn.Parameter(torch.rand(num_bytes // 4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(x)


def main(num_bytes: int, member: str | None) -> None:
    fleet = syncline.init(insecure=True, timeout_s=60, join=member, topology=None)
    if member is not None:
        print("may wait", flush=True)
    torch.manual_seed(os.getpid())
    model = Model(num_bytes)
    model, optimizer = syncline.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.01), syncline.AllReduce(), elastic=True, check_every=None
    )
    num_ranks = max(fleet.world_size, 4)
    is_last = member is None and fleet.rank == fleet.world_size - 1
    if fleet.rank == 0:
        print(fleet.join_address, flush=True)
    longest_s, num_whole, is_waiting = 0.0, 0, member is None
    while num_whole < NUM_STEPS:
        num_whole += fleet.world_size == num_ranks and (fleet.epoch.number > 0)
        optimizer.zero_grad()
        model(torch.ones(1, SIDE)).square().mean().backward()
        if is_last and optimizer.iteration == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        began_s, size = time.monotonic(), fleet.world_size
        optimizer.step()
        if fleet.world_size > size:
            longest_s = time.monotonic() - began_s
        if is_waiting and fleet.epoch.number > 0:
            is_waiting = False
            sys.stdin.readline()
    total = float(model.frozen.double().sum())
    print(json.dumps({"pause_s": longest_s, "sum": total, "members": fleet.members}), flush=True)
    fleet.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
