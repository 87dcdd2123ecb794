"""A rank whose model lies in shared memory: a forked child sees the parameters that later steps make."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch import nn

import syncline


def main() -> None:
    """Share the model after distribute(), and print whether a child sees what a step makes."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    with syncline.init() as fleet:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model, optimizer = syncline.distribute(module, optimizer, update=syncline.Sharded())
        step(model, optimizer)
        syncline.synchronize()
        model.share_memory()
        before = values(model)
        (go, told), (answer, answered) = os.pipe(), os.pipe()
        if not os.fork():
            os.read(go, 1)
            os.write(answered, json.dumps(values(model)).encode())
            os._exit(0)
        step(model, optimizer)
        syncline.synchronize()
        os.write(told, b"x")
        seen = json.loads(os.read(answer, 1 << 16))
        os.wait()
        assert values(model) != before
        print("seen" if seen == values(model) else f"the child saw {seen}", "by rank", fleet.rank)


def step(model: nn.Module, optimizer: Any) -> None:
    """Train on other numbers on each rank."""
    model(torch.ones(2, 4) * (syncline.current_fleet().rank + 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module) -> list[list[float]]:
    """Return what all parameters hold."""
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


if __name__ == "__main__":
    main()
