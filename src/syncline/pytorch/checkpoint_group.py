"""Who saves or loads a checkpoint together: the ranks of a fleet, or one process alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from syncline.errors import CheckpointError
from syncline.pytorch.flatten import plan_model, trained_parameters
from syncline.pytorch.optimizer import DistributedOptimizer
from syncline.pytorch.registry import trainings_of
from syncline.pytorch.training import Training
from syncline.updates.bucket import DEFAULT_BUCKET_BYTES, Slot
from syncline.updates.control import every_rank
from syncline.updates.state import StateEntry, StateSource, load_parameter_state, parameter_entries


class MembersChangedError(CheckpointError):
    """Ranks of an elastic job were lost while all together saved or loaded; all that are left find out."""


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def again_if_members_change(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let ranks that save or load together begin again if some are lost meanwhile."""

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        while True:
            with suppress(MembersChangedError):
                return function(*args, **kwargs)

    return call


class CheckpointGroup:
    """One process that has everything itself: a plain model and a plain optimizer."""

    rank = 0
    world_size = 1
    saves = True
    """Whether this process has a part in saving."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer
        named = {} if optimizer is None else trained_parameters(model, optimizer)
        plans = plan_model(named, bucket_bytes=DEFAULT_BUCKET_BYTES)
        parameters = list(named)
        self._places = [(slot, parameters[slot.position]) for plan in plans for slot in plan.slots]

    def exchange(self, value: Any, call: str) -> list[Any]:  # noqa: ARG002 - nobody else can miss the call
        """Return every rank's value, in rank order; ``call`` is the user's, which errors name."""
        return [json.loads(json.dumps(value))]

    def announce_save(self, path: str, extra: Any) -> None:
        """Let ranks take part that would not call ``save_checkpoint()`` by themselves."""

    def synchronize(self) -> None:
        """Wait until parameters and state are final."""

    def slots(self) -> Mapping[str, Slot]:
        """Return the place of each trained parameter, by name."""
        return {slot.name: slot for slot, _ in self._places}

    def entries(self) -> list[StateEntry]:
        """Return the optimizer state that this rank writes."""
        if self.optimizer is None:
            return []
        state = self.optimizer.state
        return [entry for slot, tensor in self._places for entry in parameter_entries(slot, state.get(tensor, {}))]

    def load_state(self, source: StateSource) -> None:
        """Replace the optimizer state."""
        assert self.optimizer is not None, "only an optimizer's state is loaded"
        self.optimizer.state.clear()
        for slot, tensor in self._places:
            state = load_parameter_state(source, slot, tensor)
            if state:
                self.optimizer.state[tensor] = state

    def groups(self) -> list[dict[str, Any]]:
        """Return the hyper-parameters of each group in a form that JSON can say."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [
            {
                key: value.tolist() if isinstance(value, torch.Tensor) else value
                for key, value in group.items()
                if key not in {"params", "param_names"}
            }
            for group in groups
        ]

    def load_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Replace the hyper-parameters of each group."""
        assert self.optimizer is not None, "only an optimizer has groups"
        groups = self.optimizer.param_groups
        if len(groups) != len(saved):
            raise CheckpointError(f"The checkpoint has {len(saved)} parameter groups, the optimizer {len(groups)}")
        for group, options in zip(groups, saved, strict=True):
            group.update({key: _like(group.get(key), value) for key, value in options.items()})


class FleetCheckpointGroup(CheckpointGroup):
    """The ranks on which a model is in training."""

    def __init__(self, training: Training, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer
        self._training = training
        self._control = training.updater.collectives.control
        self.rank, self.world_size, self._members = self._control.rank, self._control.world_size, self._control.members

    def announce_save(self, path: str, extra: Any) -> None:
        """Let ranks that follow the others take part."""
        has_optimizer = self.optimizer is not None
        self._training.announce_save({"path": path, "extra": extra, "has_optimizer": has_optimizer})

    def exchange(self, value: Any, call: str) -> list[Any]:
        """Return every rank's value, in rank order; raises where these are no longer the ranks that began."""
        own = list(self._members)
        answers = self._control.all_gather([own, value], every_rank(call))
        if [members for members, _ in answers] != [own] * len(own):
            raise MembersChangedError(f"Ranks were lost in {call}, which must be called again")
        return [value for _, value in answers]

    def synchronize(self) -> None:
        """Wait until parameters and state are final."""
        self._training.synchronize()

    def slots(self) -> Mapping[str, Slot]:
        """Return the place of each trained parameter, by name."""
        return {slot.name: slot for bucket in self._training.updater.buckets for slot in bucket.plan.slots}

    def entries(self) -> list[StateEntry]:
        """Return the optimizer state that this rank owns."""
        if self.optimizer is None or not self._training.updater.is_in_first_replica:
            return []
        return self._training.updater.state_entries()

    def load_state(self, source: StateSource) -> None:
        """Replace the owned optimizer state."""
        self._training.updater.load_state(source)


class LocalCheckpointGroup(CheckpointGroup):
    """A rank whose fleet cannot be asked to do a thing together: ranks may be lost, or only serve.

    Each reads a checkpoint by itself, as it has the whole state; one of them writes it.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, saves: bool) -> None:
        super().__init__(model, optimizer)
        self.saves = saves


def checkpoint_group_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> CheckpointGroup:
    """Return who saves or loads ``model`` and ``optimizer``: its fleet's ranks, if it is distributed."""
    if isinstance(optimizer, DistributedOptimizer):
        if optimizer.training.model is not model:
            raise CheckpointError("The optimizer was distributed with another model; give the two that belong together")
        return _checkpoint_group_in(optimizer.training, optimizer)
    trainings = [training for training in trainings_of(None) if training.model is model]
    if not trainings:
        return CheckpointGroup(model, optimizer)
    if optimizer is not None:
        raise CheckpointError("This model is distributed; give the optimizer that distribute() returned")
    return _checkpoint_group_in(trainings[0], None)


def _checkpoint_group_in(training: Training, optimizer: DistributedOptimizer | None) -> CheckpointGroup:
    checkpoint_writer = training.updater.checkpoint_writer
    if checkpoint_writer is None:
        return FleetCheckpointGroup(training, optimizer)
    plain = None if optimizer is None else optimizer.inner
    return LocalCheckpointGroup(training.model, plain, saves=checkpoint_writer == training.updater.collectives.rank)


def _like(current: Any, value: Any) -> Any:
    """Return a value that JSON brought in the type that the optimizer has it in."""
    if isinstance(current, torch.Tensor):
        return torch.as_tensor(value, dtype=current.dtype, device=current.device)
    return tuple(value) if isinstance(current, tuple) else value
