"""Which fractions of the data the children of each parent should take, when links are unequal.

For a given time the rooms below this one look for fractions that fit (:mod:`syncline.schedule.reduce_portions`,
:mod:`syncline.schedule.scatter_portions`); here the shortest such time is found, and the fractions are rounded to
integer weights. Of those that fit, the nearest to the links' rates are taken for an all-reduce, else the nearest to
equal portions. Complexity: O(nodes x bisections).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from syncline.schedule.bound import bisect_time, branch_of, with_finite_rates
from syncline.schedule.collective import Collective
from syncline.schedule.ownership import Fractions
from syncline.schedule.reduce_portions import divide_all_reduce
from syncline.schedule.scatter_portions import divide_reduce_scatter
from syncline.schedule.water_filling import ROUNDING
from syncline.topology import Topology

_RESOLUTION = 1 << 14
_NUM_BISECTIONS = 24


def best_fractions(topology: Topology, collective: Collective) -> Fractions:
    """Return weights for those parents at which equal portions would cost time; none for a broadcast."""
    if topology.num_ranks == 1 or collective is Collective.BROADCAST:
        return {}
    tree = with_finite_rates(branch_of(topology, swapped=collective is Collective.ALL_GATHER))
    divide = divide_all_reduce if collective is Collective.ALL_REDUCE else divide_reduce_scatter
    start = 1 / max(branch.up for branch in tree.walk() if not branch.is_whole)
    _, seconds = bisect_time(lambda time: divide(tree, time) is not None, start, num_bisections=_NUM_BISECTIONS)
    fractions = divide(tree, seconds) or {}
    return {name: weights for name, parts in fractions.items() if len(set(weights := _weights(parts))) > 1}


def _weights(parts: Sequence[float]) -> list[int]:
    """Round fractions to integers that sum to the resolution, each off by less than one."""
    scaled = [part * _RESOLUTION for part in parts]
    weights = [math.floor(part + ROUNDING) for part in scaled]
    if max(scaled) - min(scaled) < 1:
        return [1] * len(parts)
    by_remainder = sorted(range(len(parts)), key=lambda child: weights[child] - scaled[child])
    for child in by_remainder[: _RESOLUTION - sum(weights)]:
        weights[child] += 1
    return weights
