"""The recursive-doubling planner: few steps, for messages so small that latency is all that counts.

An all-reduce exchanges whole buffers with the rank at distance 1, 2, 4, ...: log2 N steps and S log2 N bytes for each
rank (ranks beyond the largest power of two first hand theirs to a neighbour and get the result back). All ranks add
the same pairs, so all end with the same bits. All-gather is the dissemination of Bruck et al. (1997), which takes
ceil(log2 N) steps for any N and (N - 1)/N S bytes for each rank; a reduce-scatter is its reverse. Distances are
counted in the order of the tree's leaves, so the first exchanges stay inside a host or a rack. Complexity: O(N log N)
transfers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from syncline.schedule.draft import UNOWNED, Collective, Draft
from syncline.schedule.ownership import Target
from syncline.schedule.transfers import Transfer, Transfers
from syncline.topology import Topology
from syncline.topology.tree import ranks_below


def draft_recursive_doubling(
    topology: Topology,
    collective: Collective,
    *,
    target: Target = "balanced",
    root: int = 0,  # noqa: ARG001  # the planners of the registry have one signature
) -> Draft:
    """Draw a reduce-scatter, all-gather or all-reduce in about log2 N steps; in the last, nobody has a part."""
    order = ranks_below(topology.root)
    if collective is Collective.ALL_REDUCE:
        return _draft(collective, order, _exchange_all(order), owners=[UNOWNED])
    owners = range(len(order)) if target == "rank_order" else order
    gather = _disseminate(owners)
    return _draft(collective, owners, _backwards(gather) if collective.adds else gather, owners=owners)


def _draft(collective: Collective, order: Sequence[int], rows: Sequence[Transfer], *, owners: Sequence[int]) -> Draft:
    return Draft(
        collective=collective,
        num_ranks=len(order),
        cuts=tuple(range(len(owners) + 1)),
        transfers=Transfers.of(rows),
        owners=np.array(owners, dtype=np.int32),
        planner="recursive_doubling",
    )


def _exchange_all(order: Sequence[int]) -> list[Transfer]:
    num_active = 1 << (len(order).bit_length() - 1)
    num_folded = len(order) - num_active
    folded = [(order[2 * pair + 1], order[2 * pair]) for pair in range(num_folded)]
    active = [order[2 * pair] for pair in range(num_folded)] + list(order[2 * num_folded :])
    rows = [Transfer(0, extra, keeper, 0, 1, True) for extra, keeper in folded]
    first_step = 1 if folded else 0
    num_doublings = num_active.bit_length() - 1
    for doubling in range(num_doublings):
        for position, rank in enumerate(active):
            rows.append(Transfer(first_step + doubling, rank, active[position ^ (1 << doubling)], 0, 1, True))
    rows += [Transfer(first_step + num_doublings, keeper, extra, 0, 1, False) for extra, keeper in folded]
    return rows


def _disseminate(order: Sequence[int]) -> list[Transfer]:
    """In a step, each rank passes what it has to the rank as far before it as it has pieces."""
    num_ranks, num_held, step = len(order), 1, 0
    rows: list[Transfer] = []
    while num_held < num_ranks:
        num_sent = min(num_held, num_ranks - num_held)
        for position, rank in enumerate(order):
            peer = order[position - num_held]
            stop = position + num_sent
            rows.append(Transfer(step, rank, peer, position, min(stop, num_ranks), False))
            if stop > num_ranks:
                rows.append(Transfer(step, rank, peer, 0, stop - num_ranks, False))
        num_held += num_sent
        step += 1
    return rows


def _backwards(rows: Sequence[Transfer]) -> list[Transfer]:
    last_step = rows[-1].step if rows else 0
    return [Transfer(last_step - row.step, row.dst, row.src, row.first, row.last, True) for row in rows]
