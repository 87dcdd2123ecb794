"""Which fractions of the data the children of each parent should take, when links are unequal.

For a given time fractions that fit are looked for, for an all-reduce and for a reduce-scatter; then the shortest such
time is found, and the fractions are rounded to integer weights. Of those that fit, the nearest to the links' rates are
taken for an all-reduce, else the nearest to equal portions. Complexity: O(nodes x bisections).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from syncline.schedule.bound import Branch, bisect_time, branch_of, condensed, with_finite_rates
from syncline.schedule.draft import Collective
from syncline.schedule.in_trees import weights_of_shares
from syncline.schedule.ownership import Fractions
from syncline.topology import Node, Topology

# Fractions for an all-reduce on a tree with unequal links, solved exactly (docs/mechanisms.md, Tree all-reduce).
#
# Let parent v have R children c with fractions f_c, and count loads in units of the data's size. With direct exchange
# (see :mod:`syncline.schedule.tree`) v's own exchange puts 1 + (R - 2) f_c on the link of c in each direction, and of
# what v's own link carries, z_v, the part f_c starts or ends below c. So
#
# z_c = 1 + f_c (R - 2 + z_v), z = 0 above the topmost parent.
#
# Every z_c must be at most T B_c, B_c the slower rate of the link. Let Z_c be the most that c can bear, counting what
# is below it: Z_c = T B_c at a leaf, else min(T B_c, sum of Z over its children - 2 (R_c - 1)). T is enough exactly if
# every Z_c >= 1 and, at the topmost parent, the sum of its children's Z is at least 2 (R - 1); then fractions up to
# (Z_c - 1) / (R - 2 + z_v) can be chosen that sum to 1. No other fractions are better. The second condition, written
# out, is the bound of :mod:`syncline.schedule.bound` for hubs that hold the topmost parent. The first has no such
# counterpart below the top: where a subtree's own links are as slow as its uplink, the levels stand in each other's
# way, and the bound is missed (1.5 against 4/3 for two hosts and a third one a switch further, all links equal).
#
# Of those that fit, the fractions nearest to the links' rates are taken (a rate counts up to four times the next
# one's, so that an unlimited link does not make one child own everything). What one link cannot bear goes where there
# is most room: the bound would be met as well with another link nearly as busy as the busiest, but then each delays
# what the other is about to need.


def divide_all_reduce(tree: Branch, seconds: float) -> dict[str, list[float]] | None:
    """Return fractions with which an all-reduce takes ``seconds`` per byte, or None."""
    most: dict[str, float] = {}

    def bear(branch: Branch) -> float:
        own = math.inf if branch.is_whole else seconds * min(branch.up, branch.down)
        below = [(bear(child), child.count) for child in branch.children]
        spare = sum(each * count for each, count in below) - 2 * (sum(count for _, count in below) - 1)
        most[branch.name] = min(own, spare) if below else own
        return most[branch.name]

    bear(tree)
    loads, fractions = {tree.name: 0.0}, {}
    for parent in tree.parents():
        load, children = loads[parent.name], parent.all_children
        degree = len(children)
        spread = degree - 2 + load
        if degree == 1:
            loads[children[0].name] = load
            continue
        room = [most[child.name] - 1 for child in children]
        if min(room) < -ROUNDING:
            return None
        ranges = [(0.0, max(0.0, one) / spread if spread > ROUNDING else 1.0) for one in room]
        parts = nearest_to_proportions(limited_by_the_next([min(child.up, child.down) for child in children]), ranges)
        if parts is None:
            return None
        fractions[parent.name] = parts
        for child, part in zip(children, parts, strict=True):
            loads[child.name] = 1 + part * spread
    return fractions


# Fractions for a reduce-scatter alone on a tree with unequal links; exact for two levels, a search beyond.
#
# With x_c = f_c x_v what is owned below child c of v, which has R children, the link of c carries 1 - x_c up and y_c =
# f_c (R - 1 + y_v) down (x = 1 and y = 0 above the topmost parent). Given T, from the leaves up:
#
# - *limit*: y_c <= Y_c, where Y_c = T down_c at a leaf, else min(T down_c, sum of Y over its children - (R_c - 1)); -
# *need*: x_c >= X_c, where X_c = 1 - T up_c at a leaf; else it is also at least the sum of X over its children, and,
# because the ratio y / x at a child of c is r_c + (R_c - 1) / x_c with r_c = y_c / x_c, at least (R_c - 1) / (Y / X -
# r_c) for each.
#
# The ratio r_c depends on the portions above c but not on f_c, so needs are known for two levels; with more, the
# ratios are those of the pass before, and a few passes are made. From the top down each f_c then lies between X_c /
# x_v and Y_c / (R - 1 + y_v), as near to equal as can be. An all-gather is the same with up and down exchanged.


_MAX_PASSES = 6


def divide_reduce_scatter(tree: Branch, seconds: float) -> dict[str, list[float]] | None:
    """Return fractions with which a reduce-scatter takes ``seconds`` per byte, or None where none were found."""
    attempt = _Attempt(tree, seconds)
    for _ in range(_MAX_PASSES):
        attempt.measure(tree)
        if attempt.choose(tree):
            return attempt.fractions
        if attempt.is_settled:
            break
    return None


class _Attempt:
    """Needs, limits and ratios of all nodes for one value of T."""

    def __init__(self, tree: Branch, seconds: float) -> None:
        self._seconds = seconds
        self._need: dict[str, float] = {}
        self._limit: dict[str, float] = {}
        self._ratio: dict[str, float] = {branch.name: 0.0 for branch in tree.walk()}
        self.fractions: dict[str, list[float]] = {}
        self.is_settled = False

    def measure(self, branch: Branch) -> None:
        """Set needs and limits from the leaves up, with the ratios that were last found."""
        for child in branch.children:
            self.measure(child)
        name, num_others = branch.name, len(branch.children) - 1
        need, limit = (0.0, math.inf) if branch.is_whole else self._own_range(branch)
        if branch.children:
            limit = min(limit, sum(self._limit[child.name] for child in branch.children) - num_others)
            need = max(need, sum(self._need[child.name] for child in branch.children))
            need = max(need, *(self._need_for(child, self._ratio[name], num_others) for child in branch.children))
        self._need[name], self._limit[name] = need, limit

    def _own_range(self, branch: Branch) -> Range:
        return max(0.0, 1 - self._seconds * branch.up), self._seconds * branch.down

    def _need_for(self, child: Branch, ratio: float, num_others: int) -> float:
        need, limit = self._need[child.name], self._limit[child.name]
        if need <= 0 or num_others == 0:
            return 0.0
        spare = limit / need - ratio
        return num_others / spare if spare > 0 else math.inf

    def choose(self, tree: Branch) -> bool:
        """Choose fractions from the top down and note the ratios that follow; return whether all links keep to T."""
        fits, self.is_settled = True, True
        shares = {tree.name: (1.0, 0.0)}
        for parent in tree.parents():
            owned, load = shares[parent.name]
            incoming = len(parent.children) - 1 + load
            ranges = [self._range(child, owned, incoming) for child in parent.children]
            parts = nearest_to_equal(ranges)
            fits = fits and parts is not None
            parts = parts or _proportional([low for low, _ in ranges])
            if len(parts) > 1:
                self.fractions[parent.name] = parts
            for child, part in zip(parent.children, parts, strict=True):
                shares[child.name] = (part * owned, part * incoming)
                self._note_ratio(child, incoming / owned if owned > 0 else math.inf)
        return fits

    def _note_ratio(self, child: Branch, ratio: float) -> None:
        if child.children and not math.isclose(ratio, self._ratio[child.name], rel_tol=ROUNDING):
            self._ratio[child.name] = ratio
            self.is_settled = False

    def _range(self, child: Branch, owned: float, incoming: float) -> Range:
        need, limit = self._need[child.name], max(0.0, self._limit[child.name])
        low = need / owned if owned > 0 else (math.inf if need > ROUNDING else 0.0)
        return low, min(1.0, limit / incoming if incoming > 0 else 1.0)


def _proportional(lows: list[float]) -> list[float]:
    """Return the best effort where the needs do not fit: in proportion to them."""
    bounded = [min(low, 1.0) + ROUNDING for low in lows]
    return [low / sum(bounded) for low in bounded]


_NUM_BISECTIONS = 24


def best_fractions(topology: Topology, collective: Collective) -> Fractions:
    """Return weights for those parents at which equal portions would cost time; none for a broadcast."""
    if topology.num_ranks == 1 or collective is Collective.BROADCAST:
        return {}
    tree = with_finite_rates(branch_of(topology, swapped=collective is Collective.ALL_GATHER))
    divide = divide_reduce_scatter
    if collective is Collective.ALL_REDUCE:  # which asks nothing that differs between children that are alike
        tree, divide = condensed(tree), divide_all_reduce
    start = 1 / max(branch.up for branch in tree.walk() if not branch.is_whole)
    _, seconds = bisect_time(lambda time: divide(tree, time) is not None, start, num_bisections=_NUM_BISECTIONS)
    fractions = divide(tree, seconds) or {}
    weights = {name: weights_of_shares(parts, [1.0] * len(parts)) for name, parts in fractions.items()}
    uneven = {name: each for name, each in weights.items() if len(set(each)) > 1}
    return dict(_of_all(topology.root, tree, uneven))


def _of_all(node: Node, branch: Branch, weights: Fractions) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield the weights of ``node`` and all below, which ``branch`` is, or stands for."""
    if branch.name in weights:
        yield node.name, weights[branch.name]
    for child, below in zip(node.children, branch.all_children, strict=True):
        yield from _of_all(child, below, weights)


# Water-filling: numbers within given ranges that sum to 1 and are as near to given proportions as can be.


ROUNDING = 1e-9
_NUM_LEVELS = 60
_MOST_TIMES_THE_NEXT = 4
Range = tuple[float, float]


def limited_by_the_next(values: Sequence[float]) -> list[float]:
    """Return the values, none counted for more than four times the next one, unless that is zero."""
    most = _MOST_TIMES_THE_NEXT * sorted(values)[-2] or max(values)
    return [min(value, most) for value in values]


def nearest_to_equal(ranges: Sequence[Range]) -> list[float] | None:
    """Return one number of each range, clamp(level, low, high) with a common level, or None if no such sum is 1."""
    return nearest_to_proportions([1.0] * len(ranges), ranges)


def nearest_to_proportions(weights: Sequence[float], ranges: Sequence[Range]) -> list[float] | None:
    """Return clamp(level x weight, low, high) with a common level, or None if no such sum is 1; weights are above 0."""
    lows, highs = [low for low, _ in ranges], [min(1.0, high) for _, high in ranges]
    crossed = any(low > high + ROUNDING for low, high in zip(lows, highs, strict=True))
    if crossed or sum(lows) > 1 + ROUNDING or sum(highs) < 1 - ROUNDING:
        return None
    wanted = [weight / sum(weights) for weight in weights]
    if all(low <= part <= high for low, part, high in zip(lows, wanted, highs, strict=True)):
        return wanted

    def parts_at(level: float) -> list[float]:
        return [min(max(level * part, low), high) for low, part, high in zip(lows, wanted, highs, strict=True)]

    below, above = 0.0, 1 / min(wanted)
    for _ in range(_NUM_LEVELS):
        level = (below + above) / 2
        below, above = (below, level) if sum(parts_at(level)) >= 1 else (level, above)
    return parts_at(above)
