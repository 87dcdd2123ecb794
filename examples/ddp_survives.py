"""DistributedDataParallel that goes on when ranks die, rank 0 too, and lets those in that come.

    syncline run --ranks 4 --elastic --restarts 100 examples/ddp_survives.py FOLDER

Kill any of its processes: the others make the step anew without it, in the same processes; the launcher starts it
again, and it comes in between two steps. Nothing of this goes through a checkpoint. Each rank writes into FOLDER whose
batches counted in each step, and a hash of the parameters after it; it ends with the step that the file ``stop`` there
names. ``benchmarks/kills.py`` kills ranks, and trains once more in one process: to the same bits, since gradients are
rounded so that means over one to four ranks are exact in any order.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncline

COMPUTE_S = 0.05  # a step's computing, on an accelerator that is not there
GRAIN = 3 * 2.0**-15  # a third of it, and a sum of a few, are exact in float32


def make_model() -> nn.Module:
    """Return a small model whose gradients are multiples of the grain."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: (grad / GRAIN).round() * GRAIN)
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that has state, which newcomers lack."""
    return torch.optim.SGD(model.parameters(), lr=2.0**-5, momentum=0.5)


def loss_of(model: nn.Module, number: int, step: int) -> torch.Tensor:
    """Return the loss of one member's batch: it depends on the member's number, which it keeps, and on the step."""
    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + number))
    return nn.functional.mse_loss(model(batch), batch[:, :8].sin())


def replay_step(model: nn.Module, optimizer: torch.optim.Optimizer, counted: list[int], step: int) -> None:
    """Make a step of all who counted in it, in one process."""
    optimizer.zero_grad()
    for number in counted:
        loss_of(model, number, step).backward()
    for parameter in model.parameters():
        parameter.grad /= len(counted)
    optimizer.step()


def digest(model: nn.Module) -> str:
    """Return a hash of all bits of the parameters."""
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()


class Trainer:
    """One rank: its model and optimizer, the steps that they have seen, and who trains with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_model()
        self.optimizer = make_optimizer(self.model)
        self.step: int | None = None  # no state yet: a newcomer takes that of the others
        self.change: syncline.Reconfiguration | None = None
        self.failed_at: tuple[int | None, int | None] | None = None

    def regroup(self) -> None:
        """Make the default group of whoever is there, let all have the newest state, and wrap the model anew."""
        self.parallel = None  # the old one would reduce gradients on the old group
        self.change = change = syncline.reconfigure(step=self.step)
        state = [self.model.state_dict(), self.optimizer.state_dict()]
        if change.behind:
            dist.broadcast_object_list(state, src=change.source)
        if change.rank in change.behind:
            self.model.load_state_dict(state[0])
            self.optimizer.load_state_dict(state[1])
        self.parallel = DistributedDataParallel(self.model)
        self.step = change.step

    def make_step(self) -> bool:
        """Make one step with all members; return whether newcomers wait."""
        self.optimizer.zero_grad()
        time.sleep(COMPUTE_S)
        loss_of(self.parallel, self.change.members[self.change.rank], self.step).backward()
        has_newcomers = syncline.commit()  # all have come as far: nobody steps alone
        self.optimizer.step()
        self.step += 1
        return has_newcomers

    def may_go_on(self) -> bool:
        """Whether an error may be for a loss: the same step has not failed before with the same members."""
        failed_at, before = (self.step, self.change and self.change.epoch), self.failed_at
        self.failed_at = failed_at
        return self.change is not None and failed_at != before

    def is_over(self) -> bool:
        """Whether the file ``stop`` names a step that is made."""
        stop = self.folder / "stop"
        return stop.exists() and self.step is not None and self.step >= int(stop.read_text())

    def train(self) -> None:
        """Train, through whatever happens to the others."""
        must_regroup = True
        with (self.folder / f"{os.getpid()}-{time.time_ns()}.jsonl").open("w", buffering=1) as log:
            while not self.is_over():
                try:
                    if must_regroup:
                        self.regroup()
                    must_regroup = self.make_step()
                except RuntimeError as error:  # PeerLostError is one; of those in a backward pass, torch makes its own
                    if not self.may_go_on():
                        raise
                    print(f"step {self.step}: {str(error).splitlines()[0]}", file=sys.stderr)
                    must_regroup = True
                else:
                    line = {"step": self.step - 1, "counted": self.change.members, "digest": digest(self.model)}
                    line |= {"rank": self.change.rank, "epoch": self.change.epoch, "at_s": time.monotonic()}
                    log.write(json.dumps(line) + "\n")


def main() -> None:
    """Train until it is enough."""
    torch.set_num_threads(1)
    trainer = Trainer(Path(sys.argv[1]))
    trainer.train()
    del trainer.parallel  # before the group that it uses
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
