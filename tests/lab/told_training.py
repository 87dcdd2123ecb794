"""A training that begins when it is told to, by a line of its input, and tells when it is over: to count its bytes."""

import hashlib
import sys

import torch

import syncline


def train_when_told(fleet: syncline.Fleet, model: torch.nn.Module, optimizer: torch.optim.Optimizer, num_steps: int):
    """Print ``ready`` when all ranks are, train once told, print ``done`` when all ranks are, and end once told.

    The last line is a digest of the parameters.
    """
    first, *_ = model.parameters()
    fleet.barrier()
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(num_steps):
        model(torch.ones(1, first.shape[1])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    fleet.barrier()
    print("done", flush=True)
    sys.stdin.readline()
    parameters = torch.cat([each.detach().flatten() for each in model.parameters()])
    print(hashlib.sha256(parameters.numpy().tobytes()).hexdigest(), flush=True)
