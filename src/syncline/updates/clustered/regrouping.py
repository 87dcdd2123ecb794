"""Clusters made anew: who tells what of its machine, and what the one who proposes makes of it.

The protocol hands readings to the servers and makes one server's proposal part of what is agreed at a term's end
(`council`); so ranks need not hear the same readings, nor round alike, to go on with the same clusters.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from syncline.errors import ConfigurationError
from syncline.machines.clustering import keep_numbers, reconsider
from syncline.machines.features import Feature
from syncline.machines.survey import Survey
from syncline.updates.clustered.grouping import Clusters, ranks_of
from syncline.updates.clustered.messages import NO_PROPOSAL, Proposal, Reading
from syncline.updates.clustered.moving import can_move

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouping:
    """What clusters are made anew from, and how."""

    survey: Survey
    num_clusters: int | None
    seed: int

    def propose(self, clusters: Clusters, readings: Mapping[int, Reading]) -> Proposal:
        """Return the clusters that the ranks' readings make, if they are clearly better than ``clusters``."""
        told = {rank: dict(reading) for rank, reading in readings.items()}
        state = tuple(sorted({name for reading in told.values() for name in reading["state"]}))
        if not told or not can_move(state):
            return NO_PROPOSAL
        topology = self.survey.topology
        newer = self._of_hosts({rank: dict(reading["features"]) for rank, reading in told.items()})
        cluster_of = {rank: number for number, ranks in enumerate(clusters) for rank in ranks}
        labels = [cluster_of[host.ranks[0].rank] for host in topology.hosts]
        table = self.survey.table(newer)
        try:
            found = reconsider(table.vectors, labels, num_clusters=self.num_clusters, seed=self.seed)
        except ConfigurationError as error:  # what divided the machines at the start may not divide them now
            _log.warning("clusters stay as they are: %s", error)
            return NO_PROPOSAL
        if found is None:
            return NO_PROPOSAL
        proposed = keep_numbers(ranks_of(topology, found.clusters), clusters)
        _log.info("new clusters: ranks %s in place of %s (%s)", proposed, clusters, found.reason)
        return Proposal(clusters=proposed, state=state)

    def _of_hosts(self, features: Mapping[int, Mapping[str, Feature]]) -> dict[str, Mapping[str, Feature]]:
        """Return what the first rank of each host that told anything told of it."""
        told = {
            host.name: [features[rank.rank] for rank in host.ranks if rank.rank in features]
            for host in self.survey.topology.hosts
        }
        return {name: readings[0] for name, readings in told.items() if readings}


def reading_of(features: Mapping[str, Feature], state: Sequence[str]) -> Reading:
    """Return what a rank tells: its machine's features over past periods, and the names of its optimizer state."""
    return (("features", tuple(sorted(features.items()))), ("state", tuple(state)))
