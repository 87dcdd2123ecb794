"""The weighted tree planner: the tree planner with portions that follow the links' rates.

The fractions come from :mod:`syncline.schedule.portions`, which solves for the whole tree and not for one level
alone, because a leaf's link carries the sum over all levels. Where every rank owns as much as any other, portions are
fixed, and sums meet where links have room instead: an in-tree is drawn for each owner, by a linear programme
(:mod:`syncline.schedule.step_flow`). So it is where portions leave an all-reduce far from the bound, as on trees whose
links differ in both directions, by the programme of both halves at once. What comes of it is compared with equal
portions by predicted time: of those within 2 % of the fastest the one with the fewest full links is taken
(:func:`syncline.schedule.cost.fastest`), and equal portions of those that are alike. Cost model and steps: as the tree
planner's, with up to twice as many steps where sums meet on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from syncline.schedule.bound import lower_bound
from syncline.schedule.cost import CostModel, fastest, predict
from syncline.schedule.draft import Collective, Draft
from syncline.schedule.in_trees import draft_with_owners, weights_of_shares
from syncline.schedule.outline import Outline
from syncline.schedule.ownership import Fractions, Target, is_bound_to_gateways, speaking, with_gateway
from syncline.schedule.portions import best_fractions
from syncline.schedule.step_flow import STEP, solve_step_flow
from syncline.schedule.transfers import Transfers
from syncline.schedule.tree import draft_tree, outline_tree
from syncline.topology import Topology

T = TypeVar("T", Draft, Outline)

_COMPARED_AT_BYTES = 16 << 20
"""A planner is not told the size: portions are compared at this one, and planners again at the size of each call."""
_CLOSE_ENOUGH = 1e-6
FAR = 1.02
"""Times the bound, from which on in-trees are worth their many messages."""
MOST_RANKS = 64
"""Beyond it in-trees are so many messages, and take so long to plan, that direct exchange remains."""
_ATOMS_PER_RANK = (1, 4)
"""In-trees of so many atoms of each owner are compared: more come nearer to the flow, and are more messages."""
_NAME = "weighted_tree"


def draft_weighted_tree(
    topology: Topology, collective: Collective, *, target: Target = "balanced", root: int = 0
) -> Draft:
    """Draw a collective along the tree with the portions that suit its links; at most 2 % slower than equal ones.

    Portions solve a linear programme over the whole tree, and are compared by the time that is predicted for 16 MiB.
    """
    draft = draft_portions(topology, collective, target=target, root=root)
    may_flow = collective is Collective.ALL_REDUCE and len(topology.speakers) == topology.num_ranks <= MOST_RANKS
    if not may_flow or _over_bound(draft, topology, target, root) <= FAR:
        return draft
    return _fastest([draft, _draft_flows(topology)], topology)


def draft_portions(topology: Topology, collective: Collective, *, target: Target = "balanced", root: int = 0) -> Draft:
    """Draw the same without an in-tree for each owner."""

    def draw(fractions: Fractions) -> Draft:
        return draft_tree(topology, collective, fractions=fractions, target=target, root=root, planner=_NAME)

    is_half = collective in STEP and target == "rank_order"
    may_flow = is_half and topology.has_rates and 1 < topology.num_ranks <= MOST_RANKS
    others = list(_draft_half_in_rank_order(topology, collective)) if may_flow else []
    return _with_portions(topology, collective, draw, others, target=target, root=root)


def outline_weighted_tree(topology: Topology, collective: Collective) -> Outline:
    """Return in outline what :func:`draft_portions` draws; no broadcast, and no other target than "balanced"."""
    return _with_portions(
        topology, collective, lambda each: outline_tree(topology, collective, fractions=each, planner=_NAME)
    )


def _with_portions(
    topology: Topology,
    collective: Collective,
    draw: Callable[[Fractions], T],
    others: Sequence[T] = (),
    *,
    target: Target = "balanced",
    root: int = 0,
) -> T:
    """Return the fastest of equal portions, ``others`` and, where these are not as good as can be, other portions."""
    drafts = [draw({})]
    drafts += others
    if min(_over_bound(draft, topology, target, root) for draft in drafts) > 1 + _CLOSE_ENOUGH:
        drafts += [draw(fractions) for fractions in _candidates(topology, collective, target) if fractions]
    return _fastest(drafts, topology)


def _fastest(drafts: Iterable[T], topology: Topology) -> T:
    return fastest((draft, predict(draft, topology, _COMPARED_AT_BYTES)) for draft in drafts)


def _draft_half_in_rank_order(topology: Topology, collective: Collective) -> Iterator[Draft]:
    """Draw a reduce-scatter or an all-gather in which rank k owns [k/N, (k+1)/N), and every rank speaks.

    An owner's in-tree has an aggregation rank wherever sums for it meet on their way.
    """
    everyone, num_ranks = with_gateway(topology, "every", of=("one", "auto", "helper")), topology.num_ranks
    flow = solve_step_flow(everyone, [(1 / num_ranks, 1 / num_ranks)] * num_ranks, halves=[collective]).halves[0]
    owners = tuple((rank, 1) for rank in range(num_ranks))
    for per_rank in _ATOMS_PER_RANK:
        num_atoms = per_rank * num_ranks
        yield draft_with_owners(everyone, collective, owners, num_atoms=num_atoms, flow=flow, planner=_NAME)


def _draft_flows(topology: Topology) -> Draft:
    """Draw an all-reduce as a reduce-scatter and an all-gather whose links carry the least of both together."""
    flow = solve_step_flow(topology, [(0.0, 1.0)] * topology.num_ranks, is_at_once=True)
    owners = tuple(enumerate(weights_of_shares(flow.shares, [1.0] * topology.num_ranks)))
    scatter, gather = (
        draft_with_owners(topology, half, owners, flow=part, planner=_NAME)
        for half, part in zip(STEP, flow.halves, strict=True)
    )
    both = Transfers.concatenate([scatter.transfers, gather.transfers.shifted(scatter.num_steps)])
    return replace(scatter, collective=Collective.ALL_REDUCE, transfers=both)


def _over_bound(draft: Draft | Outline, topology: Topology, target: Target, root: int) -> float:
    """Return how many times the bound the busiest link takes; 1 where no link limits."""
    bound = lower_bound(topology, draft.collective, _COMPARED_AT_BYTES, target=target, root=root)
    prediction = predict(draft, topology, _COMPARED_AT_BYTES, cost=CostModel.of_links_alone())
    return max(prediction.link_s.values(), default=0.0) / bound if bound else 1.0


def _candidates(topology: Topology, collective: Collective, target: Target) -> list[Fractions]:
    """Return whatever may be better than equal portions; for what cannot be solved, what is nearest to it."""
    if collective is Collective.BROADCAST:
        return [best_fractions(topology, Collective.ALL_GATHER)]
    if is_bound_to_gateways(topology, collective, target):
        topology = speaking(topology)  # what the others add to a gateway's own link is left out
    kin = [] if target == "balanced" or collective is Collective.ALL_REDUCE else [Collective.ALL_REDUCE]
    return [best_fractions(topology, each) for each in (collective, *kin)]
