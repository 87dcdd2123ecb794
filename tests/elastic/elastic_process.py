"""One rank of an elastic job as a process of its own, which kills itself where it is told; it logs what it trained.

``python elastic_process.py [min=N] [spares] FOLDER STEPS [RANK:STEP:PLACE ...]``; places are those of :func:`watch`.
``RANK+RANK:STEP:PLACE``: two ranks die at once, when both are there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import syncline
from syncline.pytorch.elastic_training import ElasticTraining
from syncline.runtime.regroup import Regroup
from syncline.updates.elastic_calls import CommitReport
from syncline.updates.elastic_sharded import ElasticShardedUpdater


def make_model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)).double()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def batch(rank: int, step: int) -> torch.Tensor:
    """Ranks have batches of other sizes, which change."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(3 + (rank + step) % 3, 6, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).square().mean()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Deaths:
    """Where this rank dies: each method arranges for one place of one step."""

    def __init__(self, rank: int, told: list[str], folder: Path) -> None:
        self.step = -1
        self._due: dict[str, int] = {}
        self._pipe = folder / "at-once"
        self._of_two: list[str] = []
        for death in told:
            numbers, step, place = death.split(":")
            if str(rank) in (ranks := numbers.split("+")):
                self._due[place] = int(step)
                self._of_two = ranks if len(ranks) > 1 else []
        self._is_first = self._of_two[:1] == [str(rank)]

    def at(self, place: str) -> None:
        """Die here, if it is time."""
        if self._due.get(place, self.step + 1) > self.step:
            return
        if self._of_two:
            self._kill_both()
        die()

    def _kill_both(self) -> None:
        """Let the second of two kill the first, which waits for it here: neither goes on without the other."""
        with contextlib.suppress(FileExistsError):
            os.mkfifo(self._pipe)
        if self._is_first:
            self._pipe.write_text(str(os.getpid()))  # waits for a reader
            signal.pause()
        os.kill(int(self._pipe.read_text()), signal.SIGKILL)

    def stop(self, folder: Path) -> None:
        """Be stopped here, if it is time, until another rank has gone on without this one."""
        if self._due.get("stop") == self.step:
            (folder / "stopped").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

    def before(self, owner: Any, name: str, place: str) -> None:
        """Die before this method is called."""
        method = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.at(place)
            return method(*args, **kwargs)

        setattr(owner, name, wrapped)


def watch(deaths: Deaths, model: nn.Sequential, optimizer: Any) -> None:
    """Let the rank die in all places that a step has."""
    model[2].register_forward_pre_hook(lambda *_: deaths.at("forward"))
    model[3].register_full_backward_hook(lambda *_: deaths.at("backward"))
    deaths.before(CommitReport, "commit", "commit")
    deaths.before(Regroup, "agree", "agreement")
    deaths.before(ElasticTraining, "enter", "entering")
    deaths.before(ElasticTraining, "settle", "settling")
    deaths.before(optimizer.inner, "step", "step")
    deaths.before(ElasticShardedUpdater, "_apply", "apply")
    deaths.before(ElasticShardedUpdater, "_take_gathered", "gather")
    deaths.before(ElasticShardedUpdater, "_redistribute", "moving")
    deaths.before(optimizer.training._buffers, "end_step", "buffers")


def wake(folder: Path) -> None:
    """Let the rank that was stopped run again."""
    with contextlib.suppress(FileNotFoundError):
        os.kill(int((folder / "stopped").read_text()), signal.SIGCONT)


def digest(model: nn.Module) -> str:
    joined = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(joined).hexdigest()


def train(folder: Path, num_steps: int, told: list[str], rule: Any, elastic: Any = True) -> None:
    fleet = syncline.init()
    rank = fleet.rank
    deaths = Deaths(rank, told, folder)
    model = make_model()
    model, optimizer = syncline.distribute(
        model,
        make_optimizer(model),
        rule,
        samples="batch",
        elastic=elastic,
        check_every=2,
    )
    watch(deaths, model, optimizer)
    changes: list[Any] = []
    optimizer.on_membership_change(lambda change: changes.append([change.epoch, change.iteration, list(change.lost)]))
    with (folder / f"rank{rank}.jsonl").open("w") as log:
        for step in range(num_steps):
            deaths.step = step
            deaths.stop(folder)
            start_s = time.monotonic()
            optimizer.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            deaths.at("between")
            counted = optimizer.training.collector.report.ranks
            optimizer.step()
            entry = {
                "step": step,
                "members": list(fleet.members),
                "counted": list(counted),
                "digest": digest(model),
                "changes": changes,
                "seconds": time.monotonic() - start_s,
            }
            print(json.dumps(entry), file=log, flush=True)
    torch.save(model.state_dict(), folder / f"rank{rank}.pt")
    if rank == 0:
        wake(folder)
    statistics = fleet.statistics()
    print(f"members {list(fleet.members)} epoch {statistics.epoch}", flush=True)
    assert statistics.fabric.unexpected_bytes == 0, "what is of an epoch that is over stays nowhere"
    fleet.close()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    settings: Callable[..., Any] | bool = True
    if arguments[0].startswith("min="):
        settings = syncline.Elastic(min_ranks=int(arguments.pop(0)[4:]))
    rule: Any = syncline.AllReduce(bucket_bytes=400)
    if arguments[0] == "spares":
        rule = syncline.Sharded(bucket_bytes=400, spares=1)
        arguments.pop(0)
    train(Path(arguments[0]), int(arguments[1]), arguments[2:], rule, settings)
