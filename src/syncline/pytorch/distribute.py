"""``distribute()``: from a model and an optimizer to a distributed training, in place."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import torch
from torch import nn

from syncline.arguments import Whole, checked
from syncline.errors import CheckpointError, UpdateError
from syncline.members import Elastic
from syncline.observe import say
from syncline.priorities.settings import Priorities
from syncline.pytorch.checkpoint.loading import resume_together
from syncline.pytorch.checkpoint.saving import save_checkpoint
from syncline.pytorch.consistency import DEFAULT_EVERY
from syncline.pytorch.failure_saving import save_after_losses
from syncline.pytorch.fleet import Fleet, current_fleet
from syncline.pytorch.following import follow_rates
from syncline.pytorch.growing_training import GrowingTraining
from syncline.pytorch.installation import Installation
from syncline.pytorch.notices import Notice, leaving_of
from syncline.pytorch.optimizer import DistributedOptimizer
from syncline.pytorch.rule_watch import RuleWatch
from syncline.pytorch.samples import CountSamples, SampleCount
from syncline.updates import Sharded, UpdateRule

Model = TypeVar("Model", bound=nn.Module)


@checked
def distribute(
    model: Model,
    optimizer: torch.optim.Optimizer,
    update: Annotated[UpdateRule, "an update rule, such as syncline.Sharded()"] | None = None,
    *,
    samples: CountSamples | Literal["batch"] | None = None,
    broadcast_buffers: bool = True,
    check_every: Whole | None = DEFAULT_EVERY,
    priorities: Priorities | bool | None = True,
    elastic: Elastic | bool | None = None,
    save_on_failure: str | Path | None = None,
    fleet: Fleet | None = None,
) -> tuple[Model, DistributedOptimizer]:
    """Train ``model`` on all ranks of the fleet together, as DistributedDataParallel does.

    Every rank calls it with the same model and optimizer; all go on from rank 0's parameters and buffers. The model is
    the same object as before, with hooks; its parameters now lie in flat buckets. ``update`` is the update rule
    (default: ``Sharded()``). ``samples``: the weight of this rank in the mean of gradients. None: every rank that ran a
    backward pass counts 1, any other 0. ``"batch"``: the first dimension of the first tensor that the model is called
    with, so that unequal batches give the same update as one process over their union. A function gets what the model
    is called with and returns the number. With ``broadcast_buffers`` every step goes on with rank 0's buffers, as in
    DDP; with ``LocalSteps`` each period does, and with ``Overlapped`` and ``Clustered`` they stay each rank's own.
    Every ``check_every`` steps parameters and hyper-parameters of all ranks are compared, bit for bit (None: never; nor
    with these three). ``priorities``: how buckets are divided among connections so that the next forward pass has first
    what it needs first, with ``Sharded(overlap_forward=True)``; True takes the topology file's, else ``Priorities()``;
    None or False is one connection for all. A model with several optimizers is distributed once with each. ``elastic``:
    go on without ranks that are lost, and with those that come (True, or :class:`Elastic`); ``Sharded`` needs
    ``spares=1`` or checkpoints for it. ``save_on_failure``: when the job ends because ranks are lost, the lowest rank
    of those that are left writes a checkpoint of what it has to this path (or into it, where :func:`save_checkpoint`
    keeps several), before the fleet closes; the error says where. Not with ``Sharded``, whose ranks each have a part.
    What a rule does not honour is refused, or told by rank 0 if it is harmless (docs/guide/combinations.md).

    Raises :class:`UpdateError` if the rule cannot serve the optimizer, if the optimizer has none of the model's
    parameters, if a parameter was distributed before, or if ranks differ; and :class:`SystemExit` with status 0 in a
    newcomer whose job has ended well before it could come in.

    >>> model, optimizer = syncline.distribute(model, optimizer, syncline.Sharded())
    >>> model(x).square().mean().backward()
    >>> optimizer.step()
    """
    fleet = fleet or current_fleet()
    rule = _checked_rule(update, optimizer)
    installation = Installation(
        fleet=fleet,
        model=model,
        optimizer=optimizer,
        rule=rule,
        count=SampleCount(samples),
        elastic=Elastic.choose(elastic),
        broadcast_buffers=broadcast_buffers,
        check_every=check_every,
        priorities=priorities,
        saves_on_failure=save_on_failure is not None,
    )
    installation.check()
    distributed = DistributedOptimizer(
        installation.install(),
        save_as_told=_save_as_told,
        elastic=installation.elastic_training,
    )
    fleet.on_close(installation.end)
    distributed.heed = partial(heed, fleet, distributed)
    onlookers = follow_rates(installation), RuleWatch(installation)
    distributed.onlookers = [each.end_step for each in onlookers if each is not None]
    fleet.add_update(distributed.statistics, steps=distributed.count_steps)
    if save_on_failure is not None:
        save_after_losses(fleet, distributed, Path(save_on_failure))
    _let_go_back(distributed, installation)
    if fleet.growth is not None:
        if why := installation.why_no_newcomers():
            fleet.growth.refuse(why)
        else:
            fleet.growth.begin(GrowingTraining(installation, distributed))
    return model, distributed


def _let_go_back(optimizer: DistributedOptimizer, installation: Installation) -> None:
    """Let an elastic job whose state is lost load its newest checkpoint, where the settings name a folder."""
    training = installation.elastic_training
    if training is not None and training.recovery.settings.checkpoint is not None:
        path = training.recovery.settings.checkpoint
        training.load = partial(_load_newest, path, installation.model, optimizer)


def _load_newest(path: str | Path, model: nn.Module, optimizer: DistributedOptimizer) -> None:
    """Go back to the newest whole checkpoint on all ranks of an elastic job."""
    if resume_together(path, model, optimizer).path is None:
        raise CheckpointError(
            f"State of lost ranks is gone, and there is no checkpoint at {path} to go back to; save one now and then, "
            "or take Sharded(spares=1)"
        )


def _save_as_told(optimizer: DistributedOptimizer, told: Mapping[str, Any]) -> None:
    """Take part in a checkpoint that another rank writes, with what it was told of the call."""
    options = {key: told[key] for key in told if key not in {"path", "has_optimizer"}}
    given = optimizer if told["has_optimizer"] else None
    save_checkpoint(told["path"], optimizer.training.model, given, **options)


def _checked_rule(update: UpdateRule | None, optimizer: torch.optim.Optimizer) -> UpdateRule:
    """Return the rule that was given, or the default, if it serves the optimizer."""
    if isinstance(optimizer, DistributedOptimizer):
        raise UpdateError("This optimizer was distributed already; give distribute() the plain optimizer, once")
    rule = Sharded() if update is None else update
    rule.check(optimizer)
    return rule


# Notices: a machine tells its processes that it is about to be taken away, and the job uses the time that is left.
#
# Spot machines, ``scancel``, Kubernetes and torchrun send SIGTERM some seconds before SIGKILL, and Slurm whatever
# ``--signal`` names, such as SIGUSR2. Every rank tells with its next pass whether it got one (:class:`StepWatch`), so
# all ranks know at the end of the same step, and do the same. In an elastic job one rank leaves at the end of each
# step: what it owns is kept by another by then, so no step is made twice. Else all save, and end.


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
    received = fleet.preemption and fleet.preemption.received
    return f"it was sent {received.name}" if received else "others are told to end"


def _say(fleet: Fleet, what: str) -> None:
    name = fleet.base.topology.host_of(fleet.base.rank).name
    say(f"rank {fleet.members[fleet.rank]} (host {name}) {what}")
