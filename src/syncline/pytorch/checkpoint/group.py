"""Who saves or loads a checkpoint together: the ranks of a fleet, or one process alone; all fail if one does."""

from __future__ import annotations

import json
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property, wraps
from pathlib import Path
from pickle import PickleError
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn, optim

from syncline.errors import CheckpointError, SynclineError, name_ranks
from syncline.late_imports import without_collections
from syncline.pytorch.control import fleet_of, trainings_of
from syncline.pytorch.flatten import plan_model, trained_parameters
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.optimizer import DistributedOptimizer
from syncline.pytorch.training import Training
from syncline.updates.bucket import DEFAULT_BUCKET_BYTES, Slot, placed
from syncline.updates.control import every_rank
from syncline.updates.inner import options_of
from syncline.updates.state import StateEntry, StateOfRank, StateSource, load_parameter_state, parameter_entries


class MembersChangedError(CheckpointError):
    """Ranks of an elastic job were lost while all together saved or loaded; all that are left find out."""


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def again_if_members_change(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let ranks that save or load together begin again if some are lost meanwhile; all would wait for one's garbage."""

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        while True:
            with suppress(MembersChangedError), without_collections():
                return function(*args, **kwargs)

    return call


class CheckpointGroup:
    """One process that has everything itself: a plain model and a plain optimizer.

    That may be a rank of a ``training`` whose others cannot be asked to do a thing together, as ranks may be lost, or
    only serve: each reads a checkpoint by itself, as it has the whole state, and the one that ``saves`` writes it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        training: Training | None = None,
        *,
        saves: bool = True,
    ) -> None:
        self.optimizer = optimizer
        self.saves = saves
        self.owner: object = model if training is None else training
        """What is saved, once at a time."""
        self.training = training
        self._model = model

    @property
    def rank(self) -> int:
        """This process's rank among them; in an elastic job it changes with each epoch."""
        return 0

    @property
    def world_size(self) -> int:
        """How many they are, likewise."""
        return 1

    @property
    def fleet(self) -> Fleet | None:
        """The fleet that it is trained on, if any."""
        return None if self.training is None else fleet_of(self.training)

    @property
    def iteration(self) -> int | None:
        """Steps that were made; None if nobody counts them."""
        return None if self.training is None else self.training.updater.iteration

    def go_on_from(self, iteration: int) -> None:
        """Count steps from there on."""
        if self.training is not None:
            self.training.updater.go_on_from(iteration)

    def exchange(self, value: Any, call: str) -> list[Any]:  # noqa: ARG002 - nobody else can miss the call
        """Return every rank's value, in rank order; ``call`` is the user's, which errors name."""
        return [json.loads(json.dumps(value))]

    def agree(self, value: Any, call: str) -> list[Any]:
        """Return the value of every rank of the job, also of those that load by themselves, where training begins."""
        if self.training is None:
            return self.exchange(value, call)
        return self.training.updater.collectives.control.all_gather(value, every_rank(call))

    def check_members(self) -> None:
        """Raise :class:`MembersChangedError` if these are no longer the ranks that began."""

    def announce_save(self, told: Mapping[str, Any]) -> None:
        """Let ranks take part that would not call ``save_checkpoint()`` by themselves: what it was called with."""

    def synchronize(self) -> None:
        """Wait until parameters and state are final."""

    def end_period(self) -> None:
        """Let ranks have the same parameters, where they save together."""

    @cached_property
    def places(self) -> list[tuple[Slot, nn.Parameter]]:
        """The place of each trained parameter."""
        named = {} if self.optimizer is None else trained_parameters(self._model, self.optimizer)
        parameters = list(named)
        plans = plan_model(named, bucket_bytes=DEFAULT_BUCKET_BYTES)
        return [(slot, parameters[slot.position]) for plan in plans for slot in plan.slots]

    def slots(self) -> Mapping[str, Slot]:
        """Return the place of each trained parameter, by name."""
        return {slot.name: slot for slot, _ in self.places}

    def names(self) -> Mapping[torch.Tensor, str]:
        """Return the name of each trained parameter."""
        return {tensor: slot.name for slot, tensor in self.places}

    def alike(self) -> Mapping[str, torch.Tensor]:
        """Return what has the same bits on all ranks that save together, by name."""
        return {slot.name: tensor.detach() for slot, tensor in self.places}

    def names_by_group(self) -> list[list[str]]:
        """Return the names of the trained parameters in each of the optimizer's groups."""
        names = self.names()
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [[names[tensor] for tensor in group["params"] if tensor in names] for group in groups]

    def entries(self) -> list[StateEntry]:
        """Return the optimizer state that this rank writes."""
        if self.optimizer is None:
            return []
        state = self.optimizer.state
        return [entry for slot, tensor in self.places for entry in parameter_entries(slot, state.get(tensor, {}))]

    def load_state(self, source: StateSource) -> None:
        """Replace the optimizer state."""
        assert self.optimizer is not None, "only an optimizer's state is loaded"
        self.optimizer.state.clear()
        first = StateOfRank(source, 0)
        for slot, tensor in self.places:
            state = load_parameter_state(first, slot, tensor)
            if state:
                self.optimizer.state[tensor] = state

    def groups(self) -> list[dict[str, Any]]:
        """Return the hyper-parameters of each group in a form that JSON can say."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [
            {
                key: value.tolist() if isinstance(value, torch.Tensor) else value
                for key, value in options_of(group).items()
            }
            for group in groups
        ]

    def load_groups(self, saved: Sequence[Mapping[str, Any]], state_keys: Collection[str] = ()) -> None:
        """Replace the hyper-parameters of each group; ``state_keys`` are what the state to be loaded has."""
        assert self.optimizer is not None, "only an optimizer has groups"
        groups = self.optimizer.param_groups
        if len(groups) != len(saved):
            raise CheckpointError(f"The checkpoint has {len(saved)} parameter groups, the optimizer {len(groups)}")
        for options in saved:
            _check_kind(self.optimizer, options, state_keys)
        for group, options in zip(groups, saved, strict=True):
            group.update({key: _like(key, group.get(key), value) for key, value in options.items()})


class FleetCheckpointGroup(CheckpointGroup):
    """The ranks on which a model is in training."""

    training: Training

    def __init__(self, training: Training, optimizer: torch.optim.Optimizer | None) -> None:
        super().__init__(training.model, optimizer, training)
        self._control = training.updater.collectives.control
        self._members = list(self._control.members)

    @property
    def rank(self) -> int:
        """This process's rank among them now."""
        return self._control.rank

    @property
    def world_size(self) -> int:
        """How many they are now."""
        return self._control.world_size

    def announce_save(self, told: Mapping[str, Any]) -> None:
        """Let ranks that follow the others take part."""
        self.training.announce_save({**told, "has_optimizer": self.optimizer is not None})

    def exchange(self, value: Any, call: str) -> list[Any]:
        """Return every rank's value, in rank order; raises where these are no longer the ranks that began."""
        own = self._members
        answers = self._control.all_gather([own, value], every_rank(call))
        if [members for members, _ in answers] != [own] * len(own):
            raise MembersChangedError(f"Ranks were lost in {call}, which must be called again")
        return [value for _, value in answers]

    def agree(self, value: Any, call: str) -> list[Any]:
        """Return every rank's value, in rank order: all load together."""
        return self.exchange(value, call)

    def check_members(self) -> None:
        """Raise :class:`MembersChangedError` if these are no longer the ranks that began."""
        if list(self._control.members) != self._members:
            raise MembersChangedError("Ranks were lost or came, and others have others' parts now")

    def synchronize(self) -> None:
        """Wait until parameters and state are final."""
        self.training.synchronize()

    def end_period(self) -> None:
        """Let ranks have the same parameters; every rank calls it."""
        self.training.end_period()

    @property
    def places(self) -> list[tuple[Slot, nn.Parameter]]:
        """The place of each trained parameter now."""
        buckets = self.training.updater.buckets
        return [(slot, tensor) for _, slot, tensor in placed(buckets)]

    def entries(self) -> list[StateEntry]:
        """Return the optimizer state that this rank owns."""
        if self.optimizer is None or not self.training.updater.is_in_first_replica:
            return []
        crossing = self.training.updater.collectives.crossing
        coding_errors = () if crossing is None else crossing.state_entries()
        return [entry for entry in (*self.training.updater.state_entries(), *coding_errors) if not entry.is_spare]

    def load_state(self, source: StateSource) -> None:
        """Replace the owned optimizer state."""
        updater = self.training.updater
        updater.load_state(source if updater.keeps_own_state else StateOfRank(source, 0))
        if updater.collectives.crossing is not None:
            updater.collectives.crossing.load_state(source)


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
    saves = checkpoint_writer == training.updater.collectives.rank
    return CheckpointGroup(training.model, plain, training, saves=saves)


_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
"""What PyTorch's schedulers add to the groups of any optimizer."""


_STEPS_WITH = {
    **dict.fromkeys((optim.Adam, optim.AdamW, optim.RAdam), "exp_avg_sq"),
    optim.Adamax: "exp_inf",
    optim.NAdam: "mu_product",
}
"""State without which these cannot step, where hyper-parameters do not tell them from each other."""


def _check_kind(optimizer: optim.Optimizer, options: Mapping[str, Any], state_keys: Collection[str]) -> None:
    """Raise :class:`CheckpointError` if saved hyper-parameters or state are another kind of optimizer's.

    That is, if numbers are missing that this one computes with, and there are others that it does not know. Switches do
    not count, as PyTorch's versions add some; nor numbers that are only missing, or only more, as a user's class or
    script may have added them.
    """
    plain = optimizer.inner if isinstance(optimizer, DistributedOptimizer) else optimizer
    known = {key for group in plain.param_groups for key in group}
    missing = sorted(key for key, value in plain.defaults.items() if _is_number(value) and key not in options)
    unknown = sorted(key for key, value in options.items() if _is_number(value) and key not in known | _OF_SCHEDULERS)
    needed = _STEPS_WITH.get(type(plain))
    if needed and state_keys and needed not in state_keys and not (missing and unknown):
        missing, unknown = [needed], sorted(state_keys)
    if missing and unknown:
        raise CheckpointError(
            f"The checkpoint is of another optimizer than {type(plain).__name__}: it has {', '.join(unknown)} and "
            f"lacks {', '.join(missing)}; give the optimizer that it was saved with, or load the model alone"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, list, tuple, torch.Tensor)) and not isinstance(value, bool)


def _like(key: str, current: Any, value: Any) -> Any:
    """Return a hyper-parameter that JSON brought, in the type that the optimizer has it in."""
    kinds = (numbers.Number, torch.Tensor), (list, tuple), (str,), (Mapping,)
    kind = next((kind for kind in kinds if isinstance(current, kind)), None)
    is_list_of_tensor = isinstance(current, torch.Tensor) and current.dim() and isinstance(value, list)
    if value is not None and kind is not None and not (isinstance(value, kind) or is_list_of_tensor):
        raise CheckpointError(
            f"The checkpoint has {value!r:.80} for the hyper-parameter {key!r}, which is {current!r} here"
        )
    if isinstance(current, torch.Tensor) and value is not None:
        return torch.as_tensor(value, dtype=current.dtype, device=current.device)
    return tuple(value) if isinstance(current, tuple) and value is not None else value


class Together:
    """Lets all ranks do a thing in the user's ``call``, and all fail if one does; ``exchange`` is how they tell.

    Each does its own part ``within`` a context.
    """

    def __init__(
        self,
        exchange: Callable[[Any, str], list[Any]],
        target: Path,
        call: str,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._within = within
        self._exchange = exchange
        self._target = target
        self._call = call

    def run(self, what: str, action: Callable[[], Result]) -> Result:
        """Return what this rank's ``action`` returned."""
        results: list[Result] = []
        self.gather(what, lambda: results.append(action()))
        return results[0]

    def gather(self, what: str, action: Callable[[], Any]) -> list[Any]:
        """Return what each rank's ``action`` returned, as JSON has it."""
        result, problem, cause = None, "", None
        try:
            with self._within():
                result = action()
        except SynclineError as error:
            problem = str(error)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError, PickleError) as error:
            problem, cause = _told(error), error
        answers = self._exchange({"problem": problem, "result": result}, self._call)
        ranks_by_problem: dict[str, list[int]] = {}
        for rank, answer in enumerate(answers):
            if answer["problem"]:
                ranks_by_problem.setdefault(answer["problem"], []).append(rank)
        if ranks_by_problem:
            shown = "; ".join(f"{name_ranks(ranks)}: {problem}" for problem, ranks in ranks_by_problem.items())
            who = f"a rank {what}: {shown}" if len(answers) > 1 else f"this rank {what}: {problem}"
            raise CheckpointError(f"Checkpoint {self._target}: {who}") from cause
        return [answer["result"] for answer in answers]


def _told(error: BaseException) -> str:
    """Say what the operating system refused, if it did."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    return f"{type(error).__name__}: {error}"
