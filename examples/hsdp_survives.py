"""FSDP2 with replicas (HSDP) that goes on when ranks die, rank 0 too, and lets those in that come.

    syncline run --ranks 4 --elastic --restarts 100 examples/hsdp_survives.py FOLDER

Two ranks hold a model together, each one shard of every parameter; as many such pairs train as there are ranks for.
When a rank dies, the pairs are made anew of those who are left, and each gets its shard from a rank that has it; one
that is over waits until somebody comes. Nothing of this goes through a checkpoint; only if all who have a shard die at
once, the state is lost. What ranks write into FOLDER, and when they end, is as in ``ddp_survives.py``.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import syncline

NUM_SHARDS = 2
COMPUTE_S = 0.05  # a step's computing, on an accelerator that is not there


def make_model() -> nn.Module:
    """Return a small model, alike on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that has state, which is divided as the parameters are."""
    return torch.optim.SGD(model.parameters(), lr=2.0**-5, momentum=0.5)


def loss_of(model: nn.Module, number: int, step: int) -> torch.Tensor:
    """Return the loss of one member's batch: it depends on the member's number, which it keeps, and on the step."""
    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + number))
    return nn.functional.mse_loss(model(batch), batch[:, :8].sin())


def replay_step(model: nn.Module, optimizer: torch.optim.Optimizer, counted: list[int], step: int) -> None:
    """Make a step of all who counted in it, in one process: the mean over pairs of their means, each of two numbers."""
    parameters = list(model.parameters())
    grads = [torch.autograd.grad(loss_of(model, number, step), parameters) for number in counted]
    while len(grads) > 1:
        pairs = zip(grads[::2], grads[1::2], strict=True)
        grads = [[(one + other) / 2 for one, other in zip(*pair, strict=True)] for pair in pairs]
    for parameter, grad in zip(parameters, grads[0], strict=True):
        parameter.grad = grad
    optimizer.step()


def digest(tensors: list[torch.Tensor]) -> str:
    """Return a hash of all bits of tensors."""
    return hashlib.sha256(b"".join(one.detach().contiguous().numpy().tobytes() for one in tensors)).hexdigest()


def digests(model: nn.Module) -> list[str]:
    """Return the hash of each shard's parameters, as one process has them all."""
    shards = [parameter.chunk(NUM_SHARDS) for parameter in model.parameters()]
    return [digest([chunks[shard] for chunks in shards]) for shard in range(NUM_SHARDS)]


class Trainer:
    """One rank: the shard that it has, the steps that this has seen, and who trains with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step: int | None = None
        self.shard: int | None = None  # no state yet: a newcomer takes that of the others
        self.change: syncline.Reconfiguration | None = None
        self.failed_at: tuple[int | None, int | None] | None = None

    def regroup(self) -> None:
        """Make the default group of whoever is there, divide it into pairs, and let each have its shard."""
        self.model = None  # and with it the groups of the old world
        self.change = change = syncline.reconfigure(step=None if self.shard is None else self.step)
        states = self.gather_states()
        num_paired = change.world_size - change.world_size % NUM_SHARDS
        mesh = DeviceMesh("cpu", torch.arange(num_paired).view(-1, NUM_SHARDS), mesh_dim_names=("replicate", "shard"))
        self.members, self.step = change.members[:num_paired], change.step
        if change.rank >= num_paired:  # it waits for another one
            self.shard = None
            return
        self.shard = change.rank % NUM_SHARDS
        self.model = fully_shard(make_model(), mesh=mesh)
        self.optimizer = make_optimizer(self.model)
        self.parameters = list(self.model.parameters())  # each rank's part; within a forward pass the model has others
        if states:
            self.put(states[self.shard])

    def gather_states(self) -> list[Any]:
        """Return the newest state of each shard, from the first rank that has it; nothing if nobody has any."""
        held: list[Any] = [None] * self.change.world_size
        dist.all_gather_object(held, (self.shard, self.step))
        if all(shard is None for shard, _ in held):
            return []
        states = []
        for shard in range(NUM_SHARDS):
            if (shard, self.change.step) not in held:
                raise SystemExit(f"all ranks are lost that had shard {shard}")
            source = held.index((shard, self.change.step))
            told = [self.state() if source == self.change.rank else None]
            dist.broadcast_object_list(told, src=source)
            states.append(told[0])
        return states

    def state(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return this rank's part of each parameter, and of its momentum."""
        momenta = [self.optimizer.state[one].get("momentum_buffer") for one in self.parameters]
        return [
            (one.detach().to_local(), None if momentum is None else momentum.to_local())
            for one, momentum in zip(self.parameters, momenta, strict=True)
        ]

    def put(self, state: list[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Take over what :meth:`state` has returned, here or elsewhere."""
        for parameter, (values, momentum) in zip(self.parameters, state, strict=True):
            parameter.detach().to_local().copy_(values)
            if momentum is not None:
                divided = DTensor.from_local(momentum, parameter.device_mesh, parameter.placements)
                self.optimizer.state[parameter]["momentum_buffer"] = divided

    def make_step(self) -> bool:
        """Make one step with all members; return whether newcomers wait."""
        if self.model is not None:
            self.optimizer.zero_grad()
            time.sleep(COMPUTE_S)
            loss_of(self.model, self.change.members[self.change.rank], self.step).backward()
        has_newcomers = syncline.commit()  # all have come as far: nobody steps alone
        if self.model is not None:
            self.optimizer.step()
        self.step += 1
        return has_newcomers

    def is_over(self) -> bool:
        """Whether the file ``stop`` names a step that is made."""
        stop = self.folder / "stop"
        return stop.exists() and self.step is not None and self.step >= int(stop.read_text())

    def may_go_on(self) -> bool:
        """Whether an error may be for a loss: the same step has not failed before with the same members."""
        failed_at, before = (self.step, self.change and self.change.epoch), self.failed_at
        self.failed_at = failed_at
        return self.change is not None and failed_at != before

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
                    self.tell(log)

    def tell(self, log: TextIO) -> None:
        """Write down what the step that has ended here has come to."""
        if self.model is None:
            return
        line = {"step": self.step - 1, "counted": self.members, "shard": self.shard}
        line |= {"digest": digest([one.detach().to_local() for one in self.parameters]), "rank": self.change.rank}
        log.write(json.dumps(line | {"epoch": self.change.epoch, "at_s": time.monotonic()}) + "\n")


def main() -> None:
    """Train until it is enough."""
    torch.set_num_threads(1)
    trainer = Trainer(Path(sys.argv[1]))
    trainer.train()
    trainer.model = None  # before the groups that it uses
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
