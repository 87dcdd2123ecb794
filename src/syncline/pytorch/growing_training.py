"""The training of a job that may grow: how it is taken away and put in place again, and what newcomers lack of it.

That comes from the nearest member: parameters, buffers, optimizer state, hyper-parameters, position. State that is
divided among the ranks is not among it: all of them divide it anew when the newcomer is one of them. One broadcast for
each tensor, or for some small ones together, along the tree of the source and those that it serves.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from syncline import updates
from syncline.members.job_record import NO_FLAGS, Flags
from syncline.pytorch.checkpoint.group import CheckpointGroup
from syncline.pytorch.consistency import broadcast_tensors
from syncline.pytorch.epochs import FleetGrowth
from syncline.pytorch.installation import Installation
from syncline.pytorch.optimizer import DistributedOptimizer, Gate
from syncline.pytorch.training import Training
from syncline.schedule.period import USUAL
from syncline.topology import Topology
from syncline.updates import Updater
from syncline.updates.bucket import Slot
from syncline.updates.control import ControlStream
from syncline.updates.elastic_sharded import ElasticShardedUpdater
from syncline.updates.peer_state import HeldState
from syncline.updates.rule import GrowthAgreement, MemberNews
from syncline.updates.state import decode_value, describe_state

POSITION = "a newcomer's position"
"""The label of what is given beside tensors: where the training is, and what the members offer."""


class _SentState:
    """A source of optimizer state whose elements come later: it gathers where they are to land."""

    def __init__(self, catalogue: Mapping[str, Mapping[str, Any]]) -> None:
        self._catalogue = catalogue
        self.targets: dict[tuple[str, str], torch.Tensor] = {}

    def values(self, parameter: str) -> Mapping[str, Any]:
        """Return a parameter's state: a number type for what has one value for each element, else the value."""
        return {key: decode_value(value) for key, value in self._catalogue.get(parameter, {}).items()}

    def fill(self, slot: Slot, key: str, start: int, target: torch.Tensor) -> None:
        """Note where elements are wanted; a newcomer wants each parameter's whole."""
        assert start == 0, "who steps the whole model has the whole state"
        self.targets[slot.name, key] = target


class GrowingTraining(Gate):
    """The training of a job that may grow."""

    def __init__(self, installation: Installation, optimizer: DistributedOptimizer) -> None:
        self.lines = installation.describe()
        """What a newcomer's training must have alike."""
        self._installation = installation
        self._optimizer = optimizer
        self._news: MemberNews | None = None
        """What was told of members when ranks have met last, with rules whose ranks do so now and then."""
        self._came_at: int | None = None
        """The steps that were made when this rank came in, if it did."""
        self._agreement = GrowthAgreement(groups=())
        self._held: list[HeldState] = []
        """What this rank has of a divided state, while the training is taken away."""
        self._before: Updater | None = None
        """What worked on the model before it was taken away."""
        optimizer.growing = self

    @property
    def period(self) -> int:
        """Of so many steps one, at least, may let newcomers in."""
        rule = self._installation.rule
        if isinstance(rule, updates.Clustered):
            return rule.period * rule.reelect_every
        period = rule.period if isinstance(rule, updates.Overlapped | updates.LocalSteps) else 1
        return period if isinstance(period, int) else USUAL

    @property
    def has_just_come(self) -> bool:
        """Whether this rank has come into the running job, and has made no step in it yet."""
        return self._came_at is not None and self._came_at == self._training.updater.iteration

    @property
    def is_joining(self) -> bool:
        """Whether it is within ``join()``."""
        training = self._installation.training
        return training is not None and training.is_joining

    @property
    def flags(self) -> Flags:
        """What the first member has told of newcomers with the last pass."""
        training = self._installation.elastic_training
        if training is None or not self._training.updater.is_synchronous:
            return NO_FLAGS if self._news is None else self._news.flags
        return training.flags

    def end_step(self) -> None:
        """Take in who is connected; every member comes here at the end of the same step."""
        growth = self._installation.fleet.growth
        if growth is None:
            return
        if self._training.updater.is_synchronous:
            growth.end_step()
        else:
            self._take_news(growth)

    def finish(self) -> None:
        """End what is under way of the last step, among the members as they are; where news come that is nothing."""
        if self._training.updater.is_synchronous:
            self._training.finish()

    def meet(self, control: ControlStream, topology: Topology, num_old: int) -> None:
        """Agree with all ranks of a larger job on how to go on there."""
        self._agreement = self._training.updater.meet(control, topology, num_old)

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        """Ranks of the larger job whose optimizer state is the same, as was agreed."""
        return self._agreement.groups

    def leave(self) -> None:
        """Take the training away, and keep what it has."""
        updater = self._training.updater
        self.iteration, self._before = updater.iteration, updater
        updater.withdraw()
        self._held = updater.held_state() if isinstance(updater, ElasticShardedUpdater) else []
        self._installation.remove()

    def resume(self) -> None:
        """Put the model into training on the fleet as it is now; each rank gets its part of a divided state."""
        training = self._installation.install(has_values=True, begins_with=self._agreement.begins_with)
        training.updater.go_on_from(self.iteration)
        self._optimizer.go_on(training, self._installation.elastic_training)
        held, self._held = self._held, []
        if isinstance(training.updater, ElasticShardedUpdater):
            training.updater.admit(held)
        if self._before is not None:
            training.updater.go_on_after(self._before, has_come=self.has_just_come)
            self._before.release()
            self._before = None
            gc.collect()  # a training refers to its parts and they to it, and they have as much memory as the model

    def give(self, control: ControlStream) -> None:
        """Give the newcomers of ``control``, of which this rank is the first, all that they lack."""
        group = self._group()
        entries = group.entries()
        head = {
            "groups": group.groups(),
            "state": describe_state(entries),
            "iteration": self.iteration,
            "extra": self.offer() if self.offer is not None else None,
            "parts": self.offer_parts() if self.offer_parts is not None else {},
        }
        control.all_gather(head, POSITION)
        divided = {(entry.parameter, entry.key): entry.value for entry in entries if entry.start is not None}
        self._broadcast(divided, control)

    def take(self, control: ControlStream) -> None:
        """Take what :meth:`give` gives, as another rank of ``control``."""
        group = self._group()
        head = control.all_gather(None, POSITION)[0]
        group.load_groups(head["groups"])
        source = _SentState(head["state"])
        group.load_state(source)
        self._broadcast(source.targets, control)
        self.iteration = self._came_at = head["iteration"]
        self.extra, self.parts = head["extra"], head["parts"]
        self._held = []  # what this rank had alone counts no more

    def _broadcast(self, state: Mapping[tuple[str, str], torch.Tensor], control: ControlStream) -> None:
        model = self._installation.model
        tensors = [*model.parameters(), *model.buffers(), *(state[key] for key in sorted(state))]
        assert self._before is not None, "the training is taken away"
        broadcast_tensors([*tensors, *self._before.alike()], control)

    def _take_news(self, growth: FleetGrowth) -> None:
        """Go on without who is lost, as all have just been told; or take in who is connected."""
        updater = self._training.updater
        self._news = updater.take_news()
        if self._news is not None and not growth.lose(self._news.lost, updater.iteration):
            growth.end_step()

    @property
    def _training(self) -> Training:
        training = self._installation.training
        assert training is not None, "a training that was taken away makes no steps"
        return training

    def _group(self) -> CheckpointGroup:
        return CheckpointGroup(self._installation.model, self._installation.optimizer)
