"""One rank of a job whose default group is made anew: by the launcher, ``syncline run --elastic --restarts 1``.

    python reconfigure_process.py FOLDER WORLD_SIZE VICTIM PLACE

The rank VICTIM kills itself at PLACE: in a ``step`` before its backward pass, within the ``commit``, or within the
``store`` of the group that is made after the loss of rank 2, which dies in its step too. Then it comes in again; some
steps later all end. Each writes who counted in each step, and what it has at last, into FOLDER.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import syncline
from syncline.backend.reconfiguration import WorldGrowth
from syncline.updates.control import ControlStream

STRUCK_AT, STEPS_AFTER = 2, 2


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def loss_of(model: nn.Module, number: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + number)
    return model(torch.randn(3, 4, generator=generator, dtype=torch.float64)).square().mean()


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Striker:
    """Lets this process die where it is told."""

    def __init__(self, victim: int, place: str) -> None:
        self.rank = int(os.environ.get("RANK", "-1"))
        self._is_victim = self.rank == victim
        self._place = place

    def strike(self, step: int) -> None:
        """Die in a step, or arrange for it."""
        if step != STRUCK_AT:
            return
        if self._place == "store" and self.rank == 2:
            die()
        if not self._is_victim:
            return
        if self._place == "step":
            die()
        elif self._place == "commit":
            ControlStream.sum_of = die  # type: ignore[method-assign]
        else:
            WorldGrowth._open_store = die  # type: ignore[method-assign,assignment]


def use_groups(change: syncline.Reconfiguration) -> None:
    """See that the default group works, and that others can be made beside it."""
    value = torch.full((3,), 1.0 + dist.get_rank())
    dist.all_reduce(value)
    assert value.tolist() == [sum(range(1, change.world_size + 1))] * 3
    assert (dist.get_rank(), dist.get_world_size()) == (change.rank, change.world_size)
    pair = dist.new_group([0, change.world_size - 1])
    if change.rank in (0, change.world_size - 1):
        dist.barrier(group=pair)
    mesh = init_device_mesh("cpu", (change.world_size, 1))
    dist.all_reduce(value, group=mesh.get_group(0))


def take_state(change: syncline.Reconfiguration, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let all have the newest state."""
    state = [model.state_dict(), optimizer.state_dict()]
    if change.behind:
        dist.broadcast_object_list(state, src=change.source)
    if change.rank in change.behind:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])


def train(folder: Path, world_size: int, striker: Striker) -> None:
    """Make steps until the job has been whole again for some."""
    model = make_model()
    optimizer = make_optimizer(model)
    step: int | None = None
    changes: list[Any] = []
    counted: dict[int, Any] = {}
    end = change = None
    while end is None or step is None or step < end:
        try:
            if change is None:
                change = syncline.reconfigure(step=step)
                changes.append([change.epoch, change.members, change.lost, change.joined, change.step])
                use_groups(change)
                take_state(change, model, optimizer)
                parallel = DistributedDataParallel(model)
                step = change.step
                is_whole_again = change.joined and change.world_size == world_size
                end = step + STEPS_AFTER if is_whole_again else None
            optimizer.zero_grad()
            striker.strike(step or 0)
            loss_of(parallel, change.members[change.rank], step or 0).backward()
            has_newcomers = syncline.commit()
            optimizer.step()
        except RuntimeError as error:
            if "lost" not in str(error):
                raise
            change = parallel = None
            continue
        counted[step or 0] = change.members
        step = (step or 0) + 1
        change = None if has_newcomers else change
    told = {"changes": changes, "counted": counted, "parameters": [one.tolist() for one in model.parameters()]}
    (folder / f"{os.getpid()}.json").write_text(json.dumps(told))
    del parallel
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), int(sys.argv[2]), Striker(int(sys.argv[3]), sys.argv[4]))
