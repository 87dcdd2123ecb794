"""DistributedDataParallel on another process group, with its gradients by a fleet: `syncline.comm_hook`.

syncline run --ranks 2 examples/frameworks/comm_hook.py
"""

import torch.distributed as dist

# DDP's functions take the group that is there when they are first imported as their default; before it there is none.
from regression import NUM_STEPS, make_model, make_optimizer, report, train, train_alone
from torch.nn.parallel import DistributedDataParallel

import syncline


def main() -> None:
    """Train, and compare with one process."""
    dist.init_process_group("gloo")
    with syncline.init() as fleet:  # on the ranks and the store of the group
        model = DistributedDataParallel(make_model())
        model.register_comm_hook(fleet, syncline.comm_hook)
        train(model, make_optimizer(model.parameters()), fleet.rank, range(NUM_STEPS))
        report("comm_hook", fleet.rank, model, train_alone(fleet.world_size))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
