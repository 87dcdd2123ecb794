"""Optimizer state that JSON can say: what is divided by its number type, single values themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from syncline.errors import UpdateError
from syncline.updates.state import StateEntry


def describe_state(entries: Iterable[StateEntry]) -> dict[str, dict[str, Any]]:
    """Say in JSON what state this rank has: a number type for what is divided, else the value itself."""
    catalogue: dict[str, dict[str, Any]] = defaultdict(dict)
    for entry in entries:
        value: Any = str(entry.value.dtype) if entry.start is not None else [encode_single(entry)]
        catalogue[entry.parameter][entry.key] = value
    return catalogue


def encode_single(entry: StateEntry) -> dict[str, Any]:
    """Return a state value that is not divided in a form that JSON can say."""
    value = entry.value
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype), "value": value.tolist()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"dtype": None, "value": value}
    raise UpdateError(f"The optimizer state {entry.key!r} of {entry.parameter!r} is a {type(value).__name__}; only "
                      "tensors, numbers and text can be moved between ranks")  # fmt: skip


def decode_value(value: Any) -> Any:
    """Return what :func:`describe_state` has said of one key: a number type, or the single value."""
    return dtype_of(value) if isinstance(value, str) else decode_single(value[0])


def decode_single(single: Mapping[str, Any]) -> Any:
    """Undo :func:`encode_single`."""
    if single["dtype"] is None:
        return single["value"]
    return torch.tensor(single["value"], dtype=dtype_of(single["dtype"]))


def dtype_of(name: str) -> torch.dtype:
    """Return the number type that ``str(dtype)`` named."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise UpdateError(f"{name!r} is not a number type of this PyTorch")
    return dtype
