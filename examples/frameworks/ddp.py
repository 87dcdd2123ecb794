"""DistributedDataParallel on Syncline's process group: one line of a program that uses torch.distributed changes.

syncline run --ranks 2 examples/frameworks/ddp.py
"""

import torch.distributed as dist
from regression import NUM_STEPS, make_model, make_optimizer, report, train, train_alone
from torch.nn.parallel import DistributedDataParallel

import syncline  # noqa: F401 - makes the backend known; where Syncline is installed, torch does that by itself


def main() -> None:
    """Train, and compare with one process."""
    dist.init_process_group("syncline")
    model = DistributedDataParallel(make_model())
    train(model, make_optimizer(model.parameters()), dist.get_rank(), range(NUM_STEPS))
    report("ddp", dist.get_rank(), model, train_alone(dist.get_world_size()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
