"""FSDP2 (`fully_shard`) on Syncline's process group, with gradients clipped by their global norm.

syncline run --ranks 2 examples/frameworks/fsdp2.py
"""

import torch
import torch.distributed as dist
from regression import NUM_STEPS, make_model, make_optimizer, report, train, train_alone
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import syncline  # noqa: F401 - makes the backend known


def main() -> None:
    """Train, and compare with one process."""
    dist.init_process_group("syncline")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    model = make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model.parameters())
    train(model, optimizer, rank, range(NUM_STEPS))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert norm.full_tensor() > 0  # the norm of the last gradients, over all ranks
    report("fsdp2", rank, model, train_alone(world_size))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
