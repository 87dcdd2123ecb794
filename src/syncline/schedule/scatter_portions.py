"""Fractions for a reduce-scatter alone on a tree with unequal links; exact for two levels, a search beyond.

With x_c = f_c x_v what is owned below child c of v, which has R children, the link of c carries 1 - x_c up and
y_c = f_c (R - 1 + y_v) down (x = 1 and y = 0 above the topmost parent). Given T, from the leaves up:

- *limit*: y_c <= Y_c, where Y_c = T down_c at a leaf, else min(T down_c, sum of Y over its children - (R_c - 1));
- *need*: x_c >= X_c, where X_c = 1 - T up_c at a leaf; else it is also at least the sum of X over its children, and,
  because the ratio y / x at a child of c is r_c + (R_c - 1) / x_c with r_c = y_c / x_c, at least (R_c - 1) / (Y / X -
  r_c) for each.

The ratio r_c depends on the portions above c but not on f_c, so needs are known for two levels; with more, the ratios
are those of the pass before, and a few passes are made. From the top down each f_c then lies between X_c / x_v and
Y_c / (R - 1 + y_v), as near to equal as can be. An all-gather is the same with up and down exchanged.
"""

from __future__ import annotations

import math

from syncline.schedule.bound import Branch
from syncline.schedule.water_filling import ROUNDING, Range, nearest_to_equal

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
