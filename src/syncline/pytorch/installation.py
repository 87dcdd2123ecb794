"""A model in training on a fleet: how it is put there, and taken away; anew when the fleet has become larger.

Between two steps nothing of a training is needed but the model, the optimizer and what the user asked for. So a
training on a larger fleet is made by the code that made the first one, on old members and newcomers alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from syncline import updates
from syncline.errors import UpdateError
from syncline.members import Elastic
from syncline.observe import tell_if_long
from syncline.priorities.settings import Priorities
from syncline.pytorch.buffers import BufferBroadcast
from syncline.pytorch.consistency import (
    DEFAULT_EVERY,
    broadcast_model,
    check_agreement,
    describe_hyperparameters,
    describe_model,
)
from syncline.pytorch.control import check_untrained, offer_no_sync, withdraw_no_sync
from syncline.pytorch.elastic_training import ElasticTraining, begin_elastic
from syncline.pytorch.flatten import (
    Named,
    check_parameters,
    check_shapes,
    check_storages,
    flatten,
    plan_model,
    trained_parameters,
)
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.optimizer_state import divide_existing_state
from syncline.pytorch.outside_gradients import add_training, remove_training
from syncline.pytorch.samples import SampleCount
from syncline.pytorch.sync_batch_norm import (
    check_joinable,
    check_layers,
    find_layers,
    restore_layers,
    synchronise_layers,
)
from syncline.pytorch.training import Training
from syncline.updates import Setting, Sharded, Updater, UpdateRule
from syncline.updates.bucket import BucketPlan, placed
from syncline.updates.bucket_collectives import BucketCollectives
from syncline.updates.bucket_schedule import BucketSchedule, plan_bucket_schedules
from syncline.updates.class_tuner import ClassTuner
from syncline.updates.combinations import TrainingRequest, check_combinations
from syncline.updates.control import ControlStream
from syncline.updates.ownership import most_shares

DIFFER = "All ranks must call distribute() with the same model, optimizer, update rule and priorities, but they differ"


@dataclass(eq=False, slots=True, kw_only=True)
class Installation:
    """What ``distribute()`` was given, checked, and what it made of it last."""

    fleet: Fleet
    model: nn.Module
    optimizer: torch.optim.Optimizer
    """The user's own."""
    rule: UpdateRule
    count: SampleCount
    elastic: Elastic | None
    broadcast_buffers: bool
    check_every: int | None
    priorities: Priorities | bool | None
    saves_on_failure: bool
    training: Training | None = None
    """None while it is taken away."""
    elastic_training: ElasticTraining | None = None
    """How it goes on after losses, if it does."""
    _layers: tuple[nn.SyncBatchNorm, ...] = ()

    def check(self) -> None:
        """Refuse, or tell of, what is asked for and the rule does not honour."""
        request = TrainingRequest(
            topology=self.fleet.topology,
            priorities=self._chosen_priorities() if self._asks_for_priorities else None,
            elastic=self.elastic,
            preemption=self.fleet.preemption.wish.name.lower() if self.fleet.preemption else None,
            saves_on_failure=self.saves_on_failure,
            checks=self.check_every not in (None, 0, DEFAULT_EVERY),
        )
        check_combinations(self.rule, f"{type(self.rule).__name__}()", request, tells=self.fleet.rank == 0)

    def install(self, *, has_values: bool = False, begins_with: Any = None) -> Training:
        """Put the model into training on the fleet; every rank calls it alike.

        All go on from rank 0's parameters and buffers. With ``has_values`` these are equal already, as all else is, and
        no rank is waited for: the rule ``begins_with`` what ranks agreed on when they met.
        """
        fleet, model, optimizer, rule = self.fleet, self.model, self.optimizer, self.rule
        named = _checked_parameters(model, optimizer, rule)
        plans = plan_model(named, bucket_bytes=rule.bucket_bytes)
        plan = partial(_plan_schedules, fleet, plans, rule, optimizer)
        going_on = begin_elastic(fleet, rule, self.elastic, plan)
        control, buffer_control, join_control = _open_control_streams(fleet, 3, going_on)
        chosen = self._chosen_priorities()
        if not has_values:
            check_agreement([*self.describe(), *describe_hyperparameters(optimizer)], control, head=DIFFER)
        is_together = not has_values and going_on is None  # newcomers, and who lost others, plan by themselves
        schedules = plan(fleet.reserve_streams(len(plans)).start, is_together=is_together)
        collectives = BucketCollectives(fleet.communicator, control=control, bucket_schedules=schedules)
        sizes = [plan.num_bytes for plan in plans]
        if self.elastic is None:  # else communicators come and go
            collectives.share_memory(sizes)
        buckets = flatten(named, plans)
        if not has_values:
            broadcast_model(model, buckets, control)
        tuner = ClassTuner(collectives, sizes, chosen, is_asked_for=self._asks_for_priorities)
        setting = Setting(
            buckets=buckets,
            optimizer=optimizer,
            collectives=collectives,
            tuner=tuner,
            reserve_streams=fleet.reserve_streams,
        )
        updater = _start_rule(rule, self._extended(setting, going_on, begins_with))
        try:
            if helpers := fleet.topology.helpers:
                check_joinable(model)
        except UpdateError:
            updater.close()
            raise
        first = next(rank for rank in range(fleet.world_size) if rank not in helpers)
        is_enabled = self.broadcast_buffers and updater.shares_buffers
        buffers = BufferBroadcast(model, buffer_control, is_enabled=is_enabled, root=first)
        training = Training(
            model,
            updater,
            self.count,
            tuner,
            buffers,
            joins=join_control,
            check_every=self.check_every,
            notice=fleet.notice,
            helpers=helpers,
        )
        self._register(training, going_on)
        return training

    def why_no_newcomers(self) -> str:
        """Say why it takes nobody in; empty if it does."""
        rule = self.rule
        if self.elastic is None:
            return "a training of it is not elastic"
        if isinstance(rule, updates.Clustered | updates.LocalSteps) and (why := rule.why_no_newcomers):
            return why
        if isinstance(rule, updates.Overlapped) and (rule.quorum is not None or rule.servers != "shared"):
            return "Overlapped(quorum=, servers=) says how many ranks do what, and newcomers change that"
        if isinstance(rule, Sharded) and not (
            isinstance(rule.portions, str | float | int) and rule.replicate in {None, "host", "auto"}
        ):
            return "Sharded(portions=, replicate=) names parts of its topology, and newcomers may be in none of them"
        return ""

    def synchronize(self) -> None:
        """Wait until parameters and buffers are final on this rank."""
        assert self.training is not None, "it is in place"
        self.training.synchronize()

    def plan_again(self) -> None:
        """Move buckets as is best on the fleet's topology as it is now, between two steps; every rank calls this."""
        assert self.training is not None, "it is in place"
        updater = self.training.updater
        plans, first = [bucket.plan for bucket in updater.buckets], updater.collectives.bucket_schedules[0].stream
        schedules = _plan_schedules(self.fleet, plans, self.rule, self.optimizer, first, is_together=True)
        updater.collectives.enter(self.fleet.communicator, schedules)
        updater.divide_anew()

    def describe(self) -> list[str]:
        """Say in lines what a newcomer must have alike: all but the hyper-parameters, which it is given."""
        return [
            *describe_model(self.model, self.optimizer, self.rule, self._chosen_priorities()),
            f"check_every={self.check_every!r}",
            f"elastic={self.elastic!r}",
            f"saves={self.saves_on_failure}",
        ]

    def end(self, is_failing: bool) -> None:
        """Finish the last step, unless something failed; then the model is a plain one."""
        try:
            if not is_failing and self.training is not None:
                self.training.finish()
        finally:
            self.remove()

    def remove(self) -> None:
        """Let the model be a plain one, whatever is under way; a second call does nothing."""
        training, self.training = self.training, None
        if training is None:
            return
        remove_training(training)
        training.close()
        withdraw_no_sync(training.model)
        if self.elastic_training is not None:
            self.elastic_training.end()
        restore_layers(self._layers)

    def _extended(self, setting: Setting, going_on: ElasticTraining | None, begins_with: Any) -> Setting:
        if going_on is not None:
            setting = going_on.extend(setting)
        if self.why_no_newcomers():
            return setting
        return replace(setting, newcomers=self.fleet.growth, begins_with=begins_with)

    @property
    def _asks_for_priorities(self) -> bool:
        return self.priorities is not True or self.fleet.topology.priorities is not None

    def _chosen_priorities(self) -> Priorities:
        return Priorities.choose(self.priorities, self.fleet.topology.priorities)

    def _register(self, training: Training, going_on: ElasticTraining | None) -> None:
        """Let functions that are given the model find its training."""
        training.fleet = self.fleet
        add_training(training)
        offer_no_sync(training.model)
        self._layers = ()
        if (self.fleet.world_size > 1 or going_on is not None) and find_layers(training.model):
            (control,) = _open_control_streams(self.fleet, 1, going_on)
            self._layers = synchronise_layers(training.model, control, lambda: training.samples.so_far)
        if going_on is not None:
            if self.elastic_training is not None:
                going_on.load = self.elastic_training.load
            going_on.leaving = training.leaving
            going_on.begin(training.updater)
        self.training, self.elastic_training = training, going_on


def _plan_schedules(
    fleet: Fleet,
    plans: Sequence[BucketPlan],
    rule: UpdateRule,
    optimizer: torch.optim.Optimizer,
    first_stream: int,
    *,
    is_together: bool = False,
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
    with tell_if_long(f"planning how the model moves between {fleet.world_size} ranks", is_told=fleet.rank == 0):
        return plan_bucket_schedules(
            fleet.communicator, plans, options, first_stream=first_stream, most=most, is_together=is_together
        )


def _open_control_streams(fleet: Fleet, number: int, going_on: ElasticTraining | None) -> list[ControlStream]:
    if going_on is not None:
        return [going_on.open_stream(fleet) for _ in range(number)]
    return [ControlStream(fleet.communicator, stream=stream) for stream in fleet.reserve_streams(number)]


def _start_rule(rule: UpdateRule, setting: Setting) -> Updater:
    updater = rule.start(setting)
    if updater.divides_gradients:
        divide_existing_state(updater)
    for _, _, tensor in placed(setting.buckets):
        tensor.grad = None
    return updater


def _checked_parameters(model: nn.Module, optimizer: torch.optim.Optimizer, rule: UpdateRule) -> Named:
    """Return what is to be trained, if it can be."""
    check_layers(model, rule)
    check_shapes(model)
    named = trained_parameters(model, optimizer)
    check_parameters(named)
    check_untrained(model, named)
    check_storages(model, named)
    _check_graphs(model)
    return named


def _check_graphs(model: nn.Module) -> None:
    """Refuse a module of which a CUDA graph is replayed: that reads its parameters where they are moved away from."""
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        if "make_graphed_callables" in getattr(forward, "__qualname__", ""):
            raise UpdateError(
                f"{f'Module {name!r}' if name else 'The model'} went through torch.cuda.make_graphed_callables(), and "
                "distribute() would move its parameters away from where a replay reads them; call distribute() first, "
                "and then give make_graphed_callables() the model's parts"
            )
