"""The choice of a schedule where nothing is known of the network between hosts.

One switch is supposed, with equal links. If that is wrong, hosts that follow each other in the order of their ranks
share a slower link: racks are numbered one after another. So of the schedules that would take about as long as the
fastest on one switch, that is taken which puts the least on the link between any first hosts and the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from syncline.schedule.cost import Predicted
from syncline.schedule.draft import Draft
from syncline.schedule.traffic import Floats, shares
from syncline.topology import Link, Topology
from syncline.topology.tree import relinked

T = TypeVar("T", Draft, tuple[Draft, Draft])

SUPPOSED_BYTES_PER_S = 125e6
"""Of each host's link: 1 Gbit/s. Only which schedules are about equally fast depends on it."""
MAY_LOSE = 1.05
"""How much longer a schedule may take than the fastest, if one switch is right."""


def supposed_network(topology: Topology) -> Topology:
    """Return ``topology``, with rates where nothing is known of it."""
    if not topology.is_unknown:
        return topology
    link = Link.symmetric(SUPPOSED_BYTES_PER_S)
    return Topology(name=topology.name, root=relinked(topology.root, {host.name: link for host in topology.hosts}))


def safest(candidates: Iterable[tuple[T, Predicted]], topology: Topology) -> T:
    """Return what loads the link between neighbours least, of what takes about as long as the fastest."""
    given = list(candidates)
    allowed_s = min(prediction.time_s for _, prediction in given) * MAY_LOSE
    near = [one for one in given if one[1].time_s <= allowed_s]
    return min(near, key=lambda one: (round(most_across(one[0], topology), 6), one[1].time_s))[0]


def most_across(drafts: Draft | tuple[Draft, Draft], topology: Topology) -> float:
    """Return the most that crosses between some first hosts and the others, as a part of the data.

    Both directions count by themselves. What follows each other, as the halves of a step, adds up.
    """
    place = {host.name: index for index, host in enumerate(topology.hosts)}
    host_of = np.array([place[topology.host_of(rank).name] for rank in range(topology.num_ranks)])
    each = [_across(draft, host_of) for draft in (drafts if isinstance(drafts, tuple) else (drafts,))]
    return float(np.sum(each, axis=0).max(initial=0.0))


def _across(draft: Draft, host_of: npt.NDArray[np.int64]) -> Floats:
    """Return what crosses at each place, in the direction in which it is more."""
    source, target, moved = host_of[draft.transfers.src], host_of[draft.transfers.dst], shares(draft)
    ways = []
    for low, high in ((source, target), (target, source)):
        crosses = low < high
        begins, ends = (
            np.bincount(at[crosses], moved[crosses], minlength=int(host_of.max()) + 1) for at in (low, high)
        )
        ways.append(np.cumsum(begins - ends)[:-1])
    most: Floats = np.maximum(*ways)
    return most
