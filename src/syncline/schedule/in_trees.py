"""Draws reduce-scatters and all-gathers for given owners: an in-tree for each atom, whose links carry what a flow says.

:mod:`syncline.schedule.step_flow` says how many messages of the average element come down to each node. Here the data
is cut into atoms, and each atom gives node v a whole number n_v of messages that come down to it, with

    sum_k n_k = n_v + R - 1    at a parent with R children,    n_v >= 1 where the owner is below v, n_root = 0.

Any such numbers make an in-tree: at each parent the children are joined like ranks, of which child k takes n_k messages
and sends one, but for the child with the owner, or the one whose message leaves the parent. The nearest to that child
are joined first, those that take the most before others, so that the tree is shallow; what is left takes messages from
outside. A rank sends when all that comes to it has been added.

The numbers are apportioned: each node has a balance, what the flow gives it less what it had from the atoms before. The
owner's child takes what its balance says, and siblings with the largest balances the rest, as many at most as the
owner's child can take from, so that no parent adds more than two steps; of an atom that is owned elsewhere the child
with the largest balance takes everything. So what links carry differs from the flow by about an atom. All is counted in
integers: every rank comes to the same plan.

Ranks that speak to their host's gateway alone (:attr:`Topology.gateways`) send it everything first; the trees are then
those of the other ranks. An all-gather is a reduce-scatter on the tree with up and down exchanged, reversed.
Complexity: O(atoms x nodes).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from syncline.arguments import checked
from syncline.errors import ScheduleError
from syncline.schedule.bound import branch_of
from syncline.schedule.draft import Collective, Draft, lowest_terms
from syncline.schedule.ownership import speaking
from syncline.schedule.step_flow import STEP, Flow, solve_step_flow
from syncline.schedule.transfers import Transfer, Transfers
from syncline.topology import Topology

Owners = Sequence[tuple[int, int]]
"""Who owns the data, from its beginning to its end: a rank, and an integer weight in proportion to its range."""

RESOLUTION = 1 << 14
_ROUNDING = 1e-6
_FINENESS = 1 << 6
"""An owner's range is cut into atoms at multiples of its weight divided by this."""


@checked
def draft_with_owners(
    topology: Topology,
    collective: Collective,
    owners: Owners,
    *,
    num_atoms: int | None = None,
    flow: Flow | None = None,
    planner: str = "flow",
) -> Draft:
    """Draw a reduce-scatter or an all-gather for owners that are given in any order, with cuts at their weights.

    ``num_atoms``: about how many atoms the data is cut into (default: four for each rank); an owner's range is at least
    one. Range k of ``owners`` is [sum of the weights before it, that and its own) of the sum of all; ranges of weight 0
    are left out, and a rank may have several. ``flow``: what links should carry, if it is known already.

    Cost: what links carry follows the least time that these owners allow, to about an atom. O(atoms x nodes). Raises
    :class:`ScheduleError` for other collectives, ranks that do not exist, and weights that are negative or all 0.

    >>> topology = Topology.load("two-racks-5-3")
    >>> draft = draft_with_owners(topology, Collective.REDUCE_SCATTER, [(7, 300), (0, 100), (7, 12)])
    >>> [verify(draft).owned(rank) != () for rank in (0, 1, 7)]
    [True, False, True]
    """
    (draft,) = draft_row_with_owners(topology, collective, [owners], num_atoms=num_atoms, flow=flow, planner=planner)
    return draft


def draft_row_with_owners(
    topology: Topology,
    collective: Collective,
    owners_in_row: Sequence[Owners],
    *,
    num_atoms: int | None = None,
    flow: Flow | None = None,
    planner: str = "flow",
) -> list[Draft]:
    """Draw as many, for buffers that follow each other: what links carry follows the least time for all together.

    Weights count the same in all of them; ``num_atoms`` is for each. The rest is as with :func:`draft_with_owners`.
    """
    for owners in owners_in_row:
        _check_owners(topology, collective, owners)
    speakers, among = topology.speakers, speaking(topology)
    place = {rank: number for number, rank in enumerate(speakers)}
    row = [[(place[rank], weight) for rank, weight in owners if weight > 0] for owners in owners_in_row]
    if flow is None:
        flow = _flow_for(among, collective, [run for runs in row for run in runs])
    atoms_in_row = [_cut(runs, num_atoms or 4 * len(speakers)) for runs in row]
    trees = _InTrees(among, collective, flow, [atom for atoms in atoms_in_row for atom in atoms])
    drafts = []
    for atoms in atoms_in_row:
        scatter = trees.draw(atoms)
        if topology.gateways:
            scatter = _through_gateways(scatter, speakers, topology.gateways, len(atoms))
        drafts.append(
            Draft(
                collective=collective,
                num_ranks=topology.num_ranks,
                cuts=lowest_terms([0, *accumulate(atom.size for atom in atoms)]),
                transfers=scatter.reversed() if collective is Collective.ALL_GATHER else scatter,
                owners=np.array([speakers[atom.owner] for atom in atoms], dtype=np.int32),
                planner=planner,
            )
        )
    return drafts


def weights_of_shares(parts: Sequence[float], limits: Sequence[float]) -> list[int]:
    """Round shares to integers that sum to the resolution, none above its limit while there is room below others."""
    if max(parts) - min(parts) < 1 / RESOLUTION:
        return [1] * len(parts)
    scaled = [part * RESOLUTION for part in parts]
    weights = [math.floor(part + _ROUNDING) for part in scaled]
    room = [limit * RESOLUTION - weight + _ROUNDING >= 1 for limit, weight in zip(limits, weights, strict=True)]
    order = sorted(range(len(parts)), key=lambda rank: (not room[rank], round(weights[rank] - scaled[rank], 3), rank))
    for rank in order[: RESOLUTION - sum(weights)]:
        weights[rank] += 1
    return weights


def _flow_for(topology: Topology, collective: Collective, owners: Owners) -> Flow:
    total = sum(weight for _, weight in owners)
    shares = np.bincount([rank for rank, _ in owners], [weight / total for _, weight in owners], topology.num_ranks)
    return solve_step_flow(topology, [(share, share) for share in shares.tolist()], halves=[collective]).halves[0]


def _through_gateways(
    scatter: Transfers, speakers: Sequence[int], gateways: Mapping[int, int], num_atoms: int
) -> Transfers:
    """Return the same with the numbers of all ranks, after those behind gateways have sent everything to theirs."""
    numbers = np.array(speakers)
    renumbered = replace(scatter.shifted(1), src=numbers[scatter.src], dst=numbers[scatter.dst])
    first = Transfers.of([Transfer(0, rank, gateway, 0, num_atoms, True) for rank, gateway in gateways.items()])
    return Transfers.concatenate([first, renumbered])


def _check_owners(topology: Topology, collective: Collective, owners: Owners) -> None:
    if collective not in STEP:
        raise ScheduleError(f"owners matter to reduce_scatter and all_gather, not to {collective}; take plan_tree")
    behind = [rank for rank, weight in owners if weight > 0 and rank in topology.gateways]
    if behind:
        raise ScheduleError(
            f"rank {behind[0]} speaks to its gateway, rank {topology.gateways[behind[0]]}, alone and owns nothing; "
            "let the gateway own it"
        )
    wrong = [(rank, weight) for rank, weight in owners if not 0 <= rank < topology.num_ranks or weight < 0]
    if wrong or not any(weight for _, weight in owners):
        raise ScheduleError(
            f"owners are pairs of a rank from 0 to {topology.num_ranks - 1} and a weight of at least 0, not all 0; "
            f"not {(wrong or list(owners))[:8]}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Atom:
    owner: int
    size: int
    place: float
    """How far it is from the beginning of its owner's range, as a part of it."""


def _cut(runs: Owners, num_atoms: int) -> list[_Atom]:
    total, atoms = sum(weight for _, weight in runs), []
    for rank, weight in runs:
        count = min(_FINENESS, max(1, round(weight * num_atoms / total)))
        bounds = [weight * _FINENESS * number // count for number in range(count + 1)]
        atoms += [
            _Atom(owner=rank, size=bounds[number + 1] - bounds[number], place=number / count) for number in range(count)
        ]
    return atoms


class _InTrees:
    """Draws the trees of some of its ``atoms`` after those of others."""

    def __init__(self, topology: Topology, collective: Collective, flow: Flow, atoms: Sequence[_Atom]) -> None:
        nodes = tuple(branch_of(topology, swapped=collective is Collective.ALL_GATHER).walk())
        number = {id(branch): place for place, branch in enumerate(nodes)}
        self._num_ranks = topology.num_ranks
        self._children = [[number[id(child)] for child in branch.children] for branch in nodes]
        self._rank = [branch.ranks[0] for branch in nodes]
        self._nodes_above = {
            rank: frozenset(place for place, branch in enumerate(nodes) if rank in branch.ranks)
            for rank in {atom.owner for atom in atoms}
        }
        of_rank = Counter[int]()
        for atom in atoms:
            of_rank[atom.owner] += atom.size
        owned = [sum(of_rank[rank] for rank in branch.ranks) for branch in nodes]
        self._balances = _Balances(self._children, flow, owned, of_rank)
        self._goes_to: dict[int, int] = {}

    def draw(self, atoms: Sequence[_Atom]) -> Transfers:
        """Return the reduce-scatter of ``atoms``; within a step each rank sends first to the next one.

        Those at the same place of their owners' ranges are drawn one after another.
        """
        order = sorted(range(len(atoms)), key=lambda index: (atoms[index].place, index))
        columns = np.concatenate([self._draw_atom(atoms[index], index) for index in order], axis=1)
        step, src, dst, first = columns
        place = np.lexsort((first, (dst - src) % self._num_ranks, step))
        rows = Transfers(
            step=step[place],
            src=src[place],
            dst=dst[place],
            first=first[place],
            last=first[place] + 1,
            add=np.ones(len(place), dtype=np.bool_),
        )
        return rows.merged()

    def _draw_atom(self, atom: _Atom, index: int) -> npt.NDArray[np.int64]:
        """Return the columns step, source, destination and atom of one atom's in-tree."""
        self._goes_to = {}
        self._balances.begin(self._nodes_above[atom.owner], atom)
        self._visit(0, 0)
        steps = _steps(self._goes_to)
        rows = [(step, src, self._goes_to[src], index) for src, step in steps.items()]
        return np.array(rows, dtype=np.int64).reshape(-1, 4).T

    def _visit(self, node: int, coming: int) -> _Joined:
        """Join the ranks below a node; ``coming`` messages come to them from outside."""
        children = self._children[node]
        if not children:
            return _Joined(self._rank[node], [self._rank[node]] * coming)
        if len(children) == 1:
            return self._visit(children[0], coming)
        first, counts = self._balances.apportion(node, children, coming + len(children) - 1)
        return self._join([self._visit(child, counts.get(child, 0)) for child in children], first, coming)

    def _join(self, parts: Sequence[_Joined], first: int, coming: int) -> _Joined:
        """Let all parts but one send to that one, or to one that does; keep places for messages from outside."""
        root = parts[first]
        kept = min(coming, len(root.places) - 1)
        free = deque(root.places[kept:])
        others = [parts[(first + offset) % len(parts)] for offset in range(1, len(parts))]
        for part in sorted(others, key=lambda part: -len(part.places)):
            self._goes_to[part.sender] = free.popleft()
            free.extend(part.places)
        return _Joined(root.sender, [*root.places[:kept], *free])


class _Joined(NamedTuple):
    """Ranks that are joined: the one that sends their sum, and for each message from outside who takes it."""

    sender: int
    places: list[int]


class _Balances:
    """What each child should have had of the atoms so far, less what it had; in units of 1 / RESOLUTION.

    Elements that are owned elsewhere may come to any child; of those that are owned below a parent some make a detour
    by way of siblings of the owner's branch.
    """

    def __init__(
        self, children: Sequence[Sequence[int]], flow: Flow, owned: Sequence[int], of_rank: Mapping[int, int]
    ) -> None:
        whole = owned[0]
        self._sibling, self._outside = [0] * len(owned), [0] * len(owned)
        for node, below in enumerate(children):
            for child in below:
                self._sibling[child] = _rate(flow.sibling[child], owned[node] - owned[child], whole)
                self._outside[child] = _rate(flow.outside[child], whole - owned[node], whole)
        self._detours = {
            (node, owner): _rate(messages, of_rank.get(owner, 0), whole)
            for (node, owner), messages in flow.detours.items()
        }
        self._had_as_sibling, self._had_from_outside = [0] * len(owned), [0] * len(owned)
        self._due, self._due_of_all = Counter[tuple[int, int]](), Counter[int]()
        self._seen = [0] * len(owned)
        self._above: frozenset[int] = frozenset()
        self._size = 0
        self._owner = 0

    def begin(self, nodes_above: frozenset[int], atom: _Atom) -> None:
        """Take the next atom, whose owner is below these nodes."""
        self._above, self._size, self._owner = nodes_above, atom.size, atom.owner
        for node in nodes_above:
            self._seen[node] += atom.size

    def apportion(self, node: int, children: Sequence[int], total: int) -> tuple[int, dict[int, int]]:
        """Divide ``total`` messages among children; return the place of the one that the others send to, and all."""
        if node in self._above:
            return self._apportion_own(node, children, total)
        seen, had = self._seen[0] - self._seen[node], self._had_from_outside
        first = max(
            range(len(children)), key=lambda place: _urgency(seen, self._outside[children[place]], had[children[place]])
        )
        had[children[first]] += total * self._size * RESOLUTION
        return first, {children[first]: total}

    def _apportion_own(self, node: int, children: Sequence[int], total: int) -> tuple[int, dict[int, int]]:
        first = next(place for place, child in enumerate(children) if child in self._above)
        num_detours = self._take_detours(node, total - 1)
        counts = {children[first]: total - num_detours}
        if not num_detours:
            return first, counts
        unit, had = self._size * RESOLUTION, self._had_as_sibling
        others = [child for child in children if child != children[first]]
        urgencies = {
            child: _urgency(self._seen[node] - self._seen[child], self._sibling[child], had[child]) for child in others
        }
        chosen = sorted(others, key=urgencies.__getitem__, reverse=True)[: counts[children[first]]]
        queue = [(not urgencies[child][0], -urgencies[child][1], child) for child in chosen]
        heapq.heapify(queue)
        for _ in range(num_detours):
            is_avoided, had_less, other = queue[0]
            heapq.heapreplace(queue, (is_avoided, had_less + unit, other))
            counts[other] = counts.get(other, 0) + 1
            had[other] += unit
        return first, counts

    def _take_detours(self, node: int, most: int) -> int:
        """Return how many of an atom's messages make a detour at a parent.

        What is rounded off is made good by the next atoms, first by those of other owners where either way is as near.
        """
        wanted = self._detours[node, self._owner]
        if not wanted:
            return 0
        unit = self._size * RESOLUTION
        due = self._due[node, self._owner] + self._size * wanted
        due_of_all = self._due_of_all[node] + self._size * wanted
        whole, quarters = due // unit, 4 * due % (4 * unit) // unit
        is_more = quarters == 3 or (quarters > 0 and 2 * (due_of_all - whole * unit) >= unit)
        num_detours = min(most, max(0, whole + is_more))
        self._due[node, self._owner] = due - num_detours * unit
        self._due_of_all[node] = due_of_all - num_detours * unit
        return num_detours


def _urgency(seen: int, rate: int, had: int) -> tuple[bool, int]:
    """Return what orders children that may take messages: those that are to have none come last."""
    return rate > 0, seen * rate - had


def _rate(messages: float, owned: int, whole: int) -> int:
    """Return how many messages that is for an element of those that are owned there, in units of 1 / RESOLUTION."""
    return round(messages * whole / owned * RESOLUTION) if owned else 0


def _steps(goes_to: Mapping[int, int]) -> dict[int, int]:
    """Return for each rank the first step in which it may send: after all that come to it."""
    waiting = Counter(goes_to.values())
    steps = dict.fromkeys(goes_to, 0)
    ready = [rank for rank in goes_to if not waiting[rank]]
    for rank in ready:
        peer = goes_to[rank]
        waiting[peer] -= 1
        if peer not in steps:
            continue
        steps[peer] = max(steps[peer], steps[rank] + 1)
        if not waiting[peer]:
            ready.append(peer)
    return steps
