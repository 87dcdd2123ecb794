"""Clusters made anew: who tells what of its machine, and what the one who proposes makes of it.

The protocol hands measurements to the servers and makes one server's proposal part of what is agreed at a term's end
(`outer_round`); so ranks need not hear the same measurements, nor round alike, to go on with the same clusters.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from syncline.errors import ConfigurationError
from syncline.machines.clustering import keep_numbers, reconsider
from syncline.machines.features import Feature
from syncline.machines.inventory import Inventory
from syncline.updates.clustered.grouping import Clusters, ranks_of
from syncline.updates.clustered.messages import Measurement

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouping:
    """What clusters are made anew from, and how."""

    inventory: Inventory
    num_clusters: int | None
    seed: int

    def propose(
        self, clusters: Clusters, measurements: Mapping[int, Measurement], *, living: Collection[int]
    ) -> Clusters:
        """Return the clusters that the ranks' measurements make, if they are clearly better than ``clusters``; or none.

        Hosts of which no rank is among the ``living`` are not compared; their ranks stay in the cluster of that number.
        """
        told = {rank: dict(measurement) for rank, measurement in measurements.items() if rank in living}
        if not told:
            return ()
        topology, newer = self.inventory.topology, self._of_hosts(told)
        cluster_of = {rank: number for number, ranks in enumerate(clusters) for rank in ranks}
        hosts = [host for host in topology.hosts if any(rank.rank in living for rank in host.ranks)]
        labels = [cluster_of[host.ranks[0].rank] for host in hosts]
        try:
            table = self.inventory.table(newer, hosts=[host.name for host in hosts])
            found = reconsider(table.vectors, labels, num_clusters=self.num_clusters, seed=self.seed)
        except ConfigurationError as error:  # what divided the machines at the start may not divide them now
            _log.warning("clusters stay as they are: %s", error)
            return ()
        if found is None:
            return ()
        proposed = _with_the_dead(keep_numbers(ranks_of(hosts, found.clusters), clusters), cluster_of)
        _log.info("new clusters: ranks %s in place of %s (%s)", proposed, clusters, found.reason)
        return proposed

    def _of_hosts(self, features: Mapping[int, Mapping[str, Feature]]) -> dict[str, Mapping[str, Feature]]:
        """Return what the first rank of each host that told anything told of it."""
        told = {
            host.name: [features[rank.rank] for rank in host.ranks if rank.rank in features]
            for host in self.inventory.topology.hosts
        }
        return {name: measurements[0] for name, measurements in told.items() if measurements}


def _with_the_dead(clusters: Clusters, cluster_of: Mapping[int, int]) -> Clusters:
    """Return ``clusters`` with the ranks that are in none: the protocol knows each rank's cluster, dead or not."""
    placed = {rank for ranks in clusters for rank in ranks}
    ranks_of_cluster = [list(ranks) for ranks in clusters]
    for rank, number in cluster_of.items():
        if rank not in placed:
            ranks_of_cluster[number if number < len(clusters) else 0].append(rank)
    return tuple(tuple(sorted(ranks)) for ranks in ranks_of_cluster)
