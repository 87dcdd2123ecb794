"""The clustered update as an update rule: the user's choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from syncline.updates.bucket_schedule import BucketScheduleOptions
from syncline.updates.clustered.settings import ClusteredSettings
from syncline.updates.clustered.updater import ClusteredUpdater
from syncline.updates.combinations import OF_INDEPENDENT_RANKS, WHOLE_STATE, Combination
from syncline.updates.inner import check_is_served
from syncline.updates.rule import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Clustered(ClusteredSettings):
    """Average gradients inside clusters of like machines each batch, and between clusters once a period.

    `docs/mechanisms.md`, Clusters.

    ``period``: batches between two outer rounds of the clusters. ``reelect_every``: periods after which each cluster
    draws a new temporary server. ``clusters``: ``"auto"`` (from the machines' features, as ``syncline cluster`` shows),
    how many, or the ranks of each. ``features``: the features that count (default: all); ``measures``: whether each
    machine reads its own, beside what the topology says.

    At a period's end the sum of the own cluster's means is replaced by the mean of all clusters'.
    ``contribution="uniform"`` weights clusters by samples, so that all get the same mean; ``"cosine"`` also by how
    alike their past gradients were. ``averages``: average the parameters at each re-election (default: where clusters
    can drift apart, which is with a period above 1 or with ``"cosine"``; where clusters see different data this is what
    keeps an adaptive optimizer together, so re-elect often; with SGD without momentum the outer round alone makes
    clusters equal at the end of a period, and ``averages=False`` halves what goes between them).

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
    the parameters, and ranks that come together begin with the mean of their optimizers' state. It needs ``averages``,
    and clusters that were not written down; where optimizer state cannot be averaged (tensors of another shape or type
    than the parameters) clusters stay. ``optimizer.statistics()`` tells what a machine measured: ``history`` in each
    period, ``features`` on average.

    Each rank keeps four vectors of the size of the gradients beside them (with ``forecast`` five), and a temporary
    server one for each member. Clusters' parameters are equal when a term has ended; ``optimizer.end_period()`` ends
    the period, and the term where parameters are averaged. Buffers (BatchNorm) and optimizer state are each rank's, or
    each cluster's, own.

    Raises :class:`ConfigurationError` for values that are out of range or exclude each other, ``distribute()`` also for
    clusters that do not name each rank once, and :class:`UpdateError` for an optimizer that wants a closure.
    ``step()``, on the training thread, raises :class:`QuorumLostError` on a rank that may not go on.

    >>> model, optimizer = syncline.distribute(model, optimizer, syncline.Clustered(period=16, measures=False))
    >>> model(x).sum().backward(); optimizer.step(); optimizer.end_period()
    >>> optimizer.statistics().clusters
    ((0,),)
    """

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
