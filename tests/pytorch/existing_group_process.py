"""One rank of a gloo group that met by a file or a store, and of whose place no variable says anything."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist, nn

import syncline
from syncline.errors import ConfigurationError
from syncline.pytorch import connecting

LIMIT = timedelta(seconds=60)


def main(kind: str, folder: str) -> None:
    rank, size, port = (int(os.environ.pop(name)) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    del os.environ["MASTER_ADDR"]
    if kind == "file":
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=LIMIT)
    else:
        store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout=LIMIT)
        dist.init_process_group("gloo", store=dist.PrefixStore("job", store), rank=rank, world_size=size, timeout=LIMIT)
    for _ in range(2):  # a second fleet meets at the same store
        with syncline.init() as fleet:
            assert (fleet.rank, fleet.world_size) == (rank, size)
            train(fleet)
    disagrees(rank, size)
    if kind == "file":
        apart(rank)
    dist.barrier()
    dist.destroy_process_group()
    print("ended", flush=True)


def train(fleet: syncline.Fleet) -> None:
    torch.manual_seed(fleet.rank)
    model = nn.Linear(4, 2)
    model, optimizer = syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = fleet.all_gather_object(model.weight.tolist())
    assert all(each == weights[0] for each in weights)
    total = model.weight.detach().clone()
    dist.all_reduce(total)  # the group goes on beside the fleet
    assert torch.allclose(total, fleet.world_size * model.weight)


def disagrees(rank: int, size: int) -> None:
    os.environ["WORLD_SIZE"] = str(size + 1)
    said = rf"WORLD_SIZE={size + 1}, but this process is rank {rank} of {size} in the process group"
    with pytest.raises(ConfigurationError, match=said):
        syncline.init()


def apart(rank: int) -> None:
    """Ranks whose machines differ listen on no loopback, although nobody says where they are."""
    os.environ.pop("WORLD_SIZE")
    connecting.machine_name = lambda: f"machine {rank}"
    connecting.own_address = lambda _: "127.0.0.2"
    with pytest.raises(ConfigurationError, match=r"several machines.*give each rank init\(interface=\)"):
        syncline.init()


if __name__ == "__main__":
    main(*sys.argv[1:])
