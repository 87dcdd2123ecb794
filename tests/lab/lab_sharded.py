"""One rank of a sharded training in a lab: `python lab_sharded.py NUM_STEPS`.

It prints `ready` when all ranks are, trains once it is told to, prints `done` when all ranks are, and ends once told.
"""

import sys

import torch

import syncline

SIDE, NUM_LAYERS = 1024, 4
NUM_BYTES = 4 * SIDE * SIDE * NUM_LAYERS
"""Of the model, and so of its gradients: as many buckets as layers."""


def main() -> None:
    with syncline.init(insecure=True, timeout_s=60) as fleet:
        model = torch.nn.Sequential(*(torch.nn.Linear(SIDE, SIDE, bias=False) for _ in range(NUM_LAYERS)))
        model, optimizer = syncline.distribute(model, torch.optim.Adam(model.parameters()), syncline.Sharded())
        fleet.barrier()
        print("ready", flush=True)
        sys.stdin.readline()
        for _ in range(int(sys.argv[1])):
            model(torch.ones(1, SIDE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        fleet.barrier()
        print("done", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
