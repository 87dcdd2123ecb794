"""Which layers share a connection class: the cut points that make the modelled forward pass shortest.

The search is exact for any number of layers and classes. In the model of :mod:`syncline.priorities.forward_timing`
the arrival of a layer depends on where its class ends and on nothing else, and a forward pass that is earlier at one
layer is never later at a following one. So the best time T at which k classes can have computed the layers before e is

    T(k, e) = min over s < e of  max( T(k-1, s) + forward(s..e),  max over l in s..e of arrival(l, e) + forward(l..e) )

which is a dynamic programme of O(classes x layers^2), a few milliseconds for 64 layers. (Exhaustive search gives the
same and takes binomial(layers, classes) walks; coordinate descent, the usual way out, may stop at a poor cut.)

Ties go to fewer classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from syncline.errors import ScheduleError
from syncline.priorities.forward_timing import Floats, ForwardPrediction, ForwardProfile, predict_forward, prefix_done_s


def search_classes(profile: ForwardProfile, num_classes: int) -> ForwardPrediction:
    """Return the best assignment to at most ``num_classes`` classes."""
    if num_classes < 1:
        raise ScheduleError(f"num_classes must be at least 1, not {num_classes}")
    best = predict_forward(profile, (0,) * profile.num_layers)
    for classes in _Search(profile, min(num_classes, profile.num_layers)).assignments():
        prediction = predict_forward(profile, classes)
        if prediction.time_s < best.time_s:
            best = prediction
    return best


def divide_by_proportions(num_bytes: Sequence[int], proportions: Sequence[float]) -> tuple[int, ...]:
    """Return the class of each layer if each class gets its proportion (of 1) of the bytes, as nearly as layers allow.

    A layer belongs to the class in whose part of all bytes its middle lies.
    """
    total = sum(num_bytes)
    ends = np.cumsum(np.asarray(proportions, dtype=np.float64))[:-1]
    starts = np.cumsum([0, *num_bytes[:-1]])
    middles = (starts + np.asarray(num_bytes) / 2) / max(total, 1)
    return tuple(int(number) for number in np.searchsorted(ends, middles, side="right"))


class _Search:
    """The dynamic programme; ``_from[k][e]`` remembers where the last of k classes began."""

    def __init__(self, profile: ForwardProfile, num_classes: int) -> None:
        self._profile = profile
        self._num_classes = num_classes
        num_layers = profile.num_layers
        self._best_s: Floats = np.full((num_classes + 1, num_layers + 1), np.inf)
        self._best_s[0, 0] = 0.0
        self._from = np.zeros((num_classes + 1, num_layers + 1), dtype=np.int64)
        self._run()

    def assignments(self) -> list[tuple[int, ...]]:
        """Return the best assignment for each number of classes, fewest first."""
        return [self._assignment(number) for number in range(1, self._num_classes + 1)]

    def _run(self) -> None:
        profile = self._profile
        sizes = np.asarray(profile.num_bytes, dtype=np.float64)
        issued_s = np.asarray(profile.issued_s, dtype=np.float64)
        elapsed_s = np.concatenate([[0.0], np.cumsum(profile.forward_s)])
        done_s = prefix_done_s(profile)
        rear_bytes = np.zeros(profile.num_layers)
        for end in range(1, profile.num_layers + 1):
            newest = end - 1
            rear_bytes[:newest] += sizes[newest] * (issued_s[newest] < issued_s[:newest])
            arrivals_s = done_s[:end] + np.minimum(profile.backlog_bytes, rear_bytes[:end]) / profile.bytes_per_s
            left_s = elapsed_s[end] - elapsed_s[:end]
            gated_s = np.maximum.accumulate((arrivals_s + left_s)[::-1])[::-1]
            reached_s = np.maximum(self._best_s[:-1, :end] + left_s, gated_s)
            self._from[1:, end] = reached_s.argmin(axis=1)
            self._best_s[1:, end] = reached_s.min(axis=1)

    def _assignment(self, num_classes: int) -> tuple[int, ...]:
        end = self._profile.num_layers
        pieces: list[int] = []
        for number in range(num_classes, 0, -1):
            start = int(self._from[number, end])
            pieces = [number - 1] * (end - start) + pieces
            end = start
        return tuple(pieces)
