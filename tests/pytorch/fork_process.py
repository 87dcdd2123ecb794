"""One rank that forks: children that end with ``sys.exit``, loaders with workers, a death with workers alive."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import syncline
from syncline.errors import FabricError, PeerLostError


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return syncline.distribute(model, torch.optim.Adam(model.parameters(), lr=0.01))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def be_child(fleet: syncline.Fleet) -> None:
    """Touch everything that is the parent's, and end as a program ends."""
    uses = {
        "all_reduce": lambda: fleet.all_reduce(torch.ones(3)),
        "barrier": fleet.barrier,
        "statistics": fleet.statistics,
    }
    for name, use in uses.items():
        try:
            use()
        except FabricError as error:
            if "Only the process that called syncline.init()" in str(error):
                print("child was told of", name, flush=True)
    fleet.close()
    sys.exit(0)


def child() -> None:
    """Fork in the middle of training; the parent trains on."""
    fleet = syncline.init()
    model, optimizer = make_model()
    for number in range(4):
        step(model, optimizer, torch.ones(2, 4))
        if number == 1:
            process = os.fork()
            if process == 0:
                be_child(fleet)
            print("child ended with", os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
    fleet.close()


def group_child() -> None:
    """Fork when messages have passed through an inbox; the parent's go on."""
    dist.init_process_group("syncline")
    rank, given, taken = dist.get_rank(), torch.ones(3), torch.zeros(3)
    for number in range(2):
        works = [dist.isend(given, 1 - rank), dist.irecv(taken, 1 - rank)]
        for work in works:
            work.wait()
        if number == 0 and (process := os.fork()) == 0:
            for name, use in (("send", dist.isend), ("receive", dist.irecv)):
                try:
                    use(given, 1 - rank)
                except FabricError as error:
                    if "Only the process that called" in str(error):
                        print("child was told of", name, flush=True)
            os._exit(0)
        elif number == 0:
            print("child ended with", os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
    dist.destroy_process_group()


def open_sockets() -> set[str]:
    """Return the sockets of this process, by the kernel's names."""
    folder = Path("/proc/self/fd")
    names = {str(link.readlink()) for link in folder.iterdir() if link.is_symlink()}
    return {name for name in names if name.startswith("socket:")}


def sockets() -> None:
    """Say how many of the fabric's sockets a forked child keeps; those of before do not count."""
    before = open_sockets()
    with syncline.init() as fleet:
        ours = open_sockets() - before
        process = os.fork()
        if process == 0:
            kept = {name for name in open_sockets() & ours if is_tcp(name)}
            print("had some:", any(is_tcp(name) for name in ours), "kept:", len(kept), flush=True)
            os._exit(0)
        os.waitpid(process, 0)
        fleet.barrier()


def is_tcp(name: str) -> bool:
    """Whether a socket is one of TCP; the loop has another pair, of its own, which nobody is told by."""
    inode = name.removeprefix("socket:[").removesuffix("]")
    tables = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
    return any(inode in line.split() for table in tables for line in table.read_text().splitlines())


def workers(pids: str) -> None:
    """Load with workers; rank 1 stops its workers, so that they outlive it, and is killed. Rank 0 is told so."""
    fleet = syncline.init()
    model, optimizer = make_model()
    loader = DataLoader(torch.ones(4000, 4), batch_size=4, num_workers=2)
    path = Path(pids)
    try:
        for number, x in enumerate(loader):
            step(model, optimizer, x)
            if fleet.rank == 1 and number == 3:
                children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
                for each in children:
                    os.kill(int(each), signal.SIGSTOP)
                path.write_text(" ".join(children))
                os.kill(os.getpid(), signal.SIGKILL)
    except PeerLostError as error:
        print("told:", error, flush=True)
    finally:
        if fleet.rank == 0:
            for each in path.read_text().split():
                os.kill(int(each), signal.SIGKILL)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
