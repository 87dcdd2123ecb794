"""One rank of a job that shrinks and grows: what the tests of growth start.

``growing_process.py FOLDER PLAN``: PLAN is JSON: the ``rule``, how many are ``members`` at the start (the other
processes are newcomers), at which step members ``leave`` (killed by themselves), when newcomers ``come`` (a process's
number: after which step), and how many of them at least ``together``, where in a switch processes ``die``, or ``miss``
the others (``meeting_port``: of a store that tells who has met), and how many ranks the job is to have after a change,
in how many steps, until all end (``whole``). Rank 0, whoever that is, writes where it listens into the pipe of each
newcomer whose time has come. Who ends leaves its parameters in the folder.
"""

from __future__ import annotations

import gc
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
from growth_faults import batch, prepare, start
from syncline.updates import Updater

DEADLINE_S = 100.0
RULES = {
    "all-reduce": syncline.AllReduce(bucket_bytes=512),
    "spares": syncline.Sharded(bucket_bytes=512, spares=1),
}


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 32, bias=False), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 3)).double()


def optimizer_of(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)


def scheduler_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.999)


def digest(model: nn.Module) -> str:
    state = hashlib.sha256()
    for value in model.state_dict().values():
        state.update(value.numpy().tobytes())
    return state.hexdigest()[:16]


def tell(what: object) -> None:
    print("told", json.dumps(what), flush=True)


def main(folder: Path, plan: dict[str, Any]) -> None:
    own = int(os.environ["RANK"])
    prepare(plan, own)
    fleet = start(folder, plan, own)
    model = model_of(own)  # newcomers and members begin with other values
    optimizer = optimizer_of(model, 0.5 if own >= plan["members"] else 0.01)
    changes: list[syncline.MembershipChange] = []
    rule = RULES[plan.get("rule", "all-reduce")]
    model, distributed = syncline.distribute(model, optimizer, rule, elastic=True, check_every=2)
    scheduler = scheduler_of(distributed)
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
        x, y = batch(step, fleet.members[fleet.rank])
        distributed.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        # members once the step is made are told by none: some ranks may hear within it of a loss that follows it
        counted = fleet.numbers_of(distributed.training.collector.report.ranks)
        distributed.step()
        tell([step, counted, digest(model), distributed.param_groups[0]["lr"]])
        # all count the same steps so: of one loss a rank may hear at the end of a step, and another in the next
        has_changed = own >= plan["members"] or any(change.iteration <= step for change in changes)
        num_whole += has_changed and len(counted) == plan["whole"][0]
        scheduler.step()
        if fleet.rank == 0:
            for newcomer in (each for each, after in plan["come"].items() if after == step):
                (folder / f"come-{newcomer}").write_text(str(fleet.join_address))
    num_updaters = sum(isinstance(one, Updater) for one in gc.get_objects())
    told = [[change.lost, change.joined, change.iteration] for change in changes]
    tell({"changes": told, "num_updaters": num_updaters})
    torch.save({name: value.detach() for name, value in model.named_parameters()}, folder / f"end-{own}.pt")
    fleet.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
