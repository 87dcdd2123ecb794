"""Fractions for an all-reduce on a tree with unequal links, solved exactly (docs/mechanisms.md, Tree all-reduce).

Let parent v have R children c with fractions f_c, and count loads in units of the data's size. With direct exchange
(see :mod:`syncline.schedule.tree`) v's own exchange puts 1 + (R - 2) f_c on the link of c in each direction, and of
what v's own link carries, z_v, the part f_c starts or ends below c. So

    z_c = 1 + f_c (R - 2 + z_v),    z = 0 above the topmost parent.

Every z_c must be at most T B_c, B_c the slower rate of the link. Let Z_c be the most that c can bear, counting what
is below it: Z_c = T B_c at a leaf, else min(T B_c, sum of Z over its children - 2 (R_c - 1)). T is enough exactly if
every Z_c >= 1 and, at the topmost parent, the sum of its children's Z is at least 2 (R - 1); then fractions up to
(Z_c - 1) / (R - 2 + z_v) can be chosen that sum to 1. No other fractions are better. The second condition, written
out, is the bound of :mod:`syncline.schedule.bound` for hubs that hold the topmost parent. The first has no such
counterpart below the top: where a subtree's own links are as slow as its uplink, the levels stand in each other's way,
and the bound is missed (1.5 against 4/3 for two hosts and a third one a switch further, all links equal).

Of those that fit, the fractions nearest to the links' rates are taken (a rate counts up to four times the next one's,
so that an unlimited link does not make one child own everything). What one link cannot bear goes where there is most
room: the bound would be met as well with another link nearly as busy as the busiest, but then each delays what the
other is about to need.
"""

from __future__ import annotations

import math

from syncline.schedule.bound import Branch
from syncline.schedule.water_filling import ROUNDING, limited_by_the_next, nearest_to_proportions


def divide_all_reduce(tree: Branch, seconds: float) -> dict[str, list[float]] | None:
    """Return fractions with which an all-reduce takes ``seconds`` per byte, or None."""
    most: dict[str, float] = {}

    def bear(branch: Branch) -> float:
        own = math.inf if branch.is_whole else seconds * min(branch.up, branch.down)
        below = [bear(child) for child in branch.children]
        most[branch.name] = min(own, sum(below) - 2 * (len(below) - 1)) if below else own
        return most[branch.name]

    bear(tree)
    loads, fractions = {tree.name: 0.0}, {}
    for parent in tree.parents():
        load, degree = loads[parent.name], len(parent.children)
        spread = degree - 2 + load
        if degree == 1:
            loads[parent.children[0].name] = load
            continue
        room = [most[child.name] - 1 for child in parent.children]
        if min(room) < -ROUNDING:
            return None
        ranges = [(0.0, max(0.0, one) / spread if spread > ROUNDING else 1.0) for one in room]
        parts = nearest_to_proportions(_weights(parent), ranges)
        if parts is None:
            return None
        fractions[parent.name] = parts
        for child, part in zip(parent.children, parts, strict=True):
            loads[child.name] = 1 + part * spread
    return fractions


def _weights(parent: Branch) -> list[float]:
    return limited_by_the_next([min(child.up, child.down) for child in parent.children])
