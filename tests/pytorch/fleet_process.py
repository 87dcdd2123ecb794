"""One rank as a process of its own, over loopback: what the tests of ``init`` start."""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path

import psutil
import torch
from torch import nn

import syncline
from syncline.errors import PeerLostError


def cycles(number: int) -> None:
    """Open and close ``number`` fleets; count what is left."""
    with syncline.init():
        pass
    gc.collect()
    before = _open_files(), threading.active_count(), _mapped_segments()
    for _ in range(number):
        with syncline.init() as fleet:
            value = torch.full((3,), float(fleet.rank))
            fleet.all_reduce(value)
            assert value.tolist() == [sum(range(fleet.world_size))] * 3
    gc.collect()
    after = _open_files(), threading.active_count(), _mapped_segments()
    assert after == before, (before, after)


def train() -> None:
    """Train a few steps, and leave without close()."""
    fleet = syncline.init()
    torch.manual_seed(fleet.rank)  # ranks differ at first: rank 0's values count
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model, optimizer = syncline.distribute(model, torch.optim.Adam(model.parameters(), lr=0.01), samples="batch")
    for _ in range(5):
        model(torch.randn(3 + fleet.rank, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    syncline.synchronize()
    total = torch.stack([parameter.detach().double().sum() for parameter in model.parameters()])
    everyone = torch.zeros(fleet.world_size * len(total), dtype=torch.float64)
    fleet.all_gather(everyone, total)
    assert all(torch.equal(part, total) for part in everyone.split(len(total)))
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    print("final", flush=True)  # the last step is under way when the interpreter ends


def addresses() -> None:
    """Say at which addresses this process's connections end while a fleet is open."""
    with syncline.init() as fleet:
        value = torch.ones(100_000)
        fleet.all_reduce(value)
        assert value.tolist() == [float(fleet.world_size)] * 100_000
        connections = psutil.Process().net_connections("tcp")
        print("addresses", *sorted({entry.laddr.ip for entry in connections if entry.raddr}), flush=True)
        fleet.barrier()


def die() -> None:
    """Rank 1 dies between two steps; the others are told so."""
    fleet = syncline.init()
    model = nn.Linear(4, 2)
    model, optimizer = syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), samples="batch")
    try:
        for step in range(100):
            if step == 3 and fleet.rank == 1:
                os._exit(7)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except PeerLostError as error:
        print(f"told of rank {error.rank}", flush=True)


def _mapped_segments() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:syncline")


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"cycles": lambda: cycles(int(sys.argv[2])), "train": train, "addresses": addresses, "die": die}[sys.argv[1]]()
