"""Who is in which cluster: from what the topology says and what every machine measured, decided by rank 0 for all.

Rank 0 decides, since k-means may end otherwise on a machine that rounds otherwise. What the network is like the
topology says: that of a file, or the one that the job measured when it started.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

from syncline.arguments import Count, Whole
from syncline.errors import ConfigurationError
from syncline.machines.inventory import Inventory
from syncline.topology import Host
from syncline.updates.control import ControlStream

_log = logging.getLogger(__name__)

Clusters = tuple[tuple[int, ...], ...]
ClusterChoice = Annotated[
    Literal["auto"] | Count | Sequence[Sequence[Whole]], '"auto", how many, or the ranks of each cluster'
]


def measure_hosts(
    control: ControlStream, wanted: Inventory, *, read: Callable[[], Mapping[str, float]] | None
) -> Inventory:
    """Return ``wanted`` with what all hosts measure, the same on every rank; every rank calls it.

    ``read`` returns the features of the machine that it is called on; without it nothing is measured.
    """
    topology = wanted.topology
    if read is None:
        return wanted
    is_first_of_host = topology.host_of(control.rank).ranks[0].rank == control.rank
    gathered = control.all_gather(dict(read()) if is_first_of_host else {}, "features of the machines")
    measured = {host.name: gathered[host.ranks[0].rank] for host in topology.hosts}
    return replace(wanted, measured=measured)


def agree_on_clusters(control: ControlStream, inventory: Inventory, *, clusters: ClusterChoice, seed: int) -> Clusters:
    """Return the ranks of each cluster, the same on every rank; every rank calls it, and raises what rank 0 does."""
    if not isinstance(clusters, str | int):
        return check_clusters(clusters, inventory.topology.num_ranks)
    decided: tuple[Clusters, str | None] = ((), None)
    if control.rank == 0:
        try:
            decided = group(inventory, clusters=clusters, seed=seed), None
        except ConfigurationError as error:
            decided = (), str(error)
    found, error_text = control.all_gather(decided, "clusters")[0]
    if error_text is not None:
        raise ConfigurationError(error_text)
    return tuple(tuple(ranks) for ranks in found)


def group(inventory: Inventory, *, clusters: Literal["auto"] | int = "auto", seed: int = 0) -> Clusters:
    """Return the ranks of each cluster of like hosts."""
    table, clustering = inventory.divide(num_clusters=None if isinstance(clusters, str) else clusters, seed=seed)
    shown = "; ".join(", ".join(table.hosts[host] for host in hosts) for hosts in clustering.clusters)
    _log.info("clusters of hosts: %s (%s; by %s)", shown, clustering.reason, ", ".join(table.features))
    return ranks_of(inventory.topology.hosts, clustering.clusters)


def ranks_of(hosts: Sequence[Host], clusters: Sequence[Sequence[int]]) -> Clusters:
    """Return the ranks of clusters that are given by their hosts' places in ``hosts``."""
    return tuple(tuple(sorted(rank.rank for place in places for rank in hosts[place].ranks)) for places in clusters)


def check_clusters(clusters: Sequence[Sequence[int]], world_size: int) -> Clusters:
    """Return clusters that the user wrote down; raise unless each rank is in exactly one."""
    given = sorted(rank for ranks in clusters for rank in ranks)
    if given != list(range(world_size)) or not all(clusters):
        shown = [list(ranks) for ranks in clusters]
        raise ConfigurationError(f"clusters must name each of the ranks 0 to {world_size - 1} once, not {shown}")
    return tuple(sorted((tuple(sorted(ranks)) for ranks in clusters), key=lambda ranks: ranks or (math.inf,)))
