"""FSDP2 with replicas (HSDP) that goes on when ranks die, rank 0 too, and lets those in that come.

    syncline run --ranks 4 --elastic --restarts 100 examples/hsdp_survives.py 2000

Two ranks hold a model together, each one shard of every parameter; as many such pairs train as there are ranks for.
When a rank dies, the pairs are made anew of those who are left, and each gets its shard from a rank that has it; one
that is over waits until somebody comes. Nothing of this goes through a checkpoint; only if all who train with a shard
die before a pair is made anew, the state is lost: with one pair, after a loss of four, that is any second one.
"""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import syncline

NUM_SHARDS = 2
BATCH_SIZE = 32


class Training:
    """A rank's shard of a model and its optimizer, the steps that this has seen, and who trains with it."""

    def __init__(self, make_model: Callable[[], nn.Module], make_optimizer: Callable[[Any], Any]) -> None:
        self.make_model, self.make_optimizer = make_model, make_optimizer
        self.model: nn.Module | None = None  # of a rank that waits for another one
        self.step: int | None = None
        self.shard: int | None = None  # no state yet: a newcomer takes that of the others
        self.has_gradients = False  # of all ranks, of a step that is not made yet
        self.members: tuple[int, ...] = ()
        self.change: syncline.Reconfiguration | None = None

    def regroup(self) -> None:
        """Make the default group of whoever is there, divide it into pairs, and let each have its shard."""
        self.model = None  # and with it the groups of the old world
        self.change = change = syncline.reconfigure(step=None if self.shard is None else self.step)
        if self.has_gradients and change.step == self.step + 1:  # commit() told others that all had come so far
            self.make_step()
        states = self.gather_states()
        num_paired = change.world_size - change.world_size % NUM_SHARDS
        mesh = DeviceMesh("cpu", torch.arange(num_paired).view(-1, NUM_SHARDS), mesh_dim_names=("replicate", "shard"))
        self.members, self.step = change.members[:num_paired], change.step
        self.shard = change.rank % NUM_SHARDS if change.rank < num_paired else None
        if self.shard is None:
            return
        self.model = fully_shard(self.make_model(), mesh=mesh)
        self.optimizer = self.make_optimizer(self.model.parameters())
        self.parameters = list(self.model.parameters())  # each rank's part; within a forward pass the model has others
        if states:
            self.put(states[self.shard])

    def make_step(self) -> None:
        """Step on this rank's part; nothing of it needs the other ranks."""
        if self.has_gradients:
            self.optimizer.step()
        self.step, self.has_gradients = self.step + 1, False

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

    def state(self) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """Return this rank's part of each parameter, and of what the optimizer keeps for it."""

        def own(value: torch.Tensor) -> torch.Tensor:
            return value.to_local() if isinstance(value, DTensor) else value

        kept = [self.optimizer.state[one] for one in self.parameters]
        return [
            (own(one.detach()), {name: own(value) for name, value in state.items()})
            for one, state in zip(self.parameters, kept, strict=True)
        ]

    def put(self, state: list[tuple[torch.Tensor, dict[str, torch.Tensor]]]) -> None:
        """Take over what :meth:`state` has returned, here or elsewhere."""
        for parameter, (values, kept) in zip(self.parameters, state, strict=True):
            parameter.detach().to_local().copy_(values)
            mesh, placements = parameter.device_mesh, parameter.placements
            self.optimizer.state[parameter] = {
                name: DTensor.from_local(value, mesh, placements) if value.shape == values.shape else value
                for name, value in kept.items()
            }

    def steps(self, loss_of: Callable[[nn.Module, int, int], torch.Tensor]) -> Iterator[torch.Tensor | None]:
        """Make one step after the other, through whatever happens to the others; yield the loss of each.

        ``loss_of`` gets the model, the number that this rank keeps whoever else comes and goes, and the step's number.
        A rank without a pair waits, and yields None.
        """
        must_regroup, failed_at = True, None
        while True:
            loss = None
            try:
                if must_regroup:
                    self.regroup()
                if self.model is not None:
                    self.optimizer.zero_grad()
                    self.has_gradients = False
                    loss = loss_of(self.model, self.change.members[self.change.rank], self.step)
                    loss.backward()
                    self.has_gradients = True
                must_regroup = syncline.commit()  # all have come as far: nobody steps alone; or newcomers wait
            except RuntimeError as error:  # PeerLostError is one; of those in a backward pass, torch makes its own
                place = self.step, self.change and self.change.epoch
                if self.change is None or place == failed_at:  # no loss: the same step failed with the same members
                    raise
                must_regroup, failed_at = True, place
                print(f"step {self.step}: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            self.make_step()
            yield None if loss is None else loss.detach()


def main() -> None:
    """Learn to read digits; rank 0, whoever is that, prints the loss and the speed."""
    torch.set_num_threads(1)
    num_steps = int(sys.argv[1]) if sys.argv[1:] else 2000
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def loss_of(model: nn.Module, number: int, step: int) -> torch.Tensor:
        batch = torch.randint(len(images), (BATCH_SIZE,), generator=torch.Generator().manual_seed(1000 * step + number))
        return nn.functional.cross_entropy(model(images[batch]), labels[batch])

    training = Training(make_model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    began_s, num_samples = time.monotonic(), 0
    for loss in training.steps(loss_of):
        num_samples += BATCH_SIZE * len(training.members)
        if training.change.rank == 0 and training.step % 100 == 0:
            speed = num_samples / (time.monotonic() - began_s)
            pairs = len(training.members) // NUM_SHARDS
            print(f"step {training.step} on {pairs} pairs: loss {loss:.3f}, {speed:,.0f} samples/s", flush=True)
        if training.step == num_steps:
            break
    training.model = None  # before the groups that it uses
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
