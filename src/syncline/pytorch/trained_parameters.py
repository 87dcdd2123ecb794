"""Which parameters all trainings of this process train, for a training that has to know of its neighbours."""

from __future__ import annotations

import threading

from torch import nn

_lock = threading.Lock()
_trained: list[tuple[nn.Module, frozenset[nn.Parameter]]] = []
_num_changes = [0]


def add(model: nn.Module, tensors: frozenset[nn.Parameter]) -> None:
    """Remember what a training of ``model`` trains."""
    with _lock:
        _trained.append((model, tensors))
        _num_changes[0] += 1


def remove(tensors: frozenset[nn.Parameter]) -> None:
    """Forget what a training trained; nothing happens if that was done before."""
    with _lock:
        _trained[:] = [each for each in _trained if each[1] is not tensors]
        _num_changes[0] += 1


def of_all() -> frozenset[nn.Parameter]:
    """Return the parameters that lie in the buckets of any training."""
    with _lock:
        return _union()


def beside(
    model: nn.Module, own: frozenset[nn.Parameter], seen: int
) -> tuple[int, bool, frozenset[nn.Parameter]] | None:
    """Return what all trainings train, and whether that which trains ``own`` is the first of ``model``.

    Before them comes the number of changes so far; None if that is ``seen`` still.
    """
    if seen == _num_changes[0]:
        return None
    with _lock:
        first = next((tensors for each, tensors in _trained if each is model), None)
        return _num_changes[0], first is own, _union()


def _union() -> frozenset[nn.Parameter]:
    return frozenset[nn.Parameter]().union(*(tensors for _, tensors in _trained))
