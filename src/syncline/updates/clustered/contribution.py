"""What clusters are worth to one another, and the mean that comes of it.

    C(t) = b C(t-1) + (1-b) max(0, cos(g_k, g_c))        of cluster k to cluster c, from past periods only
    w_k  = max(w_min, C_k / max C)                       over the other clusters
    mean = (n_c g_c + sum_k n_k w_k g_k) / (n_c + sum_k n_k w_k)

with n the samples of a cluster. With w = 1, as everywhere but in `Clustered.literal()`, the mean is that of
synchronous training.
Where nothing is known yet (all C = 0), w = 1.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from syncline.updates.flat import Vector, VectorShape, combine, shares

Floats = NDArray[np.float64]

DECAY = 0.9
MIN_WEIGHT = 0.1


class Contributions:
    """The table C [to, from], and the means that follow from it; the same on all ranks, which see all vectors.

    What clusters bring goes into one mean of all, in which each has a place of its own. Clusters that were made anew
    keep the number of the one that they are most like; those with new numbers have contributed nothing.
    """

    def __init__(self, shape: VectorShape) -> None:
        self.table = np.zeros((0, 0))
        self._shape = shape

    def bring(self, vector: Vector, cluster: int, num_clusters: int) -> Vector:
        """Return what ``cluster`` brings: ``vector`` at its place, among as many of zeros."""
        brought = self._shape.times(num_clusters).zeros()
        brought.piece(self._shape, cluster).add(vector)
        return brought

    def weigh(self, mean: Vector, samples: Sequence[float], cluster: int) -> Vector:
        """Take the mean of what all brought, by samples; return that of ``cluster``, by past contributions too."""
        self.table = resized(self.table, len(samples))
        present = [number for number, amount in enumerate(samples) if amount > 0]
        vectors = [mean.piece(self._shape, number).copy() for number in range(len(samples))]
        of_clusters = shares(samples)
        for number in present:
            vectors[number].scale(1.0 / of_clusters[number])
        mixed = mixing_shares(samples, mixing_weights(self.table, cluster, present))
        gram = np.array([[one.dot(other) for other in vectors] for one in vectors])
        self.table = update_contributions(self.table, gram, present)
        return combine(vectors, mixed.tolist())


def resized(table: Floats, size: int) -> Floats:
    """Return a table for ``size`` clusters, with what ``table`` says of them."""
    found = np.zeros((size, size))
    kept = min(size, len(table))
    found[:kept, :kept] = table[:kept, :kept]
    return found


def update_contributions(
    contributions: Floats, gram: Floats, present: Collection[int], *, decay: float = DECAY
) -> Floats:
    """Return the table [to, from] after a period. ``gram`` holds the inner products of the clusters' vectors.

    Clusters that were not ``present`` keep what they had.
    """
    lengths = np.sqrt(np.diag(gram))
    products = np.outer(lengths, lengths)
    cosines = np.divide(gram, products, out=np.zeros_like(gram), where=products > 0)
    updated = contributions.copy()
    indices = np.ix_(sorted(present), sorted(present))
    updated[indices] = decay * contributions[indices] + (1 - decay) * np.clip(cosines[indices], 0.0, 1.0)
    np.fill_diagonal(updated, 0.0)
    return updated


def mixing_weights(
    contributions: Floats, cluster: int, present: Collection[int], *, min_weight: float = MIN_WEIGHT
) -> Floats:
    """Return w of every cluster to ``cluster``: 1 for itself, 0 for those that are not ``present``."""
    weights = np.zeros(len(contributions))
    others = [number for number in present if number != cluster]
    highest = max((contributions[cluster, number] for number in others), default=0.0)
    for number in others:
        weights[number] = max(min_weight, contributions[cluster, number] / highest) if highest > 0 else 1.0
    weights[cluster] = 1.0
    return weights


def mixing_shares(samples: Sequence[float], weights: Floats) -> Floats:
    """Return the share of each cluster in the mean; they sum to 1 (all zero if there are no samples at all)."""
    amounts = np.asarray(samples, dtype=np.float64) * weights
    total = amounts.sum()
    return amounts / total if total > 0 else np.zeros_like(amounts)
