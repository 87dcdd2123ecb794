"""What clusters are worth to one another, and the mean that comes of it.

    C(t) = b C(t-1) + (1-b) max(0, cos(g_k, g_c))        of cluster k to cluster c, from past periods only
    w_k  = max(w_min, C_k / max C)                       over the other clusters
    mean = (n_c g_c + sum_k n_k w_k g_k) / (n_c + sum_k n_k w_k)

with n the samples of a cluster. With w = 1, as everywhere but in `Clustered.literal()`, the mean is that of
synchronous training.
Where nothing is known yet (all C = 0), w = 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DECAY = 0.9
MIN_WEIGHT = 0.1


def resized(flat: Sequence[float], size: int) -> Floats:
    """Return a table that is given row by row for ``size`` clusters; those with new numbers have contributed nothing.

    Clusters that were made anew keep the number of the one that they are most like.
    """
    old_size = math.isqrt(len(flat))
    table = np.zeros((size, size))
    kept = min(size, old_size)
    table[:kept, :kept] = np.array(flat, dtype=np.float64).reshape(old_size, old_size)[:kept, :kept]
    return table


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
