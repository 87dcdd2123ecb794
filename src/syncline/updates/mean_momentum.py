"""Momentum towards the mean: what rounds tell of the momentum that other parties have, without a byte more.

Parties whose data differ have other momenta, and these drive parameters apart again after each average. A step of SGD
moves parameters by the momentum times the learning rate, and a round tells how far all have moved. So over a period, on
average,

    mean momentum - own momentum = (own move / own steps - mean move / mean steps) / learning rate

When the next period is over, ``momentum ** mean steps`` is left of that difference: so much of it is added to the own
momentum as the round is merged (with a momentum above .9 as much as with that). Long periods are what they would be
without it, as nothing is left. All parties together add nothing, so a rate that has just changed does no harm: it is
how far they are apart that is misjudged. What may be rounding errors of the parameters is left alone, as a rate near 0
would make momentum of it; and so is the momentum of a parameter that the party has not moved, as one that is not used
does not fade.

Simulated, eight seeds, steps to the loss of 64 synchronous ones on digits by label: two sites with a period of 2 73.5
-> 66.0, with 4 77.7 -> 72.4; three racks 87.7 -> 69.5, 97.0 -> 79.3. Averaging the momenta themselves, for twice the
bytes, is as good. On mixed digits both change nothing (`docs/decisions/0095-rounds-tell-of-momentum.md`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from syncline.updates.bucket import Bucket
from syncline.updates.inner import is_torchs
from syncline.updates.rounds import Move
from syncline.updates.state import StateEntry

_KEY = "momentum_buffer"
_LONGEST = 0.9
"""No more is added than is left with this momentum: with .99 parameters that are apart pull momenta back meanwhile."""
_NOISE = 8.0
"""So many of the largest parameter's last bits may be noise."""
_PRECISE = (torch.float32, torch.float64)
"""Of a difference of shorter numbers little is left."""


class MeanMomentum:
    """Draws one party's momentum to the mean of all."""

    def __init__(self, buckets: Sequence[Bucket], optimizer: torch.optim.Optimizer) -> None:
        kind = type(optimizer)
        self._groups = optimizer.param_groups if issubclass(kind, torch.optim.SGD) and is_torchs(kind) else []
        self._places = {slot.name: (bucket, slot.start) for bucket in buckets for slot in bucket.plan.slots}

    @property
    def is_there(self) -> bool:
        """Whether some parameters have a momentum, and moves tell of it."""
        return any(group["momentum"] for group in self._groups)

    @property
    def rates(self) -> list[float]:
        """How far a momentum of 1 moves a parameter of each group in a step, now."""
        return [float(group["lr"]) for group in self._groups]

    @torch.no_grad()
    def follow(
        self,
        entries: Iterable[StateEntry],
        moves: Sequence[tuple[Bucket, int, Move]],
        means: Sequence[torch.Tensor],
        *,
        rates: Sequence[float],
        own_steps: float,
        mean_steps: float,
    ) -> None:
        """Let the momentum in ``entries``, the party's state on this rank, follow what a round has brought.

        ``moves``: each with its bucket, and where it begins there; ``means``: what all parameters became on average;
        ``rates``: as they were when the moves were made.
        """
        lags = [
            (bucket, start, move, lag)
            for (bucket, start, move), mean in zip(moves, means, strict=True)
            if (lag := _lag(move, mean, mean_steps / own_steps)) is not None
        ]
        for entry in entries:
            if entry.key != _KEY or entry.start is None or entry.value.dtype not in _PRECISE:
                continue
            bucket, slot_start = self._places[entry.parameter]
            rate, momentum = rates[bucket.plan.group], float(self._groups[bucket.plan.group]["momentum"])
            first = slot_start + entry.start
            for moved, start, move, lag in lags:
                begin, end = max(first, start), min(first + len(entry.value), start + len(lag))
                place = slice(begin - start, end - start)
                if rate and moved is bucket and begin < end and not torch.equal(move.values[place], move.start[place]):
                    part = entry.value[begin - first : end - first]
                    part.add_(lag[place], alpha=min(momentum, _LONGEST) ** mean_steps / mean_steps / rate)


def _lag(move: Move, mean: torch.Tensor, share: float) -> torch.Tensor | None:
    """Return how much less far than this party all came, if it makes that ``share`` of its steps; None for noise."""
    lag = move.values - mean if share == 1.0 else (move.values - move.start) * share - (mean - move.start)
    return lag if _largest(lag) > _NOISE * torch.finfo(lag.dtype).eps * _largest(move.start) else None


def _largest(values: torch.Tensor) -> float:
    """Return the largest size of an element; torch's norm takes ten times as long."""
    if not len(values):
        return 0.0
    low, high = torch.aminmax(values)
    return max(-float(low), float(high))
