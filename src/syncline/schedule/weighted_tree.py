"""The weighted tree planner: the tree planner with portions that follow the links' rates.

The fractions come from :mod:`syncline.schedule.portions`, which solves for the whole tree and not for one level
alone, because a leaf's link carries the sum over all levels. What comes of it is compared with equal portions by
predicted time and by nothing else, and equal portions stand unless they are beaten. Cost model and steps: as the tree
planner's.
"""

from __future__ import annotations

from syncline.schedule.collective import Collective
from syncline.schedule.cost import predict
from syncline.schedule.draft import Draft
from syncline.schedule.ownership import Fractions, Target
from syncline.schedule.portions import best_fractions
from syncline.schedule.schedule import Schedule
from syncline.schedule.tree import draft_tree
from syncline.schedule.verifier import verify
from syncline.topology import Topology

_COMPARED_AT_BYTES = 16 << 20


def plan_weighted_tree(
    topology: Topology, collective: Collective, *, target: Target = "balanced", root: int = 0
) -> Schedule:
    """Plan a collective along the tree with the portions that suit its links; never slower than equal ones."""
    return verify(draft_weighted_tree(topology, collective, target=target, root=root))


def draft_weighted_tree(
    topology: Topology, collective: Collective, *, target: Target = "balanced", root: int = 0
) -> Draft:
    """Draw what :func:`plan_weighted_tree` verifies."""
    drafts = [
        draft_tree(topology, collective, fractions=fractions, target=target, root=root, planner="weighted_tree")
        for fractions in _candidates(topology, collective, target)
    ]
    if len(drafts) == 1:
        return drafts[0]
    return min(drafts, key=lambda draft: predict(draft, topology, _COMPARED_AT_BYTES).seconds)


def _candidates(topology: Topology, collective: Collective, target: Target) -> list[Fractions]:
    """Return equal portions first, so that they win a draw, and then whatever may be better."""
    wanted = [collective] if target == "balanced" else [collective, Collective.ALL_REDUCE]
    if collective is Collective.BROADCAST:
        wanted = [Collective.ALL_GATHER]
    candidates: list[Fractions] = [{}]
    for each in wanted:
        fractions = best_fractions(topology, each)
        if fractions not in candidates:
            candidates.append(fractions)
    return candidates
