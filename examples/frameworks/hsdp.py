"""FSDP2 inside each site, and Syncline between the sites: the slow link carries each gradient shard once.

    syncline run --ranks 4 examples/frameworks/hsdp.py [gloo]

Ranks 0 and 1 are one site here, 2 and 3 the other. The backend inside a site is the argument (NCCL on GPUs); a group of
Syncline's has the ranks that hold the same shard.
"""

import sys

import torch
import torch.distributed as dist
from regression import NUM_STEPS, make_model, make_optimizer, report, train, train_alone
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import syncline  # noqa: F401 - makes the backend known

SITE_SIZE = 2


def main(inside: str = "gloo") -> None:
    """Train, and compare with one process."""
    dist.init_process_group(inside)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sites = torch.arange(world_size).view(-1, SITE_SIZE).tolist()
    site, _ = dist.new_subgroups_by_enumeration(sites)
    columns = [list(ranks) for ranks in zip(*sites, strict=True)]
    between, _ = dist.new_subgroups_by_enumeration(columns, backend="syncline")

    def average_between_sites(shard: torch.Tensor) -> None:
        dist.all_reduce(shard, op=dist.ReduceOp.AVG, group=between)

    model = make_model()
    fully_shard(model, mesh=DeviceMesh.from_group(site, "cpu"))
    model.set_all_reduce_hook(average_between_sites)
    train(model, make_optimizer(model.parameters()), rank, range(NUM_STEPS))
    report(f"hsdp over {inside}", rank, model, train_alone(world_size))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
