"""The ring planner: every rank sends to its neighbour alone, in the order of the tree's leaves.

Reduce-scatter and all-gather take N - 1 steps and put (N - 1)/N S on each rank's link in each direction, twice that
for an all-reduce; because neighbours in the ring are neighbours in the tree, each switch's link carries no more. Good
where ranks are few and messages large; the latency grows with N. A broadcast is a chain from the root: S once on each
link. Complexity: O(N^2) transfers. Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", 2009.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from syncline.schedule.draft import UNOWNED, Collective, Draft
from syncline.schedule.ownership import Target
from syncline.schedule.transfers import Transfer, Transfers
from syncline.topology import Topology
from syncline.topology.tree import ranks_below


def draft_ring(
    topology: Topology,
    collective: Collective,
    *,
    target: Target = "balanced",  # noqa: ARG001  # the planners of the registry have one signature
    root: int = 0,
) -> Draft:
    """Draw a collective on a ring of all ranks; rank k owns [k/N, (k+1)/N) whatever the ``target``."""
    num_ranks = topology.num_ranks
    if collective is Collective.BROADCAST:
        return _draft_chain(ranks_from(topology, root), root)
    order = ranks_below(topology.root)
    scatter, gather = _round(order, behind=1, add=True), _round(order, behind=0, add=False)
    transfers = {
        Collective.REDUCE_SCATTER: [scatter],
        Collective.ALL_GATHER: [gather],
        Collective.ALL_REDUCE: [scatter, gather.shifted(num_ranks - 1)],
    }[collective]
    return Draft(
        collective=collective,
        num_ranks=num_ranks,
        cuts=tuple(range(num_ranks + 1)),
        transfers=Transfers.concatenate(transfers),
        owners=np.arange(num_ranks, dtype=np.int32),
        planner="ring",
    )


def _round(order: Sequence[int], *, behind: int, add: bool) -> Transfers:
    """Go round once: in step s the p-th rank sends on the atom of the rank ``behind`` + s places behind it."""
    ring = np.array(order, dtype=np.int32)
    num_ranks = len(ring)
    position = np.arange(num_ranks)
    step = np.repeat(np.arange(num_ranks - 1, dtype=np.int32), num_ranks)
    src = np.tile(position, num_ranks - 1)
    atom = ring[(src - step - behind) % num_ranks]
    return Transfers(
        step=step,
        src=ring[src],
        dst=ring[(src + 1) % num_ranks],
        first=atom,
        last=atom + np.int32(1),
        add=np.full(len(step), add),
    )


def _draft_chain(order: Sequence[int], root: int) -> Draft:
    rows = [Transfer(step, order[step], order[step + 1], 0, 1, False) for step in range(len(order) - 1)]
    return Draft(
        collective=Collective.BROADCAST,
        num_ranks=len(order),
        cuts=(0, 1),
        transfers=Transfers.of(rows),
        owners=np.array([UNOWNED], dtype=np.int32),
        planner="ring",
        root=root,
    )


def ranks_from(topology: Topology, root: int) -> tuple[int, ...]:
    """Return all ranks depth first, ``root`` first: at each of its ancestors its branch goes before the others."""
    path = topology.path(root)
    order = [root]
    for branch, parent in zip(path, [*path[1:], topology.root], strict=True):
        for child in parent.children:
            if child is not branch:
                order += ranks_below(child)
    return tuple(order)
