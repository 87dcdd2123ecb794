"""When parameters arrive and how long a forward pass takes that waits for them: the model behind connection classes.

Mechanisms part 3. A model's layers (here: its buckets) are computed in forward order, each once its parameters are
there:

    t = max(t, arrival_l) + forward_l

All transfers share one pipe of ``bytes_per_s``, which is never idle while something waits. A layer's transfer can begin
at ``issued_s`` (of the all-gather: when its shard was stepped), and arrivals follow from what goes ahead of it:

    arrival_l = done(layers 0 to l) + min(backlog_bytes, rear_l) / bytes_per_s

- ``done(S)`` is when a pipe that carries S alone, each from when it was issued, has carried all of it. It holds because
  senders queue by urgency and receivers grant by urgency across all senders: what is less urgent gives way.
- ``rear_l`` are the bytes of less urgent layers *of the same class* that were issued before. What of them was begun
  is not called back: as many bytes as an engine has under way, ``backlog_bytes``, go first. In other classes, less
  urgent layers hold nothing up (at most one message, which is left out).

So with a backlog of 0 one class is as good as many, and where all is issued at once too; classes earn the time that a
backlog of rear layers would cost a front layer. The model leaves out the reduce-scatters that may still be under way
(their share of the pipe is in the measured rate and times of issue), and takes layers for needed in forward order.

Which layers share a class is searched by it: the cut points that make the modelled forward pass shortest. The search is
exact for any number of layers and classes. The arrival of a layer depends on where its class ends and on nothing else,
and a forward pass that is earlier at one layer is never later at a following one. So the best time T at which k classes
can have computed the layers before e is

    T(k, e) = min over s < e of  max( T(k-1, s) + forward(s..e),  max over l in s..e of arrival(l, e) + forward(l..e) )

which is a dynamic programme of O(classes x layers^2), a few milliseconds for 64 layers. (Exhaustive search gives the
same and takes binomial(layers, classes) walks; coordinate descent, the usual way out, may stop at a poor cut.) Ties go
to fewer classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BACKWARD_PER_FORWARD = 2.0
"""A backward pass computes two products where the forward pass computes one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardProfile:
    """What the model knows of a training step; sequences go by layer, in forward order."""

    num_bytes: tuple[int, ...]
    forward_s: tuple[float, ...]
    issued_s: tuple[float, ...]
    """When each transfer can begin, counted from the beginning of the forward pass; negative if before."""
    bytes_per_s: float
    backlog_bytes: float
    """What was begun before is not called back, up to this; see the module."""

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPrediction:
    """What the model says of one assignment of layers to classes."""

    classes: tuple[int, ...]
    """The class of each layer; they never fall in forward order."""
    arrivals_s: tuple[float, ...]
    time_s: float
    """When the last layer has been computed."""

    @property
    def num_classes(self) -> int:
        """How many classes are really used."""
        return len(set(self.classes))


def predict_forward(profile: ForwardProfile, classes: Sequence[int]) -> ForwardPrediction:
    """Return arrivals and the time of the forward pass if each layer goes in its class (none falls); O(layers^2)."""
    ends = np.searchsorted(np.asarray(classes), np.asarray(classes), side="right")
    done_s = prefix_done_s(profile)
    arrivals = tuple(
        float(done_s[layer]) + _hold_up_s(profile, _rear_bytes(profile, layer, int(end)))
        for layer, end in enumerate(ends)
    )
    seconds = 0.0
    for arrival_s, forward_s in zip(arrivals, profile.forward_s, strict=True):
        seconds = max(seconds, arrival_s) + forward_s
    return ForwardPrediction(classes=tuple(int(number) for number in classes), arrivals_s=arrivals, time_s=seconds)


def prefix_done_s(profile: ForwardProfile) -> Floats:
    """Return for each layer when it and all before it are carried, with nothing else on the pipe.

    A set of transfers is done at the largest of: a time of issue, plus all bytes issued at or after it.
    """
    issued_s = np.asarray(profile.issued_s, dtype=np.float64)
    carry_s = np.asarray(profile.num_bytes, dtype=np.float64) / profile.bytes_per_s
    by_time = np.argsort(issued_s, kind="stable")
    done_s = np.empty(profile.num_layers)
    for layer in range(profile.num_layers):
        members = by_time[by_time <= layer]
        later_s = np.cumsum(carry_s[members][::-1])[::-1]
        done_s[layer] = float((issued_s[members] + later_s).max())
    return done_s


def _rear_bytes(profile: ForwardProfile, layer: int, end: int) -> float:
    issued_s = profile.issued_s
    return sum(profile.num_bytes[rear] for rear in range(layer + 1, end) if issued_s[rear] < issued_s[layer])


def _hold_up_s(profile: ForwardProfile, rear_bytes: float) -> float:
    return min(profile.backlog_bytes, rear_bytes) / profile.bytes_per_s


def assumed_issue_s(num_bytes: Sequence[int], forward_s: Sequence[float], bytes_per_s: float) -> tuple[float, ...]:
    """Return when all-gathers begin if nothing was measured, counted from the end of the backward pass.

    The backward pass takes twice the forward pass, in reverse; reduce-scatters follow it one after another, as fast as
    all-gathers, and an all-gather begins when its reduce-scatter is over, but not before ``step()``.
    """
    now_s = -BACKWARD_PER_FORWARD * math.fsum(forward_s)
    carried_s = now_s
    issued = []
    for size, seconds in zip(reversed(num_bytes), reversed(forward_s), strict=True):
        now_s += BACKWARD_PER_FORWARD * seconds
        carried_s = max(carried_s, now_s) + size / bytes_per_s
        issued.append(max(0.0, carried_s))
    return tuple(reversed(issued))


def search_classes(profile: ForwardProfile, num_classes: int) -> ForwardPrediction:
    """Return the best assignment to at most ``num_classes`` classes."""
    best = predict_forward(profile, (0,) * profile.num_layers)
    began = _find_classes(profile, min(num_classes, profile.num_layers))
    for number in range(1, len(began)):
        prediction = predict_forward(profile, _assignment(began, number))
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


def _find_classes(profile: ForwardProfile, num_classes: int) -> npt.NDArray[np.int64]:
    """Return where the last of k classes begins that hold the layers before e: the dynamic programme, by k and e."""
    shape = (num_classes + 1, profile.num_layers + 1)
    best_s, began = np.full(shape, np.inf), np.zeros(shape, dtype=np.int64)
    best_s[0, 0] = 0.0
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
        reached_s = np.maximum(best_s[:-1, :end] + left_s, gated_s)
        began[1:, end] = reached_s.argmin(axis=1)
        best_s[1:, end] = reached_s.min(axis=1)
    return began


def _assignment(began: npt.NDArray[np.int64], num_classes: int) -> tuple[int, ...]:
    """Return the class of each layer, by where classes begin."""
    end = began.shape[1] - 1
    pieces: list[int] = []
    for number in range(num_classes, 0, -1):
        start = int(began[number, end])
        pieces = [number - 1] * (end - start) + pieces
        end = start
    return tuple(pieces)
