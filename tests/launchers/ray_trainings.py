"""Two trainings on one local Ray: the example as it stands, then DDP on process groups of the backend "syncline".

python ray_trainings.py EXAMPLE TOPOLOGY STORAGE
"""

from __future__ import annotations

import runpy
import sys

import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

from syncline.ray import TopologyConfig

NUM_STEPS = 3


def train_with_ddp() -> None:
    """Train on data of each worker's own, and print the weights."""
    torch.manual_seed(dist.get_rank())
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(NUM_STEPS):
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [value for parameter in model.parameters() for value in parameter.flatten().tolist()]
    print(f"DDP over {dist.get_backend()}, rank {dist.get_rank()}: {weights}")


def main() -> None:
    """Run both."""
    example, topology, storage = sys.argv[1:]
    sys.argv = [example, "--workers", "2", "--topology", topology, "--storage", storage]
    runpy.run_path(example, run_name="__main__")
    TorchTrainer(
        train_with_ddp,
        torch_config=TopologyConfig(backend="syncline", topology=topology),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=storage),
    ).fit()


if __name__ == "__main__":
    main()
