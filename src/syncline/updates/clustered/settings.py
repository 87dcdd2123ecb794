"""What the user may choose of the clustered update, checked when it is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from syncline.arguments import Count, Share, Whole, check_fields
from syncline.errors import ConfigurationError
from syncline.updates.bucket import DEFAULT_BUCKET_BYTES
from syncline.updates.clustered.grouping import ClusterChoice
from syncline.updates.clustered.record_schedule import RecordSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusteredSettings:
    """The choices, as :class:`~syncline.updates.clustered.rule.Clustered` explains them, and what follows from them."""

    period: Count = 16
    reelect_every: Count = 1
    clusters: ClusterChoice = "auto"
    recluster_every: Whole = 0
    contribution: Literal["uniform", "cosine"] = "uniform"
    forecast: Share = 0.0
    features: Sequence[str] | None = None
    measures: bool = True
    averages: bool | None = None
    quorum: Share = 0.5
    seed: int = 0
    bucket_bytes: Count = DEFAULT_BUCKET_BYTES

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

    @property
    def can_drift(self) -> bool:
        """Whether clusters' parameters can differ at the end of a period."""
        return self.period > 1 or self.contribution == "cosine"

    @property
    def will_average(self) -> bool:
        """Whether parameters are averaged at each re-election."""
        return self.can_drift if self.averages is None else self.averages

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
    def is_uniform(self) -> bool:
        """Whether clusters are weighted by samples alone, so that an outer round gives all the same."""
        return self.contribution == "uniform"
