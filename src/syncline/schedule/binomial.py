"""The binomial planner: a broadcast in ceil(log2 N) steps, for messages so small that latency is all that counts.

In each step everyone who has the data sends it to the middle of the ranks that it still answers for, counted in the
order of the tree's leaves, the root's branch first: so halves lie close together and few messages cross an uplink. A
rank sends up to S log2 N bytes. Complexity: O(N) transfers.
"""

from __future__ import annotations

import numpy as np

from syncline.schedule.draft import UNOWNED, Collective, Draft
from syncline.schedule.ownership import Target
from syncline.schedule.ring import ranks_from
from syncline.schedule.transfers import Transfer, Transfers
from syncline.topology import Topology


def draft_binomial(
    topology: Topology,
    collective: Collective,  # the planners of the registry have one signature
    *,
    target: Target = "balanced",  # noqa: ARG001
    root: int = 0,
) -> Draft:
    """Draw a broadcast from ``root`` along a binomial tree."""
    order = ranks_from(topology, root)
    rows: list[Transfer] = []
    groups, step = [(0, len(order))], 0
    while groups := [group for group in groups if group[1] - group[0] > 1]:
        middles = [(start + stop + 1) // 2 for start, stop in groups]
        rows += [
            Transfer(step, order[start], order[middle], 0, 1, False)
            for (start, _), middle in zip(groups, middles, strict=True)
        ]
        groups = [
            half
            for (start, stop), middle in zip(groups, middles, strict=True)
            for half in ((start, middle), (middle, stop))
        ]
        step += 1
    return Draft(
        collective=collective,
        num_ranks=len(order),
        cuts=(0, 1),
        transfers=Transfers.of(rows),
        owners=np.array([UNOWNED], dtype=np.int32),
        planner="binomial",
        root=root,
    )
