"""``distribute()``: from a model and an optimizer to a distributed training, in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from syncline.elastic.settings import Elastic
from syncline.errors import CheckpointError, UpdateError, name_ranks
from syncline.priorities.terms import Priorities
from syncline.priorities.tuner import ClassTuner
from syncline.pytorch.agreement import broadcast_model, check_agreement, describe
from syncline.pytorch.buffers import BufferBroadcast
from syncline.pytorch.consistency import DEFAULT_EVERY, check_period
from syncline.pytorch.control import offer_no_sync, withdraw_no_sync
from syncline.pytorch.elastic_training import ElasticTraining, begin_elastic
from syncline.pytorch.failure_saving import FailureSaving, WholeState
from syncline.pytorch.flatten import Named, check_parameters, flatten, plan_model, trained_parameters
from syncline.pytorch.fleet import Fleet, current_fleet
from syncline.pytorch.optimizer import DistributedOptimizer
from syncline.pytorch.optimizer_state import divide_existing_state
from syncline.pytorch.registry import add_training, check_untrained, remove_training
from syncline.pytorch.samples import CountSamples, SampleCount
from syncline.pytorch.sync_batch_norm import (
    check_joinable,
    check_layers,
    find_layers,
    restore_layers,
    synchronise_layers,
)
from syncline.pytorch.training import Training
from syncline.updates import Setting, Sharded, Updater, UpdateRule
from syncline.updates.bucket import Bucket, BucketPlan
from syncline.updates.bucket_collectives import BucketCollectives
from syncline.updates.bucket_schedule import BucketSchedule, plan_bucket_schedules
from syncline.updates.control import ControlStream
from syncline.updates.host_portions import most_shares

Model = TypeVar("Model", bound=nn.Module)


def distribute(
    model: Model,
    optimizer: torch.optim.Optimizer,
    update: UpdateRule | None = None,
    *,
    samples: CountSamples | Literal["batch"] | None = None,
    broadcast_buffers: bool = True,
    check_every: int | None = DEFAULT_EVERY,
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
    DDP. Every ``check_every`` steps parameters and hyper-parameters of all ranks are compared, bit for bit (None:
    never). ``priorities``: how buckets are divided among connections so that the next forward pass has first what it
    needs first, with ``Sharded(overlap_forward=True)``; True takes the topology file's, else ``Priorities()``; None or
    False is one connection for all. A model with several optimizers is distributed once with each. ``elastic``: go on
    without ranks that are lost, with ``AllReduce()`` (True, or :class:`Elastic`). ``save_on_failure``: when the job
    ends because ranks are lost, the lowest rank of those that are left writes a checkpoint of what it has to this path
    (or into it, where :func:`save_checkpoint` keeps several there), before the fleet closes; the error says where. Not
    with ``Sharded``, whose ranks each have a part.

    Raises :class:`UpdateError` if the rule cannot serve the optimizer, if the optimizer has none of the model's
    parameters, if a parameter was distributed before, or if ranks differ.

    >>> model, optimizer = syncline.distribute(model, optimizer, syncline.Sharded())
    >>> model(x).square().mean().backward()
    >>> optimizer.step()
    """
    fleet = fleet or current_fleet()
    rule = _checked_rule(update, optimizer)
    check_period(check_every)
    count = SampleCount(samples)
    named = _checked_parameters(model, optimizer, rule)
    plans = plan_model(named, bucket_bytes=rule.bucket_bytes)
    settings = Elastic.choose(elastic)
    plan = partial(_plan_schedules, fleet, plans, rule, optimizer)
    going_on = begin_elastic(fleet, rule, settings, plan)
    control, buffer_control, join_control = _open_control_streams(fleet, 3, going_on)
    chosen = Priorities.choose(priorities, fleet.topology.priorities)
    more = [f"check_every={check_every!r}", f"elastic={settings!r}", f"saves={save_on_failure is not None}"]
    check_agreement([*describe(model, optimizer, rule, chosen), *more], control)
    schedules = plan(fleet.reserve_streams(len(plans)).start)
    collectives = BucketCollectives(fleet.communicator, control=control, bucket_schedules=schedules)
    buckets = flatten(named, plans)
    broadcast_model(model, buckets, control)
    is_asked = priorities is not True or fleet.topology.priorities is not None
    tuner = ClassTuner(collectives, [plan.num_bytes for plan in plans], chosen, is_asked_for=is_asked)
    setting = Setting(buckets=buckets, optimizer=optimizer, collectives=collectives, tuner=tuner)
    updater = _start_rule(rule, setting if going_on is None else going_on.extend(setting))
    try:
        _check_saving(updater, save_on_failure)
        helpers = _checked_helpers(model, updater, fleet)
    except UpdateError:
        updater.close()
        raise
    first = next(rank for rank in range(fleet.world_size) if rank not in helpers)
    is_enabled = broadcast_buffers and updater.is_synchronous
    buffers = BufferBroadcast(model, buffer_control, is_enabled=is_enabled, root=first)
    training = Training(
        model, updater, count, tuner, buffers, joins=join_control, check_every=check_every, helpers=helpers
    )
    _register(training, fleet, going_on)
    if save_on_failure is not None:
        fleet.on_close(FailureSaving(fleet, _whole_state(training, Path(save_on_failure))).on_close)
    return model, _face_of(training, going_on)


def _check_saving(updater: Updater, save_on_failure: str | Path | None) -> None:
    if save_on_failure is not None and updater.divides_gradients:
        raise UpdateError(
            "save_on_failure= is for rules whose ranks each have the whole state; with Sharded() each has a part: save "
            "checkpoints on the way (save_checkpoint(..., keep=2, wait=False)), or take AllReduce()"
        )


def _checked_helpers(model: nn.Module, updater: Updater, fleet: Fleet) -> tuple[int, ...]:
    """Return the ranks without data, if the rule and the model can do with them."""
    helpers = fleet.topology.helpers
    if not helpers:
        return ()
    if not updater.is_synchronous:
        raise UpdateError(
            f"The topology has helpers ({name_ranks(helpers)}), which need a rule in which every rank makes every "
            "step; take AllReduce() or Sharded(), or write 'gateway: one' in the topology"
        )
    check_joinable(model)
    return helpers


def _whole_state(training: Training, path: Path) -> WholeState:
    """Return what this rank can save without the others."""
    updater = training.updater

    def write() -> Path:
        from syncline.pytorch.checkpoint import save_alone  # what few jobs need, and takes a while to load

        return save_alone(path, training.model, updater.optimizer, iteration=updater.iteration)

    return WholeState(
        is_whole=lambda: not (updater.is_server or updater.is_mid_step),
        iteration=lambda: updater.iteration,
        write=write,
    )


def _face_of(training: Training, going_on: ElasticTraining | None) -> DistributedOptimizer:
    """Return what the user steps."""
    face = DistributedOptimizer(training, save_as_told=_save_as_told, elastic=going_on)
    path = going_on.recovery.settings.checkpoint if going_on is not None else None
    if going_on is not None and path is not None:
        going_on.load = partial(_load_newest, path, training.model, face)
    return face


def _load_newest(path: str | Path, model: nn.Module, optimizer: DistributedOptimizer) -> None:
    """Go back to the newest whole checkpoint on all ranks of an elastic job."""
    from syncline.pytorch.checkpoint_group import again_if_members_change
    from syncline.pytorch.checkpoint_resume import resume

    if again_if_members_change(resume)(path, model, optimizer).path is None:
        raise CheckpointError(
            f"State of lost ranks is gone, and there is no checkpoint at {path} to go back to; save one now and then, "
            "or take Sharded(spares=1)"
        )


def _save_as_told(optimizer: DistributedOptimizer, told: Mapping[str, Any]) -> None:
    """Take part in a checkpoint that another rank writes, with what it was told of the call."""
    from syncline.pytorch.checkpoint import save_checkpoint  # as above

    options = {key: told[key] for key in told if key not in {"path", "has_optimizer"}}
    given = optimizer if told["has_optimizer"] else None
    save_checkpoint(told["path"], optimizer.training.model, given, **options)


def _plan_schedules(
    fleet: Fleet, plans: Sequence[BucketPlan], rule: UpdateRule, optimizer: torch.optim.Optimizer, first_stream: int
) -> tuple[BucketSchedule, ...]:
    options, most = rule.schedule_options, None
    if options.is_divided:
        most = most_shares(
            fleet.topology,
            plans,
            optimizer,
            num_copies=options.num_copies,
            num_owners=1 + options.spares,
            tells=fleet.rank == 0,
        )
    return plan_bucket_schedules(fleet.communicator, plans, options, first_stream=first_stream, most=most)


def _open_control_streams(fleet: Fleet, number: int, going_on: ElasticTraining | None) -> list[ControlStream]:
    if going_on is not None:
        return [going_on.open_stream(fleet) for _ in range(number)]
    return [
        ControlStream(fleet.communicator, stream=stream, timeout_s=fleet.timeout_s)
        for stream in fleet.reserve_streams(number)
    ]


def _register(training: Training, fleet: Fleet, going_on: ElasticTraining | None) -> None:
    """Let functions that are given the model find its training, and let the fleet's close end it."""
    add_training(training, fleet)
    offer_no_sync(training.model)
    if fleet.world_size > 1 and find_layers(training.model):
        (control,) = _open_control_streams(fleet, 1, going_on)
        layers = synchronise_layers(training.model, control, lambda: training.loss_weight)
        fleet.on_close(lambda _: restore_layers(layers))
    if going_on is not None:
        going_on.begin(training.updater)
        fleet.on_close(lambda _: going_on.end())
    fleet.on_close(partial(_end, training))
    fleet.add_update(training.updater.statistics)


def _start_rule(rule: UpdateRule, setting: Setting) -> Updater:
    updater = rule.start(setting)
    if updater.divides_gradients:
        divide_existing_state(updater)
    for tensor in _tensors(setting.buckets):
        tensor.grad = None
    return updater


def _end(training: Training, is_failing: bool) -> None:
    """Finish the last step, unless something failed; then the model is a plain one."""
    try:
        if not is_failing:
            training.finish()
    finally:
        remove_training(training)
        training.close()
        withdraw_no_sync(training.model)


def _checked_rule(update: object, optimizer: torch.optim.Optimizer) -> UpdateRule:
    """Return the rule that was given, or the default, if it serves the optimizer; a rule is no class and no name."""
    if isinstance(optimizer, DistributedOptimizer):
        raise UpdateError("This optimizer was distributed already; give distribute() the plain optimizer, once")
    if update is None:
        update = Sharded()
    if isinstance(update, type) and hasattr(update, "schedule_options"):
        raise UpdateError(f"update={update.__name__} is the rule's class; write update={update.__name__}()")
    if not hasattr(update, "schedule_options"):
        raise UpdateError(
            f"update={update!r} is not an update rule; write update=syncline.Sharded(), AllReduce(), Overlapped() or "
            "Clustered()"
        )
    rule: UpdateRule = update  # type: ignore[assignment]  # a protocol that users may implement
    rule.check(optimizer)
    return rule


def _checked_parameters(model: nn.Module, optimizer: torch.optim.Optimizer, rule: UpdateRule) -> Named:
    """Return what is to be trained, if it can be."""
    check_layers(model, rule)
    named = trained_parameters(model, optimizer)
    check_parameters(named)
    check_untrained(model, named)
    return named


def _tensors(buckets: tuple[Bucket, ...]) -> list[nn.Parameter]:
    return [tensor for bucket in buckets for tensor in bucket.tensors]
