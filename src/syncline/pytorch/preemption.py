"""Notices: a machine tells its processes that it is about to be taken away, and the job uses the time that is left.

Spot machines, ``scancel``, Kubernetes and torchrun send SIGTERM some seconds before SIGKILL, and Slurm whatever
``--signal`` names, such as SIGUSR2. Every rank tells with its next pass whether it got one (:class:`StepWatch`), so all
ranks know at the end of the same step, and do the same. In an elastic job one rank leaves at the end of each step:
what it owns is kept by another by then, so no step is made twice. Else all save, and end.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from syncline.pytorch.checkpoint.saving import save_checkpoint
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.notices import Notice, leaving_of
from syncline.pytorch.optimizer import DistributedOptimizer

TOLD_TO_END = 128 + signal.SIGTERM
"""The exit code of ranks that have saved and ended: the job is not done, and may be started again."""


def heed(fleet: Fleet, optimizer: DistributedOptimizer, notices: Mapping[int, Notice]) -> None:
    """Do what ranks have been told, at the end of a step of which all have the same ``notices``, by rank of the fabric.

    Raises :class:`SystemExit` where this rank ends: with status 0 if it leaves a job that goes on.
    """
    leaving = leaving_of(notices)
    if leaving is None:
        _save_and_end(fleet, optimizer)
    if optimizer.checkpoint_if_state_is_lost is not None:
        _save(optimizer, optimizer.checkpoint_if_state_is_lost)
    if leaving != fleet.base.rank:
        assert fleet.recovery is not None, "a rank leaves a job that is elastic"
        fleet.recovery.expect_leave(leaving)
    else:
        others = fleet.world_size - 1
        _say(fleet, f"leaves after step {optimizer.iteration}, as {_reason(fleet)}; {others} of the ranks go on")
        _leave(fleet)
        raise SystemExit(0)


def _save_and_end(fleet: Fleet, optimizer: DistributedOptimizer) -> NoReturn:
    is_saved = _save(optimizer, None)
    if fleet.rank == 0:
        what = (
            "all ranks have saved"
            if is_saved
            else ("nothing is saved, as neither resume() nor save_checkpoint() has named a place")
        )
        _say(fleet, f"ends after step {optimizer.iteration}, as {_reason(fleet)}; {what}")
    _leave(fleet)
    raise SystemExit(TOLD_TO_END)


def _leave(fleet: Fleet) -> None:
    """Leave a job that is not over: newcomers that wait ask the others."""
    if fleet.growth is not None:
        fleet.growth.close()
    fleet.close()


def _save(optimizer: DistributedOptimizer, folder: Any) -> bool:
    """Save where and what the program has saved last, or would resume from; return whether it has said."""
    save = optimizer.last_save or ({"path": folder} if folder is not None else None)
    if save is None:
        return False
    save_checkpoint(model=optimizer.training.model, optimizer=optimizer, **save)
    return True


def _reason(fleet: Fleet) -> str:
    return "others are told to end" if fleet.preemption is None else fleet.preemption.reason


def _say(fleet: Fleet, what: str) -> None:
    name = fleet.base.topology.host_of(fleet.base.rank).name
    print(f"syncline: rank {fleet.members[fleet.rank]} (host {name}) {what}", file=sys.stderr, flush=True)
