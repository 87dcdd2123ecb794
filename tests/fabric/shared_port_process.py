"""A rank of a job whose ranks share one port of their host; it says on which it listens.

``python shared_port_process.py fleet | groups``
"""

import sys

import psutil
import torch
import torch.distributed as dist
from torch import nn

import syncline


def train() -> None:
    fleet = syncline.init()
    torch.manual_seed(fleet.rank)
    model = nn.Linear(16, 4)
    model, optimizer = syncline.distribute(model, torch.optim.Adam(model.parameters()), syncline.Sharded())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
    tell_ports()
    fleet.close()


def reduce() -> None:
    dist.init_process_group("syncline")
    pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    for group in (dist.group.WORLD, pairs[dist.get_rank() // 2]):
        ones = torch.ones(1000)
        dist.all_reduce(ones, group=group)
        assert ones.eq(dist.get_world_size(group)).all()
    tell_ports()
    dist.destroy_process_group()


def tell_ports() -> None:
    connections = psutil.Process().net_connections(kind="tcp")
    print("listens on", sorted({one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}), flush=True)


if __name__ == "__main__":
    {"fleet": train, "groups": reduce}[sys.argv[1]]()
