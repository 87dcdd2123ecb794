"""The clustered update as an update rule: the user's choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from syncline.errors import ConfigurationError
from syncline.updates.bucket import DEFAULT_BUCKET_BYTES
from syncline.updates.bucket_schedule import BucketScheduleOptions
from syncline.updates.clustered.contribution import DECAY, MIN_WEIGHT
from syncline.updates.clustered.grouping import ClusterChoice
from syncline.updates.clustered.outer_rounds import Mixing
from syncline.updates.clustered.record_schedule import RecordSchedule
from syncline.updates.clustered.updater import ClusteredUpdater
from syncline.updates.inner import check_is_served
from syncline.updates.rule import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Clustered:
    """Average gradients inside clusters of like machines each batch, and between clusters once a period.

    `docs/mechanisms.md`, Clusters.

    ``period``: batches between two outer rounds of the clusters. ``reelect_every``: periods after which each cluster
    draws a new temporary server. ``clusters``: ``"auto"`` (from the machines' features, as ``syncline cluster`` shows),
    how many, or the ranks of each. ``features``: the features that count (default: all); ``weights``: how much
    (default: 1 each); ``measures``: whether each machine reads its own, beside what the topology says, and measures
    latencies and uplinks, when the training starts, where the topology does not say them. ``probe_folder``: where the
    disk's rate is tried (default: the working directory; of a folder in memory nothing is told).

    ``outer="period"`` replaces, at a period's end, the sum of the own cluster's means by the mean of all clusters';
    ``"last"`` exchanges the last batch's mean alone, the literal form. ``contribution="uniform"`` weights clusters by
    samples, so that all get the same mean; ``"cosine"`` also by how alike their past gradients were, with ``decay``
    and at least ``min_weight``. ``averages``: average the parameters at each re-election (default: where clusters can
    drift apart, which is with a period above 1 or with ``"cosine"``; where clusters see different data this is what
    keeps an adaptive optimizer together, so re-elect often; with SGD without momentum the outer round alone makes
    clusters equal at the end of a period, and ``averages=False`` halves what goes between them).

    ``forecast``: step in each batch on the cluster's mean, plus this part (0 to 1) of what the period before told of
    how the mean of all clusters differs from it. Where clusters see different data, training with SGD takes fewer steps
    with it (SCAFFOLD, Karimireddy et al., 2020). Try it: with a high rate or more than two clusters 1.0 can make
    training diverge, and a shorter period or 0.7 serves better. It needs ``outer="period"`` and a period above 1.

    A rank that dies is left out, whoever it is, and its cluster goes on; a rank that is in reach of less than the part
    ``quorum`` of all ranks that have not left by themselves (itself included) stops with an error. A rank cannot tell a
    death from a cut of the network, so with the default, a half, at most one part of a job goes on: the one with more
    than half of those ranks, or with exactly half and the lowest rank among them. With a smaller ``quorum`` few ranks
    go on, but so may both sides of a cut. A rank that lives, but whose training thread makes no call for
    ``syncline.init(stall=...)`` while others wait for it as long, is left behind as if it were dead, and told so when
    it wakes.

    Clusters are made when the training starts. With ``recluster_every`` above 0, after every so many terms one server
    looks at the mean of what each machine measured in past periods (clocks, free memory, and its own seconds for a
    batch), and proposes new clusters if their silhouette is clearly higher; that is agreed together with the average of
    the parameters, and ranks that come together begin with the mean of their optimizers' state. It needs ``averages``,
    and clusters that were not written down; where optimizer state cannot be averaged (tensors of another shape or type
    than the parameters) clusters stay. ``optimizer.statistics()`` tells what a machine measured: ``history`` in each
    period, ``features`` on average.

    Each rank keeps four vectors of the size of the gradients beside them (with ``forecast`` five), and a temporary
    server one for each member. Clusters' parameters are equal when a term has ended; ``optimizer.end_period()`` ends
    the period, and the term where parameters are averaged. Buffers (BatchNorm) and optimizer state are each rank's, or
    each cluster's, own.
    """

    period: int = 16
    reelect_every: int = 1
    clusters: ClusterChoice = "auto"
    recluster_every: int = 0
    contribution: Literal["uniform", "cosine"] = "uniform"
    outer: Literal["period", "last"] = "period"
    forecast: float = 0.0
    features: Sequence[str] | None = None
    weights: Mapping[str, float] | None = field(default=None, hash=False)
    measures: bool = True
    probe_folder: str | None = None
    averages: bool | None = None
    decay: float = DECAY
    min_weight: float = MIN_WEIGHT
    quorum: float = 0.5
    seed: int = 0
    bucket_bytes: int = DEFAULT_BUCKET_BYTES

    def __post_init__(self) -> None:
        for name, allowed in {"contribution": ("uniform", "cosine"), "outer": ("period", "last")}.items():
            if getattr(self, name) not in allowed:
                raise ConfigurationError(f"Clustered: {name} is one of {allowed}, not {getattr(self, name)!r}")
        for name in ("period", "reelect_every", "bucket_bytes"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"Clustered: {name} must be at least 1, not {getattr(self, name)}")
        if self.recluster_every < 0:
            raise ConfigurationError(
                f"Clustered: recluster_every is a number of terms, or 0 for never, not {self.recluster_every}"
            )
        for name in ("decay", "min_weight", "quorum", "forecast"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigurationError(f"Clustered: {name} must be from 0 to 1, not {getattr(self, name)}")
        if isinstance(self.clusters, str) and self.clusters != "auto":
            raise ConfigurationError(
                f'Clustered: clusters is "auto", a number, or the ranks of each cluster, not {self.clusters!r}'
            )
        self._check_together()

    def _check_together(self) -> None:
        if self.recluster_every and (not self.will_average or not isinstance(self.clusters, str | int)):
            raise ConfigurationError(
                "Clustered: recluster_every needs clusters that are not written down, and parameters that are averaged "
                "at each re-election; leave out clusters=(...) and say averages=True, or leave out recluster_every"
            )
        if self.forecast and (self.outer != "period" or self.period == 1):
            raise ConfigurationError(
                'Clustered: forecast needs outer="period" and a period above 1, which tell it how clusters differ; '
                f"not outer={self.outer!r} and period={self.period}"
            )

    @property
    def can_drift(self) -> bool:
        """Whether clusters' parameters can differ at the end of a period."""
        return self.period > 1 or self.contribution == "cosine" or self.outer == "last"

    @property
    def will_average(self) -> bool:
        """Whether parameters are averaged at each re-election."""
        return self.can_drift if self.averages is None else self.averages

    @property
    def schedule_options(self) -> BucketScheduleOptions:
        """No collective moves the buckets; this is the cheapest to plan."""
        return BucketScheduleOptions(is_divided=False)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise :class:`UpdateError` if the optimizer wants a closure."""
        check_is_served(optimizer)

    def start(self, setting: Setting) -> ClusteredUpdater:
        """Agree on the clusters, and begin to work on a model."""
        return ClusteredUpdater(setting, self)

    def record_schedule(self, num_clusters: int) -> RecordSchedule:
        """Return the order in which a job with so many clusters agrees on things."""
        has_others = num_clusters > 1 or self.recluster_every > 0
        return RecordSchedule(
            period=self.period,
            reelect_every=self.reelect_every,
            has_outer_rounds=has_others,
            averages=has_others and self.will_average,
        )

    @property
    def mixing(self) -> Mixing:
        """How clusters are weighted."""
        return Mixing(is_uniform=self.contribution == "uniform", decay=self.decay, min_weight=self.min_weight)
