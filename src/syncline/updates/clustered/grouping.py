"""Who is in which cluster: from what the topology says and what every machine measured, decided by rank 0 for all.

Rank 0 decides, since k-means may end otherwise on a machine that rounds otherwise.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from syncline.errors import ConfigurationError
from syncline.machines.clustering import cluster_vectors
from syncline.machines.features import Feature, build_table, topology_features, topology_latencies
from syncline.machines.reading import read_machine
from syncline.topology import Topology
from syncline.updates.control import ControlStream

_log = logging.getLogger(__name__)

Clusters = tuple[tuple[int, ...], ...]
ClusterChoice = Literal["auto"] | int | Sequence[Sequence[int]]


def agree_on_clusters(
    control: ControlStream,
    topology: Topology,
    *,
    clusters: ClusterChoice,
    features: Sequence[str] | None,
    weights: Mapping[str, float] | None,
    measures: bool,
    seed: int,
) -> Clusters:
    """Return the ranks of each cluster, the same on every rank; every rank calls it."""
    if not isinstance(clusters, str | int):
        return check_clusters(clusters, topology.num_ranks)
    is_first_of_host = topology.host_of(control.rank).ranks[0].rank == control.rank
    measured = read_machine() if measures and is_first_of_host else {}
    gathered = control.exchange(measured, "features of the machines")
    decided: Clusters | None = None
    if control.rank == 0:
        of_host = {host.name: gathered[host.ranks[0].rank] for host in topology.hosts}
        decided = group(topology, of_host, clusters=clusters, features=features, weights=weights, seed=seed)
    decisions = control.exchange(decided, "clusters")
    return tuple(tuple(ranks) for ranks in decisions[0])


def group(
    topology: Topology,
    measured: Mapping[str, Mapping[str, Feature]],
    *,
    clusters: Literal["auto"] | int = "auto",
    features: Sequence[str] | None = None,
    weights: Mapping[str, float] | None = None,
    seed: int = 0,
) -> Clusters:
    """Return the ranks of each cluster of like hosts. What the topology file says goes before what was measured."""
    told = topology_features(topology)
    merged = {name: dict(measured.get(name, {})) | features_of for name, features_of in told.items()}
    table = build_table(merged, latencies_s=topology_latencies(topology), use=features, weights=weights)
    number = None if isinstance(clusters, str) else clusters
    clustering = cluster_vectors(table.vectors, num_clusters=number, seed=seed)
    shown = "; ".join(", ".join(table.hosts[host] for host in hosts) for hosts in clustering.clusters)
    _log.info("clusters of hosts: %s (%s; by %s)", shown, clustering.reason, ", ".join(table.features))
    return tuple(
        tuple(sorted(rank for host in hosts for rank in topology.ranks_of(table.hosts[host])))
        for hosts in clustering.clusters
    )


def check_clusters(clusters: Sequence[Sequence[int]], world_size: int) -> Clusters:
    """Return clusters that the user wrote down; raise unless each rank is in exactly one."""
    given = sorted(rank for ranks in clusters for rank in ranks)
    if given != list(range(world_size)) or not all(clusters):
        shown = [list(ranks) for ranks in clusters]
        raise ConfigurationError(f"clusters must name each of the ranks 0 to {world_size - 1} once, not {shown}")
    return tuple(sorted((tuple(sorted(ranks)) for ranks in clusters), key=lambda ranks: ranks or (math.inf,)))
