"""Optimizer state in a form that belongs to parameters, not to ranks: by name, key and place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from syncline.errors import UpdateError
from syncline.updates.bucket import Bucket, Slot


def describe_state(entries: Iterable[StateEntry]) -> dict[str, dict[str, Any]]:
    """Say in JSON what state this rank has: a number type for what is divided, else the value itself."""
    catalogue: dict[str, dict[str, Any]] = defaultdict(dict)
    for entry in entries:
        value: Any = str(entry.value.dtype) if entry.start is not None else [encode_single(entry)]
        catalogue[entry.parameter][entry.key] = value
    return catalogue


def joined_catalogues(parts: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return what all ranks have, of what :func:`describe_state` has said on each."""
    joined: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, keys in (one for part in parts for one in part.items()):
        joined[name].update(keys)
    return joined


def encode_single(entry: StateEntry) -> dict[str, Any]:
    """Return a state value that is not divided in a form that JSON can say."""
    value = entry.value
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype), "value": value.tolist()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"dtype": None, "value": value}
    raise UpdateError(
        f"The optimizer state {entry.key!r} of {entry.parameter!r} is a {type(value).__name__}; only tensors, numbers "
        "and text can be moved between ranks. With update=AllReduce() each has all of it: leave the optimizer out of "
        "save_checkpoint(), and save optimizer.state_dict() with torch.save() on one rank"
    )


def decode_value(value: Any) -> Any:
    """Return what :func:`describe_state` has said of one key: a number type, or the single value."""
    return dtype_of(value) if isinstance(value, str) else decode_single(value[0])


def decode_single(single: Mapping[str, Any]) -> Any:
    """Undo :func:`encode_single`."""
    if single["dtype"] is None:
        return single["value"]
    return torch.tensor(single["value"], dtype=dtype_of(single["dtype"]))


@cache
def dtype_of(name: str) -> torch.dtype:
    """Return the number type that ``str(dtype)`` named."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise UpdateError(f"{name!r} is not a number type of this PyTorch")
    return dtype


StateByName = Mapping[str, Mapping[str, Any]]
"""Whole optimizer state: for each parameter's name, each key's tensor (in the parameter's shape) or value."""


class StateSource(Protocol):
    """Where optimizer state is loaded from, piece by piece."""

    def values(self, parameter: str) -> Mapping[str, Any]:
        """Return a parameter's state: a ``torch.dtype`` for what has one value for each element, else the value."""

    def fill(self, slot: Slot, key: str, start: int, target: torch.Tensor) -> None:
        """Write elements of the parameter, from ``start`` in memory order, into the 1-D ``target``; now or later."""


class WholeState:
    """Optimizer state of the parameters of some buckets, of which everything is at hand."""

    def __init__(self, buckets: Sequence[Bucket], state: StateByName) -> None:
        self._state = state
        self._shapes = {slot.name: slot.shape for bucket in buckets for slot in bucket.plan.slots}

    def values(self, parameter: str) -> Mapping[str, Any]:
        """Return a parameter's state: a number type for what has one value for each element, else the value."""
        state = self._state.get(parameter, {})
        return {
            key: value.dtype if is_elementwise(key, value, self._shapes[parameter]) else value
            for key, value in state.items()
        }

    def fill(self, slot: Slot, key: str, start: int, target: torch.Tensor) -> None:
        """Write elements of the parameter into ``target``."""
        target.copy_(slot.flatten(self._state[slot.name][key])[start : start + target.numel()])


VELOCITY = "outer_velocity"
"""The key of what every rank keeps whole in the optimizer's state, also where all else there is divided."""


class ChosenState:
    """What a source has under some keys."""

    def __init__(self, source: StateSource, has: Callable[[str], bool]) -> None:
        self._source = source
        self._has = has
        self.fill = source.fill

    def values(self, parameter: str) -> Mapping[str, Any]:
        """Return the chosen part of a parameter's state."""
        return {key: value for key, value in self._source.values(parameter).items() if self._has(key)}


_OF_RANK = "@rank"
CODING_ERROR = "coding_error@"
"""Begins the keys of what codes of some ranks lack: it is no state of an optimizer."""


def key_of_rank(key: str, rank: int) -> str:
    """Return what the state of a rank, or of a party, is saved as, where these differ; that of 0 as it is."""
    return f"{key}{_OF_RANK}{rank}" if rank else key


class StateOfRank:
    """The state of one rank in a source that has that of several; of another in turn, if it has fewer."""

    def __init__(self, source: StateSource, rank: int) -> None:
        self._source = source
        self._rank = rank

    def values(self, parameter: str) -> Mapping[str, Any]:
        """Return a parameter's state under plain keys: the rank's own, else what is there of no rank's."""
        values = self._source.values(parameter)
        return {plain: values[saved] for plain, saved in self._keys(parameter).items()}

    def fill(self, slot: Slot, key: str, start: int, target: torch.Tensor) -> None:
        """Write elements of the rank's state, now or later."""
        self._source.fill(slot, self._keys(slot.name)[key], start, target)

    def _keys(self, parameter: str) -> dict[str, str]:
        """Return what each plain key is saved as."""
        of_rank: dict[int, dict[str, str]] = {0: {}}
        for key in self._source.values(parameter):
            if key.startswith(CODING_ERROR):
                continue
            plain, _, rank = key.partition(_OF_RANK)
            of_rank.setdefault(int(rank or 0), {})[plain] = key
        return of_rank[0] | of_rank.get(self._rank % (max(of_rank) + 1), {})


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """A piece of the state of one parameter that this rank owns.

    ``start`` and ``stop`` are elements of the parameter in its memory order, if the state has one value for each;
    otherwise they are None, and ``value`` is the parameter's only one (such as the number of steps).
    """

    parameter: str
    key: str
    value: Any
    start: int | None = None
    stop: int | None = None
    is_spare: bool = False
    """Whether another rank owns it, and this one keeps it, too."""


SINGLE_VALUES = frozenset({"step", "eta", "mu", "mu_product"})
"""State of torch's optimizers that is one value for a whole parameter, also where the parameter has one element."""


def is_elementwise(key: str, value: Any, shape: Sequence[int]) -> bool:
    """Whether a state value has one element for each element of the parameter (or piece) of this shape."""
    if not isinstance(value, torch.Tensor) or value.shape != torch.Size(shape):
        return False
    return value.dim() > 0 or key not in SINGLE_VALUES


def num_state_bytes(state: Mapping[torch.Tensor, Any]) -> int:
    """Return the memory of all tensors in the state of an optimizer."""
    return sum(
        value.numel() * value.element_size()
        for values in state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    )


def copied(value: Any) -> Any:
    """Return a state value that later steps of the original do not change."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def load_parameter_state(source: StateSource, slot: Slot, tensor: torch.nn.Parameter) -> dict[str, Any]:
    """Return the whole state of one parameter."""
    state: dict[str, Any] = {}
    for key, value in source.values(slot.name).items():
        if isinstance(value, torch.dtype):
            flat = torch.empty(slot.num_elements, dtype=value, device=tensor.device)
            source.fill(slot, key, 0, flat)
            state[key] = flat.as_strided(slot.shape, slot.stride)
        else:
            state[key] = copied(value)
    return state


def parameter_entries(slot: Slot, state: Mapping[str, Any]) -> Iterator[StateEntry]:
    """Yield the whole state of one parameter as entries."""
    for key, value in state.items():
        if is_elementwise(key, value, slot.shape):
            yield StateEntry(parameter=slot.name, key=key, value=slot.flatten(value), start=0, stop=slot.num_elements)
        else:
            yield StateEntry(parameter=slot.name, key=key, value=value)
