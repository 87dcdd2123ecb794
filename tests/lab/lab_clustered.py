"""One rank of a clustered training in a lab: `python lab_clustered.py PERIOD REELECT_EVERY NUM_STEPS CLUSTERS`.

It prints `ready` when all ranks are, trains once it is told to, prints `done` when all ranks are, and ends once told.
"""

import json
import sys

import torch
from told_training import train_when_told

import syncline

SIDE = 512
NUM_BYTES = 4 * SIDE * SIDE
"""Of the model, and so of a vector of gradients."""


def main() -> None:
    period, reelect_every, num_steps = map(int, sys.argv[1:4])
    rule = syncline.Clustered(period=period, reelect_every=reelect_every, clusters=json.loads(sys.argv[4]))
    with syncline.init(insecure=True, timeout_s=60) as fleet:
        model = torch.nn.Linear(SIDE, SIDE, bias=False)
        model, optimizer = syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), rule)
        train_when_told(fleet, model, optimizer, num_steps)


if __name__ == "__main__":
    main()
