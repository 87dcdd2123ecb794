"""DistributedDataParallel that goes on when ranks die, rank 0 too, and lets those in that come.

    syncline run --ranks 4 --elastic --restarts 100 examples/ddp_survives.py 2000

Kill any of its processes while it trains: the others make the step anew without it, in the same processes; the launcher
starts it again, and it comes in between two steps. Nothing of this goes through a checkpoint.
"""

import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncline

BATCH_SIZE = 32


class Training:
    """A model and its optimizer on this rank, the steps that they have seen, and who trains with it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.parallel: DistributedDataParallel | None = None
        self.step: int | None = None  # no state yet: a newcomer takes that of the others
        self.change: syncline.Reconfiguration | None = None

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

    def steps(self, loss_of: Callable[[nn.Module, int, int], torch.Tensor]) -> Iterator[torch.Tensor]:
        """Make one step after the other, through whatever happens to the others; yield the loss of each.

        ``loss_of`` gets the model, the number that this rank keeps whoever else comes and goes, and the step's number.
        """
        must_regroup, failed_at = True, None
        while True:
            try:
                if must_regroup:
                    self.regroup()
                self.optimizer.zero_grad()
                loss = loss_of(self.parallel, self.change.members[self.change.rank], self.step)
                loss.backward()
                must_regroup = syncline.commit()  # all have come as far: nobody steps alone; or newcomers wait
            except RuntimeError as error:  # PeerLostError is one; of those in a backward pass, torch makes its own
                place = self.step, self.change and self.change.epoch
                if self.change is None or place == failed_at:  # no loss: the same step failed with the same members
                    raise
                must_regroup, failed_at = True, place
                print(f"step {self.step}: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            self.optimizer.step()
            self.step += 1
            yield loss.detach()


def main() -> None:
    """Learn to read digits; rank 0, whoever is that, prints the loss and the speed."""
    torch.set_num_threads(1)
    num_steps = int(sys.argv[1]) if sys.argv[1:] else 2000
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def loss_of(model: nn.Module, number: int, step: int) -> torch.Tensor:
        batch = torch.randint(len(images), (BATCH_SIZE,), generator=torch.Generator().manual_seed(1000 * step + number))
        return nn.functional.cross_entropy(model(images[batch]), labels[batch])

    began_s, num_samples = time.monotonic(), 0
    for loss in training.steps(loss_of):
        num_ranks = training.change.world_size
        num_samples += BATCH_SIZE * num_ranks
        if training.change.rank == 0 and training.step % 100 == 0:
            speed = num_samples / (time.monotonic() - began_s)
            print(f"step {training.step} on {num_ranks} ranks: loss {loss:.3f}, {speed:,.0f} samples/s", flush=True)
        if training.step == num_steps:
            break
    training.parallel = None  # before the group that it uses
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
