"""The binomial planner: a broadcast in ceil(log2 N) steps, for messages so small that latency is all that counts.

In each step everyone who has the data sends it to the middle of the ranks that it still answers for, counted in the
order of the tree's leaves, the root's branch first: so halves lie close together and few messages cross an uplink. A
rank sends up to S log2 N bytes. Complexity: O(N) transfers.
"""

from __future__ import annotations

import numpy as np

from syncline.arguments import checked
from syncline.errors import ScheduleError
from syncline.schedule.draft import UNOWNED, Collective, Draft
from syncline.schedule.ownership import Target
from syncline.schedule.ring import ranks_from
from syncline.schedule.schedule import Schedule
from syncline.schedule.transfers import Transfer, Transfers
from syncline.schedule.verifier import verify
from syncline.topology import Topology


@checked
def plan_binomial(
    topology: Topology, collective: Collective, *, target: Target = "balanced", root: int = 0
) -> Schedule:
    """Plan a broadcast from ``root`` along a binomial tree.

    Cost: ceil(log2 N) steps, in which the root sends S log2 N bytes. O(N) transfers. Raises :class:`ScheduleError` for
    another collective, :class:`TopologyError` for a root that does not exist.

    >>> plan_binomial(Topology.flat(8), Collective.BROADCAST, root=2).num_steps
    3
    """
    return verify(draft_binomial(topology, collective, target=target, root=root))


def draft_binomial(
    topology: Topology,
    collective: Collective,
    *,
    target: Target = "balanced",  # noqa: ARG001  # the planners of the registry have one signature
    root: int = 0,
) -> Draft:
    """Draw what :func:`plan_binomial` verifies."""
    if collective is not Collective.BROADCAST:
        raise ScheduleError(f"binomial plans broadcasts, not {collective}; take plan_recursive_doubling, or plan_tree")
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
