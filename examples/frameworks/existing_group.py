"""`distribute()` within a process group that somebody has made, as Ray Train does: on its ranks and its store.

syncline run --ranks 2 examples/frameworks/existing_group.py
"""

import torch.distributed as dist
from regression import NUM_STEPS, make_model, make_optimizer, report, train, train_alone

import syncline


def main() -> None:
    """Train, and compare with one process."""
    dist.init_process_group("gloo")  # Ray's, for one: then no variable need say which rank this is
    with syncline.init() as fleet:
        model = make_model()
        model, optimizer = syncline.distribute(model, make_optimizer(model.parameters()))
        train(model, optimizer, fleet.rank, range(NUM_STEPS))
        report("existing_group", fleet.rank, model, train_alone(fleet.world_size))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
