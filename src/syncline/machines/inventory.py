"""The inventory: what the topology says of all hosts, what they measured, and which of them are alike by both.

What the topology file says goes before what was measured; what was measured later goes before what was measured first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from syncline.machines.clustering import Clustering, cluster_vectors
from syncline.machines.features import (
    LATENCY,
    LATER,
    Features,
    FeatureTable,
    build_table,
    topology_features,
    topology_latencies,
)
from syncline.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """All that is known of the hosts of a topology, and which of it counts.

    ``use`` names the features that count (default: all), ``weights`` how much (default: 1 each).
    """

    topology: Topology
    measured: Mapping[str, Features] = field(default_factory=dict)
    """By host."""
    use: Sequence[str] | None = None
    weights: Mapping[str, float] | None = None

    def table(
        self, newer: Mapping[str, Features] | None = None, *, hosts: Collection[str] | None = None
    ) -> FeatureTable:
        """Return the features as columns; ``newer`` is what hosts measured since; ``hosts`` those that are compared."""
        compared = [place for place, host in enumerate(self.topology.hosts) if hosts is None or host.name in hosts]
        told_of_all = list(topology_features(self.topology).items())
        merged: dict[str, Features] = {}
        for place in compared:
            host, told = told_of_all[place]
            merged[host] = dict(self.measured.get(host, {})) | dict((newer or {}).get(host, {})) | told
        says_nothing = {name for name in LATER if not any(name in features for features in merged.values())}
        latencies_s = topology_latencies(self.topology)
        if latencies_s is not None:
            latencies_s = latencies_s[np.ix_(compared, compared)]
            between = latencies_s[~np.eye(len(compared), dtype=bool)]
            if between.size == 0 or np.allclose(between, between[0]):  # of equal ones each host would be a kind
                latencies_s = None
                says_nothing.add(LATENCY)
        return build_table(
            merged,
            latencies_s=latencies_s,
            use=None if self.use is None else [name for name in self.use if name not in says_nothing],
            weights={name: weight for name, weight in (self.weights or {}).items() if name not in says_nothing},
        )

    def divide(self, *, num_clusters: int | None = None, seed: int = 0) -> tuple[FeatureTable, Clustering]:
        """Return the features and the clusters that they make."""
        table = self.table()
        return table, cluster_vectors(table.vectors, num_clusters=num_clusters, seed=seed)
