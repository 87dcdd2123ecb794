"""One rank of a job that shrinks and grows: what the tests of growth start.

``growing_process.py FOLDER PLAN``: PLAN is JSON: how many are ``members`` at the start (the other processes are
newcomers), at which step members ``leave`` (killed by themselves), when newcomers ``come`` (a process's number: after
which step), where in a switch processes ``die``, and how many ranks the job is to have after a change, in how many
steps, until all end (``whole``). Rank 0, whoever that is, tells after each step in a file where it listens.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import syncline
from syncline.pytorch.fleet_growth import FleetGrowth, GrowingTraining

DEADLINE_S = 100.0
PLACES = {"meet": FleetGrowth, "give": GrowingTraining, "take": GrowingTraining, "resume": GrowingTraining}
"""Where in a switch a process may die: at the beginning of a method."""


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 3))


def digest(model: nn.Module) -> str:
    state = hashlib.sha256()
    for value in model.state_dict().values():
        state.update(value.numpy().tobytes())
    return state.hexdigest()[:16]


def wait_for(path: Path) -> str:
    """Return what is in a file once it is there."""
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        if path.exists():
            return path.read_text()
        time.sleep(0.02)
    raise TimeoutError(path)


def write(path: Path, text: str) -> None:
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(text)
    part.rename(path)


def die_in(place: str) -> None:
    name = f"_{place}" if place == "meet" else place
    setattr(PLACES[place], name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def tell(what: object) -> None:
    print("told", json.dumps(what), flush=True)


def start(folder: Path, plan: dict[str, Any], own: int) -> syncline.Fleet:
    if own < plan["members"]:
        return syncline.init(rank=own, world_size=plan["members"])
    step = plan["come"][str(own)]
    address = wait_for(folder / f"step-{step}")
    return syncline.init(join=address)


def batch(step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def main(folder: Path, plan: dict[str, Any]) -> None:
    own = int(os.environ["RANK"])
    if place := plan["die"].get(str(own)):
        die_in(place)
    fleet = start(folder, plan, own)
    model = model_of(own)  # newcomers and members begin with other values
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5 if own >= plan["members"] else 0.01)
    changes: list[syncline.MembershipChange] = []
    model, distributed = syncline.distribute(
        model, optimizer, syncline.AllReduce(bucket_bytes=512), elastic=True, check_every=2
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(distributed, gamma=0.9)
    distributed.offer_extra(lambda: {"scheduler": scheduler.state_dict()})
    distributed.on_membership_change(changes.append)
    if distributed.extra is not None:
        scheduler.load_state_dict(distributed.extra["scheduler"])
        scheduler.step()
    num_whole = 0
    until_s = time.monotonic() + DEADLINE_S
    while num_whole < plan["whole"][1]:
        assert time.monotonic() < until_s, f"{fleet.members} after step {distributed.iteration}"
        step = distributed.iteration + 1
        if plan["leave"].get(str(own)) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        number = fleet.members[fleet.rank]
        num_whole += fleet.epoch.number > 0 and fleet.world_size == plan["whole"][0]
        x, y = batch(step, number)
        distributed.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        distributed.step()
        tell([distributed.iteration, digest(model), distributed.param_groups[0]["lr"], fleet.members])
        scheduler.step()
        if fleet.rank == 0:
            write(folder / f"step-{distributed.iteration}", str(fleet.join_address))
    tell({"changes": [[change.lost, change.joined, change.iteration] for change in changes]})
    fleet.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
