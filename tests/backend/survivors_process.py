"""One rank that trains with DistributedDataParallel, loses another, and goes on with those who are left.

    python survivors_process.py VICTIM [STORE]

They meet in the file STORE, or else in a TCPStore of rank 0, before the loss and after it.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STRUCK_AT, NUM_STEPS = 2, 4
TIMEOUT = timedelta(seconds=100)


def batch_of(rank: int, step: int) -> torch.Tensor:
    """Return what ``rank`` trains on in a step."""
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model as all begin with it, and an optimizer that has state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def expected(survivors: list[int]) -> nn.Module:
    """Return what one process comes to with the batches of all ranks, and then with those of the survivors."""
    model, optimizer = make_model()
    for step in range(NUM_STEPS):
        ranks = range(WORLD_SIZE) if step < STRUCK_AT else survivors
        optimizer.zero_grad()
        (sum(model(batch_of(rank, step)).square().mean() for rank in ranks) / len(ranks)).backward()
        optimizer.step()
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Make steps on this rank's batches."""
    for step in steps:
        optimizer.zero_grad()
        model(batch_of(RANK, step)).square().mean().backward()
        optimizer.step()


def open_store(path: str | None) -> Any:
    """Return the store that outlives the victim."""
    if path is not None:
        return dist.FileStore(path, -1)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, WORLD_SIZE, is_master=RANK == 0, timeout=TIMEOUT)


def lose(victim: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train until a rank is killed."""
    parallel = DistributedDataParallel(model)
    train(parallel, optimizer, range(STRUCK_AT))
    dist.barrier()  # so all have made the same steps, wherever they are told of the loss
    if victim == RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    train(parallel, optimizer, range(STRUCK_AT, NUM_STEPS))


def check_sum(group: Any, number: int) -> None:
    """Check that a group of ``number`` ranks adds."""
    value = torch.full((5,), 2.0)
    dist.all_reduce(value, group=group)
    assert value.tolist() == [2.0 * number] * 5


def main(victim: int, path: str | None = None) -> None:
    """Lose a rank; go on in a group of the old world, and then in a new one."""
    survivors = [rank for rank in range(WORLD_SIZE) if rank != victim]
    place = survivors.index(RANK) if victim != RANK else -1
    store = open_store(path)
    dist.init_process_group("syncline", store=store, rank=RANK, world_size=WORLD_SIZE, timeout=TIMEOUT)
    model, optimizer = make_model()
    with pytest.raises(RuntimeError, match=rf"rank {victim} \(host h{victim}\)"):
        lose(victim, model, optimizer)
    with pytest.raises(TypeError, match="does not support shrinking"):
        dist.shrink_group([victim], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    group = dist.new_group(survivors)
    check_sum(group, len(survivors))
    train(DistributedDataParallel(model, process_group=group), optimizer, range(STRUCK_AT, STRUCK_AT + 1))
    print("in the old world", flush=True)

    unanswered = dist.irecv(torch.empty(1), survivors[place - 1], group=group)
    dist.group.WORLD.abort()
    with pytest.raises(RuntimeError):
        unanswered.wait()
    dist.destroy_process_group()
    dist.init_process_group("syncline", store=store, rank=place, world_size=len(survivors), timeout=TIMEOUT)
    check_sum(None, len(survivors))
    train(DistributedDataParallel(model), optimizer, range(STRUCK_AT + 1, NUM_STEPS))
    for one, other in zip(model.parameters(), expected(survivors).parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    dist.barrier()  # the store of rank 0 is not to end before all have met
    dist.destroy_process_group()
    print("in a new world", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), *sys.argv[2:])
