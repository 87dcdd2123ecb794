"""What a rank makes of its cluster's means: what clusters are worth to one another, and the sum over a period.

    C_ck(t) = b C_ck(t-1) + (1-b) max(0, cos(g_k, g_c))  of cluster k to cluster c, from past periods only
    w_k     = clip(C_ck / C_cc, w_min, 1)                what a cluster is worth beside the own one
    mean = (n_c g_c + sum_k n_k w_k g_k) / (n_c + sum_k n_k w_k)

with n the samples of a cluster. With w = 1, as everywhere but in `Clustered.literal()`, the mean is that of
synchronous training.
Where nothing is known yet (all C = 0), w = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from syncline.updates.flat import Vector, VectorShape, combine, shares

Floats = NDArray[np.float64]

DECAY = 0.9
MIN_WEIGHT = 0.1
MEMORY = 0.9
"""What a sum of the fit keeps when one more period has told."""
NUM_WEIGHTS = 256
"""A learned weight is a multiple of one over this, so that who divides a vector learns the one of who does not."""


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


def update_contributions(contributions: Floats, gram: Floats, present: Collection[int]) -> Floats:
    """Return the table [to, from] after a period. ``gram`` holds the inner products of the clusters' vectors.

    Clusters that were not ``present`` keep what they had.
    """
    lengths = np.sqrt(np.diag(gram))
    products = np.outer(lengths, lengths)
    cosines = np.divide(gram, products, out=np.zeros_like(gram), where=products > 0)
    updated = contributions.copy()
    indices = np.ix_(sorted(present), sorted(present))
    updated[indices] = DECAY * contributions[indices] + (1 - DECAY) * np.clip(cosines[indices], 0.0, 1.0)
    return updated


def mixing_weights(contributions: Floats, cluster: int, present: Collection[int]) -> Floats:
    """Return w of every cluster to ``cluster``: 1 for itself, 0 for those that are not ``present``."""
    weights, own = np.zeros(len(contributions)), contributions[cluster, cluster]
    found = list(present)
    weights[found] = np.clip(contributions[cluster, found] / own, MIN_WEIGHT, 1.0) if own > 0 else 1.0
    weights[cluster] = 1.0
    return weights


def mixing_shares(samples: Sequence[float], weights: Floats) -> Floats:
    """Return the share of each cluster in the mean; they sum to 1 (all zero if there are no samples at all)."""
    amounts = np.asarray(samples, dtype=np.float64) * weights
    total = amounts.sum()
    return amounts / total if total > 0 else np.zeros_like(amounts)


# What a cluster does with its means in a period of several batches, and with what the outer round at the end gave.
#
#     brought    = sum of the cluster's means, which goes to the outer round; its result is R
#     difference = R - brought
#     last step  : mean + difference - what was forecast       so R is the sum of what was stepped on in the period
#
# That is the whole-period correction. With a *forecast*, each further batch steps on mean + w difference / batches: the
# own mean tells what is new, the period before how the mean of all clusters differs from it. So clusters that see
# different data keep to the common way within a period too, and not only at its end. These are the control variates of
# SCAFFOLD (Karimireddy et al., 2020), made of what is exchanged anyway: no traffic, and one more vector.
# The weight w below 1 is for where clusters are many or their rate is high: a forecast as a whole may then swing up.
# Where it is learned it is the least squares fit of each difference by the one before, older ones counting less: near 1
# where clusters see different data, near 0 where differences are noise, or swing; 1 until two periods have told.
# Where no other cluster is left, the outer round has no result: what was forecast in the period is taken back, and
# nothing is forecast any more.


def products_of(now: Vector, before: Vector) -> tuple[float, float]:
    """Return the inner products of ``before`` with both."""
    return now.dot(before), before.dot(before)


class Period:
    """One rank's sum over the batches of a period. All members of a cluster hold the same, to the bit.

    ``forecast_weight``: of what the period before told; with None it is learned from ``products``, which returns the
    inner products of its second vector with both.
    """

    def __init__(
        self,
        *,
        forecast_weight: float | None,
        products: Callable[[Vector, Vector], tuple[float, float]] = products_of,
    ) -> None:
        self._learns = forecast_weight is None
        self._weight = 1.0 if forecast_weight is None else forecast_weight
        self._products = products
        self._product = self._square = 0.0
        self._forecast: Vector | None = None
        """How the mean of all clusters differs from the own one in a batch."""
        self._brought: Vector | None = None
        self._num_means = 0

    def step_on(self, mean: Vector | None) -> Vector | None:
        """Take the mean of a batch that is not the last; return what to step on, None if nobody had data."""
        self._take(mean)
        return mean if mean is None or self._forecast is None else mean.copy().add(self._forecast, factor=self._weight)

    def bring(self, mean: Vector | None) -> Vector | None:
        """Take the mean of the last batch; return what goes to the outer round, None if nobody had data."""
        self._take(mean)
        return self._brought

    def end(self, mean: Vector | None, result: Vector | None) -> Vector | None:
        """Take the outer round's result, None if nobody had data; return what to step on in the last batch."""
        brought, num_means = self._brought, self._num_means
        self._brought, self._num_means = None, 0
        if result is None:
            return self._take_back(mean, num_means)
        difference = result.copy() if brought is None else result.copy().add(brought, factor=-1.0)
        step_on = difference.copy() if mean is None else difference.copy().add(mean)
        if self._forecast is not None:
            step_on.add(self._forecast, factor=-self._weight * (num_means - (mean is not None)))
        step_on.presence.copy_(result.presence if mean is None else result.presence + mean.presence)
        if (self._learns or self._weight > 0.0) and num_means:
            told = difference.scale(1.0 / num_means)
            told.presence.copy_(result.presence)
            if self._learns and self._forecast is not None:
                self._learn(self._forecast, told)
            self._forecast = told
        return step_on

    def forget(self) -> None:
        """Forecast nothing in the next period: the cluster is another one."""
        self._forecast = None

    def _learn(self, before: Vector, now: Vector) -> None:
        """Fit the weight to one more period, in which the difference was ``now``."""
        product, square = self._products(now, before)
        self._product, self._square = MEMORY * self._product + product, MEMORY * self._square + square
        if self._square > 0.0:
            self._weight = round(min(1.0, max(0.0, self._product / self._square)) * NUM_WEIGHTS) / NUM_WEIGHTS

    def _take_back(self, mean: Vector | None, num_means: int) -> Vector | None:
        """Return the last step of a period in which the own means turned out to be those of all."""
        forecast = self._forecast
        if forecast is None or not num_means:
            return mean  # without any data nothing was forecast, and other clusters may be there
        self._forecast = None
        step_on = forecast.copy().scale(-self._weight * (num_means - (mean is not None)))
        if mean is not None:
            step_on.add(mean)
        step_on.presence.copy_(forecast.presence if mean is None else forecast.presence + mean.presence)
        return step_on

    def _take(self, mean: Vector | None) -> None:
        if mean is not None:
            self._brought = mean.copy() if self._brought is None else self._brought.add(mean)
            self._num_means += 1
