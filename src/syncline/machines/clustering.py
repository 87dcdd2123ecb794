"""Like machines together: k-means over the hosts' vectors, with k by silhouette, and cluster numbers that stay.

k-means is scipy's, started by k-means++ from a seeded generator several times; the tightest result counts. k is the
one with the highest mean silhouette (the smallest of equals); if even that is below 0.5, which Kaufman and Rousseeuw
("Finding Groups in Data", 1990) read as no reasonable structure, all hosts are one cluster.

What is compared is the inventory: what the topology says of all hosts, and what they measured. What the topology file
says goes before what was measured; what was measured later goes before what was measured first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from syncline.errors import ConfigurationError
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

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

REASONABLE_SILHOUETTE = 0.5
MAX_CLUSTERS = 8
NUM_STARTS = 8
CLEARLY_BETTER = 0.1
"""By so much must the silhouette of new clusters be higher, or hosts would move to and fro for what is noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clustering:
    """Which hosts (by index) form each cluster, the mean silhouette of each k that was tried, and why this k."""

    clusters: tuple[tuple[int, ...], ...]
    silhouettes: Mapping[int, float] = field(hash=False)
    reason: str

    @property
    def labels(self) -> tuple[int, ...]:
        """The cluster of each host."""
        of_host = {host: number for number, hosts in enumerate(self.clusters) for host in hosts}
        return tuple(of_host[host] for host in range(len(of_host)))


def cluster_vectors(vectors: Floats, *, num_clusters: int | None = None) -> Clustering:
    """Divide hosts by their vectors (one row each) into ``num_clusters``, or as many as the silhouette says.

    Cost: 8 starts of k-means for each k, and O(hosts^2) for the silhouettes.
    """
    num_hosts = len(vectors)
    if num_clusters is not None and not 1 <= num_clusters <= num_hosts:
        raise ConfigurationError(f"{num_hosts} hosts cannot form {num_clusters} clusters; ask for 1 to {num_hosts}")
    num_distinct = len(np.unique(vectors, axis=0))
    if num_clusters is not None:
        labels = _divide(vectors, min(num_clusters, num_distinct))
        labels = _split_equals(labels, num_clusters)
        silhouettes = {num_clusters: mean_silhouette(vectors, labels)}
        return _clustering(labels, silhouettes, f"k = {num_clusters} was asked for")
    candidates = range(2, min(MAX_CLUSTERS, num_distinct, num_hosts - 1) + 1)
    divided = {k: _divide(vectors, k) for k in candidates}
    silhouettes = {k: mean_silhouette(vectors, labels) for k, labels in divided.items()}
    return _choose(num_hosts, num_distinct, divided, silhouettes)


def reconsider(vectors: Floats, labels: Sequence[int], *, num_clusters: int | None = None) -> Clustering | None:
    """Return other clusters than those that ``labels`` say, if they are clearly better; None to keep these."""
    found = cluster_vectors(vectors, num_clusters=num_clusters)
    old = np.array(labels)
    is_same = len(found.clusters) == len(set(labels)) and all(
        len(set(old[list(hosts)])) == 1 for hosts in found.clusters
    )
    new_silhouette, old_silhouette = mean_silhouette(vectors, np.array(found.labels)), mean_silhouette(vectors, old)
    if is_same or new_silhouette < old_silhouette + CLEARLY_BETTER:
        return None
    reason = f"silhouette {new_silhouette:.3f}, and {old_silhouette:.3f} as they were"
    return Clustering(clusters=found.clusters, silhouettes=found.silhouettes, reason=reason)


def _choose(
    num_hosts: int, num_distinct: int, divided: Mapping[int, Labels], silhouettes: Mapping[int, float]
) -> Clustering:
    alone = np.zeros(num_hosts, dtype=np.int64)
    if not silhouettes:
        why = "all hosts are alike" if num_distinct == 1 else f"{num_hosts} hosts are too few to compare"
        return _clustering(alone, silhouettes, f"k = 1, since {why}")
    best = max(silhouettes, key=lambda k: (round(silhouettes[k], 9), -k))
    score = f"{silhouettes[best]:.3f}"
    if silhouettes[best] < REASONABLE_SILHOUETTE:
        reason = f"k = 1, since the best silhouette ({score}, k = {best}) is below {REASONABLE_SILHOUETTE}"
        return _clustering(alone, silhouettes, reason)
    return _clustering(divided[best], silhouettes, f"k = {best} has the highest silhouette ({score})")


def _clustering(labels: Labels, silhouettes: Mapping[int, float], reason: str) -> Clustering:
    clusters = [tuple(np.flatnonzero(labels == label).tolist()) for label in np.unique(labels)]
    return Clustering(clusters=tuple(sorted(clusters)), silhouettes=dict(silhouettes), reason=reason)


def _divide(vectors: Floats, num_clusters: int) -> Labels:
    """Run k-means several times and return the labels of the tightest result; k is at most the distinct vectors."""
    if num_clusters == 1:
        return np.zeros(len(vectors), dtype=np.int64)
    from scipy.cluster.vq import ClusterError, kmeans2

    generator = np.random.default_rng((0, num_clusters))
    results: list[tuple[float, int, Labels]] = []
    for start in range(NUM_STARTS):
        try:
            centres, labels = kmeans2(vectors, num_clusters, iter=40, minit="++", missing="raise", rng=generator)
        except ClusterError:  # this start left a cluster empty; the others count
            continue
        results.append((float(np.sum((vectors - centres[labels]) ** 2)), start, labels.astype(np.int64)))
    if not results:
        raise ConfigurationError(f"k-means found no {num_clusters} clusters in {NUM_STARTS} starts; ask for fewer")
    return min(results, key=lambda result: result[:2])[2]


def _split_equals(labels: Labels, num_clusters: int) -> Labels:
    """Divide clusters of equal hosts further, largest first, where more clusters were asked for than hosts differ."""
    labels = labels.copy()
    while len(np.unique(labels)) < num_clusters:
        largest = int(np.argmax(np.bincount(labels)))
        members = np.flatnonzero(labels == largest)
        labels[members[len(members) // 2 :]] = labels.max() + 1
    return labels


def mean_silhouette(vectors: Floats, labels: Labels) -> float:
    """Return the mean of (b - a) / max(a, b) over the hosts (Rousseeuw, 1987); a host alone in its cluster counts 0.

    a is a host's mean distance to its own cluster's others, b to the nearest other cluster. One cluster scores 0.
    """
    numbers, sizes = np.unique(labels, return_counts=True)
    if len(numbers) < 2:
        return 0.0
    distances = np.linalg.norm(vectors[:, None, :] - vectors[None, :, :], axis=2)
    members = labels[:, None] == numbers[None, :]
    sums = distances @ members
    size_of_own = sizes[np.searchsorted(numbers, labels)]
    within = sums[members] / np.maximum(size_of_own - 1, 1)
    nearest = np.where(members, np.inf, sums / sizes).min(axis=1)
    larger = np.maximum(within, nearest)
    scores = np.divide(nearest - within, larger, out=np.zeros_like(larger), where=(larger > 0) & (size_of_own > 1))
    return float(scores.mean())


def keep_numbers(
    clusters: Sequence[tuple[int, ...]], previous: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Return ``clusters`` in an order in which each keeps the number of the one before that it is most like.

    The contribution table is by number, so a cluster that merely lost or won a host keeps what is known of it. Numbers
    are 0 to len(clusters) - 1; those that no predecessor claims are given in the order of the lowest host.
    """
    overlaps = sorted(
        (-len(set(now) & set(before)), number, index)
        for index, now in enumerate(clusters)
        for number, before in enumerate(previous)
        if number < len(clusters) and set(now) & set(before)
    )
    number_of: dict[int, int] = {}
    for _, number, index in overlaps:
        if index not in number_of and number not in number_of.values():
            number_of[index] = number
    free = iter(number for number in range(len(clusters)) if number not in set(number_of.values()))
    rest = sorted(
        (index for index in range(len(clusters)) if index not in number_of), key=lambda index: clusters[index]
    )
    number_of |= {index: next(free) for index in rest}
    return tuple(clusters[index] for index in sorted(number_of, key=number_of.__getitem__))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """All that is known of the hosts of a topology, and which of it counts (``use``, as in ``build_table``)."""

    topology: Topology
    measured: Mapping[str, Features] = field(default_factory=dict)
    """By host."""
    use: Sequence[str] = ()

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
        use = [name for name in self.use if name not in says_nothing]
        return build_table(merged, latencies_s=latencies_s, use=use)

    def divide(self, *, num_clusters: int | None = None) -> tuple[FeatureTable, Clustering]:
        """Return the features and the clusters that they make."""
        table = self.table()
        return table, cluster_vectors(table.vectors, num_clusters=num_clusters)
