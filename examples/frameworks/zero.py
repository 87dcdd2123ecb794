"""ZeroRedundancyOptimizer on Syncline's process group, with its whole state gathered at the end.

syncline run --ranks 2 examples/frameworks/zero.py
"""

import torch
import torch.distributed as dist
from regression import NUM_STEPS, make_model, report, train, train_alone
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import syncline  # noqa: F401 - makes the backend known


def main() -> None:
    """Train, and compare with one process."""
    dist.init_process_group("syncline")
    rank = dist.get_rank()
    model = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    train(model, optimizer, rank, range(NUM_STEPS))
    optimizer.consolidate_state_dict(to=0)
    report("zero", rank, model, train_alone(dist.get_world_size()))
    if rank == 0:
        print(f"zero: state of {len(optimizer.state_dict()['state'])} parameters", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
