"""One rank of a sharded training in a lab: `python lab_sharded.py NUM_STEPS [NUM_SPARES]`.

It prints `ready` when all ranks are, trains once it is told to, prints `done` when all ranks are, and ends once told.
"""

import sys

import torch
from told_training import train_when_told

import syncline

SIDE, NUM_LAYERS = 1024, 4
NUM_BYTES = 4 * SIDE * SIDE * NUM_LAYERS
"""Of the model, and so of its gradients: as many buckets as layers."""


def main(num_steps: str, num_spares: str = "0") -> None:
    with syncline.init(insecure=True, timeout_s=60) as fleet:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(SIDE, SIDE, bias=False) for _ in range(NUM_LAYERS)))
        rule = syncline.Sharded(spares=int(num_spares))
        model, optimizer = syncline.distribute(model, torch.optim.Adam(model.parameters()), rule)
        train_when_told(fleet, model, optimizer, int(num_steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
