"""Optimizer state between its two forms: divided between ranks, and whole as in ``Optimizer.state_dict()``."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, NoReturn

import torch

from syncline.errors import UpdateError
from syncline.schedule import Collective
from syncline.updates import Updater
from syncline.updates.bucket import Bucket, placed
from syncline.updates.control import every_rank
from syncline.updates.inner import NOT_DIVIDED, options_of
from syncline.updates.state import (
    VELOCITY,
    ChosenState,
    StateEntry,
    WholeState,
    decode_single,
    describe_state,
    dtype_of,
    joined_catalogues,
)

Values = dict[str, dict[str, Any]]


def gather_state(updater: Updater) -> dict[int, Any]:
    """Return the whole state by parameters' numbers, as torch's own form has it, on every rank; a collective."""
    divided, whole = collect_state(updater.dividing), updater.whole_state
    tensors = {slot.name: tensor for _, slot, tensor in placed(updater.buckets)}
    state = {
        number: {**whole.get(tensors[name], {}), **divided.get(name, {})}
        for name, number in sorted(_numbers(updater).items(), key=itemgetter(1))
    }
    return {number: values for number, values in state.items() if values}


def collect_state(updater: Updater) -> Values:
    """Return the state of each parameter, by name, on every rank; a collective, in ``optimizer.state_dict()`` alone."""
    entries = updater.state_entries()
    told = updater.collectives.control.all_gather(describe_state(entries), every_rank("optimizer.state_dict()"))
    catalogue = joined_catalogues(told)
    state: Values = {name: _singles(keys) for name, keys in catalogue.items()}
    for bucket in updater.buckets:
        for key, dtype in _divided_keys(bucket, catalogue):
            flat = _gather_bucket(updater, bucket, entries, key, dtype)
            having = [slot for slot in bucket.plan.slots if catalogue.get(slot.name, {}).get(key) == str(dtype)]
            for slot in having:
                state[slot.name][key] = slot.view(flat).clone()
    return state


def spread_state(updater: Updater, state_dict: Mapping[str, Any]) -> None:
    """Take a whole state in torch's own form: the owned part of it, and all hyper-parameters."""
    groups = updater.optimizer.param_groups
    saved = state_dict["param_groups"]
    sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in saved]
    if sizes[0] != sizes[1]:
        raise UpdateError(f"The state to load has parameter groups of {sizes[1]} parameters, the optimizer {sizes[0]}")
    place = dict(zip((number for group in saved for number in group["params"]), range(sum(sizes[0])), strict=True))
    by_place = {place[number]: values for number, values in state_dict["state"].items()}
    names = {number: name for name, number in _numbers(updater).items()}
    state = {names[number]: values for number, values in by_place.items() if number in names}
    _load(updater, state)
    for group, options in zip(groups, saved, strict=True):
        group.update(options_of(options))


def divide_existing_state(updater: Updater) -> None:
    """Take over the state of an optimizer that has stepped before it was distributed."""
    optimizer = updater.optimizer
    state: Values = {}
    for _, slot, tensor in placed(updater.buckets):
        if optimizer.state.get(tensor):
            state[slot.name] = dict(optimizer.state[tensor])
    if state:
        _load(updater, state)
        optimizer.state.clear()


def _load(updater: Updater, state: Values) -> None:
    """Keep the owned part, and what every rank keeps whole."""
    source = WholeState(updater.buckets, state)
    updater.dividing.load_state(ChosenState(source, lambda key: key != VELOCITY))
    for _, slot, tensor in placed(updater.buckets):
        if VELOCITY in state.get(slot.name, {}):
            updater.whole_state[tensor] = {VELOCITY: state[slot.name][VELOCITY]}


def divided_state(updater: Updater) -> Mapping[torch.Tensor, Mapping[str, Any]]:
    """Return this rank's state by model parameter: single values as they are; what other ranks have is refused."""
    tensors = {slot.name: tensor for _, slot, tensor in placed(updater.buckets)}
    entries = updater.dividing.state_entries()
    values: dict[torch.Tensor, dict[str, Any]] = {}
    if updater.step_number or entries:
        values = {tensor: dict(updater.whole_state.get(tensor, {})) for tensor in tensors.values()}
    for entry in entries:
        values[tensors[entry.parameter]][entry.key] = entry.value if entry.start is None else _DIVIDED
    return _DividedStates({tensors[name]: _DividedState(values[tensors[name]], name) for name in tensors if values})


_DIVIDED = object()


class _ReadOnlyState(UserDict[Any, Any]):
    """State of which each rank has a part: changes are refused, since nobody would read them."""

    def __init__(self, values: dict[Any, Any]) -> None:
        self.data = values

    def __setitem__(self, *_: Any) -> NoReturn:
        raise UpdateError(
            "optimizer.state cannot be changed with Sharded(), whose ranks each keep a part of the state, where nobody "
            "reads this; give a whole state to optimizer.load_state_dict(...), on every rank, keep values of your own "
            f"in a dict of your own, or use {NOT_DIVIDED}"
        )

    __delitem__ = __ior__ = __setitem__  # which refuse as well


class _DividedStates(_ReadOnlyState):
    """The states of all parameters; as with torch's own, those that have none yet have an empty one."""

    def __getitem__(self, key: torch.Tensor) -> Any:
        return self.data[key] if key in self else _ReadOnlyState({})

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a parameter, or ``default``."""
        return self.data.get(key, default)


class _DividedState(_ReadOnlyState):
    """The state of one parameter, of which this rank has a part, or nothing."""

    def __init__(self, values: dict[str, Any], parameter: str) -> None:
        super().__init__(values)
        self._parameter = parameter

    def __contains__(self, key: object) -> bool:
        if not self.data:
            self._refuse_to_read(key)
        return key in self.data

    def __getitem__(self, key: str) -> Any:
        value = self.data[key] if self.data else _DIVIDED
        if value is _DIVIDED:
            self._refuse_to_read(key)
        return value

    def _refuse_to_read(self, key: object) -> NoReturn:
        raise UpdateError(
            f"The optimizer state {key!r} of {self._parameter!r} is divided between the ranks with Sharded(); "
            f"optimizer.state_dict() returns it whole (every rank calls it); to keep it whole, use {NOT_DIVIDED}"
        )


def _numbers(updater: Updater) -> dict[str, int]:
    """Return the number that torch's form gives to each parameter in a bucket."""
    every = [parameter for group in updater.optimizer.param_groups for parameter in group["params"]]
    number_of = {parameter: number for number, parameter in enumerate(every)}
    return {slot.name: number_of[tensor] for _, slot, tensor in placed(updater.buckets)}


def _singles(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: decode_single(value[0]) for key, value in keys.items() if isinstance(value, list)}


def _divided_keys(bucket: Bucket, catalogue: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, torch.dtype]]:
    found = {
        (key, value)
        for slot in bucket.plan.slots
        for key, value in catalogue.get(slot.name, {}).items()
        if isinstance(value, str)
    }
    return [(key, dtype_of(name)) for key, name in sorted(found)]


def _gather_bucket(
    updater: Updater, bucket: Bucket, entries: Iterable[StateEntry], key: str, dtype: torch.dtype
) -> torch.Tensor:
    flat = torch.zeros(bucket.plan.num_elements, dtype=dtype)
    starts = {slot.name: slot.start for slot in bucket.plan.slots}
    for entry in entries:
        if entry.key == key and entry.parameter in starts and entry.start is not None and entry.stop is not None:
            base = starts[entry.parameter]
            flat[base + entry.start : base + entry.stop] = entry.value
    updater.collectives.start(bucket, Collective.ALL_GATHER, None, values=flat, is_exact=True).wait()
    return flat.to(bucket.plan.device)
