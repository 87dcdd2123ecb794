"""Optimizer state in a form that belongs to parameters, not to ranks: by name, key and place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

StateByName = Mapping[str, Mapping[str, Any]]
"""Whole optimizer state: for each parameter's name, each key's tensor (in the parameter's shape) or value."""


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


SINGLE_VALUES = frozenset({"step", "eta", "mu", "mu_product"})
"""State of torch's optimizers that is one value for a whole parameter, also where the parameter has one element."""


def is_elementwise(key: str, value: Any, shape: Sequence[int]) -> bool:
    """Whether a state value has one element for each element of the parameter (or piece) of this shape."""
    if not isinstance(value, torch.Tensor) or value.shape != torch.Size(shape):
        return False
    return value.dim() > 0 or key not in SINGLE_VALUES


def num_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the memory of all tensors in the state of ``optimizer``."""
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
