"""The latency of each link, from how long a packet takes from host to host and back.

A round trip crosses each link of its route twice. As many equations as there are pairs of hosts give the links, by
least squares, none of them below zero. Where only the sum of two links shows (each of two racks has one, and all that
leaves one enters the other) both get half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from syncline.discovery.tree_search import Flow, Set
from syncline.fabric.sizing import FAR_S
from syncline.topology import Host, Switch, Topology
from syncline.topology.tree import relinked

LEAST_S = 0.5e-3
"""Of a link; less is that of switches and hosts, which a message costs anyway."""
_DIGITS = 4
"""Seconds are told to a tenth of a millisecond."""


def sites_of(num_hosts: int, round_trips: Mapping[Flow, float]) -> list[Set]:
    """Return sets of hosts that are near each other, or near others that are: what is not known is taken for near."""
    sites = {host: frozenset((host,)) for host in range(num_hosts)}
    for (one, other), seconds in round_trips.items():
        if seconds < FAR_S and sites[one] != sites[other]:
            both = sites[one] | sites[other]
            sites |= dict.fromkeys(both, both)
    return sorted(set(sites.values()), key=min)


def with_latencies(topology: Topology, ranks: Sequence[int], round_trips: Mapping[Flow, float]) -> Topology:
    """Return ``topology`` with the latencies that explain ``round_trips`` (s); ``ranks[k]`` is a rank of host k."""
    links = {name: link for name, link in topology.links() if isinstance(topology.node(name), Switch | Host)}
    columns = {name: column for column, name in enumerate(links)}
    flows = [flow for flow in round_trips if flow[0] < flow[1]]
    crosses = np.zeros((len(flows), len(links)))
    for row, (one, other) in enumerate(flows):
        route = topology.route(ranks[one], ranks[other])
        crosses[row, [columns[each.child] for each in route if each.child in columns]] = 2.0
    found = _least_squares(crosses, np.array([round_trips[flow] for flow in flows])).tolist()
    latencies = {name: round(found[column], _DIGITS) for name, column in columns.items() if found[column] >= LEAST_S}
    new = {name: replace(link, latency_s=latencies.get(name, 0.0)) for name, link in links.items()}
    return replace(topology, root=relinked(topology.root, new))


def _least_squares(crosses: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return what is nearest, and nowhere below zero: what would be is left out, the lowest first."""
    found = np.zeros(crosses.shape[1])
    used = np.flatnonzero(crosses.any(axis=0))
    while len(used):
        values = np.linalg.lstsq(crosses[:, used], seconds, rcond=None)[0]
        if values.min() >= 0.0:
            found[used] = values
            break
        used = np.delete(used, values.argmin())
    return found
