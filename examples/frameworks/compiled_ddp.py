"""DistributedDataParallel compiled by torch.compile, on Syncline's process group.

syncline run --ranks 2 examples/frameworks/compiled_ddp.py [aot_eager]
"""

import sys

import torch
import torch.distributed as dist
from regression import NUM_STEPS, make_model, make_optimizer, report, train, train_alone
from torch.nn.parallel import DistributedDataParallel

import syncline  # noqa: F401 - makes the backend known


def main(backend: str = "inductor") -> None:
    """Train, and compare with one process."""
    dist.init_process_group("syncline")
    model = DistributedDataParallel(make_model())
    compiled = torch.compile(model, backend=backend)
    train(compiled, make_optimizer(model.parameters()), dist.get_rank(), range(NUM_STEPS))
    report("compiled_ddp", dist.get_rank(), model, train_alone(dist.get_world_size()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
