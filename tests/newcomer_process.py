"""One rank of a job that loses ranks and takes newcomers in where a period ends.

``newcomer_process.py FOLDER PLAN``: PLAN is JSON: how many are ``members`` at the start (the other processes are
newcomers), at which step members ``leave`` (killed by themselves), after which step newcomers ``come`` (a process's
number: the step; 0: when a switch was begun), how many of them at least ``together``, who is the ``door``
that writes where it listens into their pipes, where in a switch processes ``die``, or ``miss`` the others
(``meeting_port``: of a store that tells who has met), what a newcomer does otherwise (``alters``), and what the rule is
(``rule``: "clustered", with ``settings``; else the overlapped update), on which of some ``hosts``. All end when
periods have ended as often as ``last`` says since the last switch, of so many (``switches``). Each tells, when a period
has ended, the iteration, the members, its parameters, its rate, how many steps its optimizer has counted, and the sum
of its moments.
"""

from __future__ import annotations

import gc
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
from growth_faults import batch, count_switches, open_door, prepare, start
from syncline.updates import Updater

DEADLINE_S = 100.0
PERIOD = 4


def model_of(seed: int, width: int = 32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width, bias=False), nn.Tanh(), nn.Linear(width, 3)).double()


def optimizer_of(model: nn.Module, kind: str, lr: float) -> torch.optim.Optimizer:
    parameters = model.parameters()
    return torch.optim.Adam(parameters, lr=lr) if kind == "adam" else torch.optim.SGD(parameters, lr=lr)


def rule_of(plan: dict[str, Any], alters: dict[str, int]) -> syncline.Overlapped | syncline.Clustered:
    period = alters.get("period", PERIOD)
    if plan.get("rule") == "clustered":
        return syncline.Clustered(**{"period": period} | plan.get("settings", {}))
    return syncline.Overlapped(period=period, bucket_bytes=512, max_staleness=plan.get("max_staleness", 0))


def tell(what: object) -> None:
    print("told", json.dumps(what), flush=True)


def tell_end(optimizer: Any, fleet: syncline.Fleet) -> None:
    """Tell what a period has ended with, or a newcomer begins with."""
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    values = nn.utils.parameters_to_vector(parameters).tolist()
    counted = optimizer.inner.state.get(parameters[0], {})
    moments = sum(float(state["exp_avg"].sum()) for state in optimizer.inner.state.values() if "exp_avg" in state)
    rate, num_counted = optimizer.param_groups[0]["lr"], int(counted.get("step", 0))
    tell([optimizer.iteration, fleet.members, values, rate, num_counted, moments])


def main(folder: Path, plan: dict[str, Any]) -> None:
    own = int(os.environ["RANK"])
    prepare(plan, own)
    if "hosts" in plan:
        os.environ["SYNCLINE_HOST"] = plan["hosts"][own]
    begun = count_switches()
    fleet = start(folder, plan, own)
    alters, is_newcomer = plan.get("alters", {}).get(str(own), {}), own >= plan["members"]
    model = model_of(own, alters.get("width", 32))  # newcomers and members begin with other values
    optimizer = optimizer_of(model, plan.get("optimizer", "sgd"), 0.5 if is_newcomer else 0.05)
    model, distributed = syncline.distribute(model, optimizer, rule_of(plan, alters), elastic=True)
    changes: list[syncline.MembershipChange] = []
    distributed.on_membership_change(changes.append)
    distributed.offer_extra(lambda: {"from": own})
    if is_newcomer:
        assert distributed.extra is not None, "members offer something"
        begun[0] = plan["switches"]  # those that come in before are no members any more
        tell_end(distributed, fleet)
    train(folder, plan, own, begun, (fleet, model, distributed))
    updaters = [one for one in gc.get_objects() if isinstance(one, Updater)]
    num_updaters = len(updaters) - sum(one.dividing is not one for one in updaters)  # each with that of its party
    told = [[change.lost, change.joined, change.iteration] for change in changes]
    tell({"changes": told, "num_updaters": num_updaters})
    fleet.close()


def train(folder: Path, plan: dict[str, Any], own: int, begun: list[int], parts: tuple[Any, Any, Any]) -> None:
    fleet, model, optimizer = parts
    until_s, waiting, num_last = time.monotonic() + DEADLINE_S, dict(plan["come"]), 0
    while num_last < plan["last"]:
        assert time.monotonic() < until_s, f"{fleet.members} after step {optimizer.iteration}"
        step = optimizer.iteration + 1
        if plan["leave"].get(str(own)) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = batch(step, fleet.members[fleet.rank])
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        is_last = begun[0] >= plan["switches"]
        optimizer.step()
        if not optimizer.training.updater.is_at_period_start:
            continue
        num_last += is_last
        tell_end(optimizer, fleet)
        if own == plan.get("door", 0):
            open_door(folder, waiting, fleet, step, begun[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
