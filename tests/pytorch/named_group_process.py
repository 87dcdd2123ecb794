"""One rank of DDP and of FSDP2 on groups of Syncline, where another one does something wrong: one fault after another.

Each fault has a group of its own, which alone it ends. The last one, of which the world itself hears, is SIGSTOP.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

RANK, GUILTY, AT, STEPS = int(os.environ["RANK"]), 1, 2, 4
TIMEOUT = timedelta(seconds=1)


def data_parallel(group: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(nn.Linear(4, 4), process_group=group)


def sharded(group: dist.ProcessGroup) -> nn.Module:
    return fully_shard(nn.Linear(4, 4), mesh=DeviceMesh.from_group(group, "cpu"))


def hang(_: dist.ProcessGroup) -> bool:
    return True


def evaluate(group: dist.ProcessGroup) -> bool:
    dist.all_reduce(torch.ones(3), group=group)
    return False


def leave(group: dist.ProcessGroup) -> bool:
    dist.destroy_process_group(group)
    return True


def stop(_: dist.ProcessGroup) -> bool:
    os.kill(os.getpid(), signal.SIGSTOP)
    return True


def train(model: nn.Module, group: dist.ProcessGroup, fault: Callable[[dist.ProcessGroup], bool]) -> None:
    """Train; the rank at fault does something else in a step, and makes no further one if that returns True."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        if (RANK, step) == (GUILTY, AT) and fault(group):
            return
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def tell(kind: str, fault: str, run: Callable[[], None]) -> None:
    """Print whom the error names that ends ``run``, first, and what it says."""
    try:
        run()
        said = "no error"
    except RuntimeError as error:
        first = re.search(r"rank (\d) \(host", str(error))
        said = f"rank {first[1] if first else None} | {str(error).splitlines()[0]}"
    if RANK != GUILTY:
        print(f"{kind} | {fault} | {said}", flush=True)


def main(folder: str) -> None:
    dist.init_process_group("syncline", timeout=timedelta(seconds=100))
    for make in (data_parallel, sharded):
        for fault in (hang, evaluate, leave):
            group = dist.new_group(timeout=TIMEOUT)
            model = make(group)
            dist.barrier()
            tell(
                make.__name__, fault.__name__, lambda model=model, group=group, fault=fault: train(model, group, fault)
            )
            dist.barrier()
    model = data_parallel(dist.group.WORLD)
    victim = Path(folder, "victim")
    if RANK == GUILTY:
        victim.write_text(str(os.getpid()))
    dist.barrier()
    tell("data_parallel", "stop", lambda: train(model, dist.group.WORLD, stop))
    if RANK == 0:
        os.kill(int(victim.read_text()), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
