"""The clustered update as an update rule: the user's choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from syncline.arguments import Count, Share, Whole, check_fields
from syncline.errors import ConfigurationError
from syncline.updates.bucket import DEFAULT_BUCKET_BYTES
from syncline.updates.bucket_schedule import BucketScheduleOptions
from syncline.updates.clustered.grouping import ClusterChoice
from syncline.updates.clustered.record_schedule import RecordSchedule
from syncline.updates.clustered.updater import ClusteredUpdater
from syncline.updates.combinations import OF_INDEPENDENT_RANKS, WHOLE_STATE, Combination
from syncline.updates.inner import check_is_served
from syncline.updates.rule import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Clustered:
    """Average gradients inside clusters of like machines each batch, and between clusters once a period.

    `docs/mechanisms.md`, Clusters.

    ``period``: batches between two outer rounds of the clusters. ``reelect_every``: periods after which each cluster
    draws a new temporary server. ``clusters``: ``"auto"`` (from the machines' features, as ``syncline cluster`` shows),
    how many, or the ranks of each. ``features``: the names of those that count, of what each machine reads of itself
    and what the topology says (default: all); with ``()`` no machine reads anything, and what the topology says counts.

    At a period's end the sum of the own cluster's means is replaced by the mean of all clusters', weighted by samples,
    the same for all. ``averages``: average the parameters at each re-election (default: where clusters can drift apart,
    which is with a period above 1; where clusters see different data this is what keeps an adaptive optimizer together,
    so re-elect often; with SGD without momentum the outer round alone makes clusters equal at the end of a period, and
    ``averages=False`` halves what goes between them). :meth:`literal` exchanges as the sources say.

    ``forecast``: step in each batch on the cluster's mean, plus this part (0 to 1) of what the period before told of
    how the mean of all clusters differs from it. Where clusters see different data, training with SGD takes fewer steps
    with it (SCAFFOLD, Karimireddy et al., 2020). Try it: with a high rate or more than two clusters 1.0 can make
    training diverge, and a shorter period or 0.7 serves better. It needs a period above 1.

    A rank that dies is left out, whoever it is, and its cluster goes on; a rank that is in reach of less than the part
    ``quorum`` of all ranks that have not left by themselves (itself included) stops with an error. A rank cannot tell a
    death from a cut of the network, so with the default, a half, at most one part of a job goes on: the one with more
    than half of those ranks, or with exactly half and the lowest rank among them. With a smaller ``quorum`` few ranks
    go on, but so may both sides of a cut. A rank that lives, but whose training thread makes no call for
    ``syncline.init(stall_s=...)`` while others wait for it as long, is left behind as if it were dead, and told so when
    it wakes.

    Clusters are made when the training starts. With ``recluster_every`` above 0, after every so many terms one server
    looks at the mean of what each machine measured in past periods (clocks, free memory, and its own seconds for a
    batch), and proposes new clusters if their silhouette is clearly higher; that is agreed together with the average of
    the parameters, and the optimizers of clusters that have changed begin anew, without state. It needs ``averages``,
    and clusters that were not written down. ``optimizer.statistics()`` tells what a machine measured: ``history`` in
    each period, ``features`` on average.

    Each rank keeps four vectors of the size of the gradients beside them (with ``forecast`` five), and a temporary
    server one for each member. Clusters' parameters are equal when a term has ended; ``optimizer.end_period()`` ends
    the period, and the term where parameters are averaged. Buffers (BatchNorm) and optimizer state are each rank's, or
    each cluster's, own.

    Raises :class:`ConfigurationError` for values that are out of range or exclude each other, ``distribute()`` also for
    clusters that do not name each rank once, and :class:`UpdateError` for an optimizer that wants a closure.
    ``step()``, on the training thread, raises :class:`QuorumLostError` on a rank that may not go on.

    >>> model, optimizer = syncline.distribute(model, optimizer, syncline.Clustered(period=16, features=()))
    >>> model(x).sum().backward(); optimizer.step(); optimizer.end_period()
    >>> optimizer.statistics().clusters
    ((0,),)
    """

    period: Count = 16
    reelect_every: Count = 1
    clusters: ClusterChoice = "auto"
    recluster_every: Whole = 0
    forecast: Share = 0.0
    features: Sequence[str] | None = None
    averages: bool | None = None
    quorum: Share = 0.5
    is_literal: bool = field(default=False, init=False)
    combinations: ClassVar[tuple[Combination, ...]] = (
        *OF_INDEPENDENT_RANKS,
        Combination(
            "gateway: one",
            "in which whoever is elected server exchanges with other hosts",
            "take AllReduce() or Sharded(), or write 'gateway: every' in the topology",
            is_refused=False,
        ),
        WHOLE_STATE,
        Combination(
            'Priorities(search="equal")',
            "whose messages all go in the last class",
            "leave out priorities",
            is_refused=False,
        ),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.recluster_every and (not self.will_average or not isinstance(self.clusters, str | int)):
            raise ConfigurationError(
                "Clustered: recluster_every needs clusters that are not written down, and parameters that are averaged "
                "at each re-election; leave out clusters=(...) and say averages=True, or leave out recluster_every"
            )
        if self.forecast and self.period == 1:
            raise ConfigurationError(
                "Clustered: forecast needs a period above 1, which tells it how clusters differ, not period=1"
            )

    @classmethod
    def literal(cls, **settings: Any) -> Clustered:
        """Return the rule that the sources describe; settings are those of :class:`Clustered`, without ``forecast``.

        Clusters exchange the mean of the period's last batch alone, and each weights the others by how alike their past
        gradients were, so clusters get different means. By loss it wins nowhere: what the other batches taught stays
        in its cluster. Raises :class:`ConfigurationError` for a ``forecast``, which needs sums over periods.

        >>> syncline.Clustered.literal(period=4).is_literal
        True
        """
        rule = cls(**settings)
        if rule.forecast:
            raise ConfigurationError(
                f"Clustered.literal: forecast must be left out, not {rule.forecast}: it is made of sums over whole "
                "periods, which Clustered() exchanges"
            )
        object.__setattr__(rule, "is_literal", True)
        return rule

    @property
    def bucket_bytes(self) -> int:
        """Gradients are sent as one vector, however they are cut."""
        return DEFAULT_BUCKET_BYTES

    @property
    def will_average(self) -> bool:
        """Whether parameters are averaged at each re-election."""
        return (self.period > 1 or self.is_literal) if self.averages is None else self.averages

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
    def schedule_options(self) -> BucketScheduleOptions:
        """No collective moves the buckets; this is the cheapest to plan."""
        return BucketScheduleOptions(is_divided=False)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise :class:`UpdateError` if the optimizer wants a closure."""
        check_is_served(optimizer)

    def start(self, setting: Setting) -> ClusteredUpdater:
        """Agree on the clusters, and begin to work on a model."""
        return ClusteredUpdater(setting, self)
