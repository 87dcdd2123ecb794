"""The training of ``examples/hsdp_survives.py`` for ``benchmarks/kills.py``, which kills its ranks and replays it.

syncline run --ranks 4 --elastic --restarts 1000 benchmarks/kills_hsdp.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from kills_task import StepLog, digest, load_example, loss_of, make_optimizer, make_plain_model, slow_loss_of
from torch import nn

NUM_SHARDS = 2
make_model = make_plain_model


def replay_step(model: nn.Module, optimizer: torch.optim.Optimizer, counted: list[int], step: int) -> None:
    """Make a step of all who counted in it, in one process: the mean over pairs of their means, each of two numbers."""
    parameters = list(model.parameters())
    grads = [torch.autograd.grad(loss_of(model, number, step), parameters) for number in counted]
    while len(grads) > 1:
        pairs = zip(grads[::2], grads[1::2], strict=True)
        grads = [tuple((one + other) / 2 for one, other in zip(*pair, strict=True)) for pair in pairs]
    for parameter, grad in zip(parameters, grads[0], strict=True):
        parameter.grad = grad
    optimizer.step()


def digests(model: nn.Module) -> list[str]:
    """Return the hash of each shard's parameters, as one process has them all."""
    shards = [parameter.chunk(NUM_SHARDS) for parameter in model.parameters()]
    return [digest(chunks[shard] for chunks in shards) for shard in range(NUM_SHARDS)]


def main(folder: Path) -> None:
    """Train until it is enough."""
    torch.set_num_threads(1)
    log = StepLog(folder)
    training = load_example("hsdp_survives.py").Training(make_model, make_optimizer)
    for loss in training.steps(slow_loss_of):
        if loss is not None:
            own, change = [one.detach().to_local() for one in training.parameters], training.change
            told = {"shard": training.shard, "rank": change.rank, "epoch": change.epoch}
            log.write(training.step - 1, training.members, own, **told)
        if log.is_over(training.step):
            break
    training.model = None  # before the groups that it uses
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
