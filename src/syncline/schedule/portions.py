"""Which fractions of the data the children of each parent should take, when links are unequal.

Mechanism 2 (a), for whole trees. Let parent v have R children c with fractions f_c, and count loads in units of the
data's size. With direct exchange (see :mod:`syncline.schedule.tree`):

*All-reduce.* v's own exchange puts 1 + (R - 2) f_c on the link of c in each direction, and of what v's own link
carries, z_v, the part f_c starts or ends below c. So

    z_c = 1 + f_c (R - 2 + z_v),    z = 0 above the topmost parent.

Every z_c must be at most T B_c, B_c the slower rate of the link. Let Z_c be the most that c can bear, counting what
is below it: Z_c = T B_c at a leaf, else min(T B_c, sum of Z over its children - 2 (R_c - 1)). T is enough exactly if
every Z_c >= 1 and, at the topmost parent, the sum of its children's Z is at least 2 (R - 1); then f_c up to (Z_c - 1)
/ (R - 2 + z_v) can be chosen to sum to 1. Written out, that is the bound of :mod:`syncline.schedule.bound` for hubs
that hold the topmost parent: so where no latency counts, the best tree reaches the bound, whatever its shape.

*Reduce-scatter.* With x_c = f_c x_v what is owned below c, the link carries 1 - x_c up and y_c = f_c (R - 1 + y_v)
down. Needs from below (x_c >= X_c) and limits from below (y_c <= Y_c) bound f_c on both sides. This is exact for one
level; for several, levels are coupled, and T is raised until the choice from the top down fits. *All-gather:* up and
down trade places.

Among the fractions that fit, those nearest to equal portions are taken: f_c = clamp(m, low_c, high_c), m such that they
sum to 1. Complexity: O(nodes x bisections).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from syncline.schedule.bound import Branch, bisect_time, branch_of
from syncline.schedule.collective import Collective
from syncline.schedule.ownership import Fractions
from syncline.topology import Topology

_RESOLUTION = 1 << 14
_ROUNDING = 1e-9
_FAR_ABOVE = 1e6
Range = tuple[float, float]


def best_fractions(topology: Topology, collective: Collective) -> Fractions:
    """Return weights for those parents at which equal portions would cost time; none for a broadcast."""
    if topology.num_ranks == 1 or collective is Collective.BROADCAST:
        return {}
    tree = _bounded(branch_of(topology, swapped=collective is Collective.ALL_GATHER))
    divide = _divide_all_reduce if collective is Collective.ALL_REDUCE else _divide_reduce_scatter
    start = 1 / max(branch.up for branch in tree.walk() if not branch.is_whole)
    seconds = bisect_time(lambda time: divide(tree, time) is not None, start) * (1 + _ROUNDING)
    fractions = divide(tree, seconds) or divide(tree, seconds * (1 + 1e-6)) or {}
    return {name: weights for name, parts in fractions.items() if len(set(weights := _weights(parts))) > 1}


def _weights(parts: Sequence[float]) -> list[int]:
    """Round fractions to integers that sum to the resolution, each off by less than one."""
    scaled = [part * _RESOLUTION for part in parts]
    weights = [math.floor(part + _ROUNDING) for part in scaled]
    if max(parts) - min(parts) < _ROUNDING:
        return [1] * len(parts)
    by_remainder = sorted(range(len(parts)), key=lambda child: weights[child] - scaled[child])
    for child in by_remainder[: _RESOLUTION - sum(weights)]:
        weights[child] += 1
    return weights


def _bounded(tree: Branch) -> Branch:
    """Replace infinite rates by ones that are far above all others."""
    rates = [rate for branch in tree.walk() for rate in (branch.up, branch.down) if rate < math.inf]
    ceiling = max(rates, default=1.0) * _FAR_ABOVE

    def bounded(branch: Branch) -> Branch:
        children = tuple(bounded(child) for child in branch.children)
        return replace(branch, up=min(branch.up, ceiling), down=min(branch.down, ceiling), children=children)

    return bounded(tree)


def _parents(tree: Branch) -> Iterator[Branch]:
    return (branch for branch in tree.walk() if branch.children)


def _clamped(ranges: Sequence[Range]) -> list[float] | None:
    """Return fractions within the ranges that sum to 1 and are as equal as can be, or None if there are none."""
    lows, highs = [low for low, _ in ranges], [min(1.0, high) for _, high in ranges]
    crossed = any(low > high + _ROUNDING for low, high in zip(lows, highs, strict=True))
    if crossed or sum(lows) > 1 + _ROUNDING or sum(highs) < 1 - _ROUNDING:
        return None
    equal = 1 / len(ranges)
    if all(low <= equal <= high for low, high in zip(lows, highs, strict=True)):
        return [equal] * len(ranges)
    below, above = 0.0, 1.0
    for _ in range(60):
        level = (below + above) / 2
        total = sum(min(max(level, low), high) for low, high in zip(lows, highs, strict=True))
        below, above = (below, level) if total >= 1 else (level, above)
    return [min(max(above, low), high) for low, high in zip(lows, highs, strict=True)]


def _divide_all_reduce(tree: Branch, seconds: float) -> dict[str, list[float]] | None:
    """Return fractions with which an all-reduce takes ``seconds`` per byte, or None."""
    most: dict[str, float] = {}

    def bear(branch: Branch) -> float:
        own = math.inf if branch.is_whole else seconds * min(branch.up, branch.down)
        below = [bear(child) for child in branch.children]
        most[branch.name] = min(own, sum(below) - 2 * (len(below) - 1)) if below else own
        return most[branch.name]

    bear(tree)
    loads, fractions = {tree.name: 0.0}, {}
    for parent in _parents(tree):
        load, degree = loads[parent.name], len(parent.children)
        spread = degree - 2 + load
        if degree == 1:
            loads[parent.children[0].name] = load
            continue
        room = [most[child.name] - 1 for child in parent.children]
        if min(room) < -_ROUNDING:
            return None
        parts = _clamped([(0.0, max(0.0, one) / spread if spread > _ROUNDING else 1.0) for one in room])
        if parts is None:
            return None
        fractions[parent.name] = parts
        for child, part in zip(parent.children, parts, strict=True):
            loads[child.name] = 1 + part * spread
    return fractions


def _divide_reduce_scatter(tree: Branch, seconds: float) -> dict[str, list[float]] | None:
    """Return fractions with which a reduce-scatter takes ``seconds`` per byte, or None where the choice finds none."""
    need: dict[str, float] = {}
    limit: dict[str, float] = {}

    def measure(branch: Branch) -> tuple[float, float]:
        below = [measure(child) for child in branch.children]
        needed, limited = sum(part[0] for part in below), sum(part[1] for part in below) - (len(below) - 1)
        own = (0.0, math.inf) if branch.is_whole else (1 - seconds * branch.up, seconds * branch.down)
        need[branch.name] = max(0.0, own[0], needed)
        limit[branch.name] = min(own[1], limited) if below else own[1]
        return need[branch.name], limit[branch.name]

    measure(tree)
    shares, fractions = {tree.name: (1.0, 0.0)}, {}
    for parent in _parents(tree):
        owned, load = shares[parent.name]
        incoming = len(parent.children) - 1 + load
        parts = _clamped([_limits(need[child.name], owned, limit[child.name], incoming) for child in parent.children])
        if parts is None:
            return None
        if len(parts) > 1:
            fractions[parent.name] = parts
        for child, part in zip(parent.children, parts, strict=True):
            shares[child.name] = (part * owned, part * incoming)
    return fractions


def _limits(need: float, owned: float, limit: float, incoming: float) -> Range:
    low = need / owned if owned > 0 else (math.inf if need > _ROUNDING else 0.0)
    high = max(0.0, limit) / incoming if incoming > 0 else 1.0
    return low, min(1.0, high)
