"""One rank of a job under the launcher, where rank 1 does something wrong in its third step."""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch

import syncline

GUILTY, AT, STEPS = 1, 2, 4


def fault(fleet: syncline.Fleet, name: str) -> bool:
    """Do it; return whether the loop ends."""
    if name == "hangs":
        threading.Event().wait()
    elif name == "raises":
        raise FileNotFoundError("no such file")
    elif name == "evaluates more":
        fleet.all_reduce(torch.zeros(1))
    elif name == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    return name == "leaves early"


def main(name: str) -> None:
    with syncline.init() as fleet:
        module = torch.nn.Linear(4, 4)
        model, optimizer = syncline.distribute(module, torch.optim.SGD(module.parameters(), 0.1), syncline.Sharded())
        for step in range(STEPS):
            if (fleet.rank, step) == (GUILTY, AT) and fault(fleet, name):
                break
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1])
