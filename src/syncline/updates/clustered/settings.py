"""What the user may choose of the clustered update, checked when it is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from syncline.errors import ConfigurationError
from syncline.units import check_whole
from syncline.updates.bucket import DEFAULT_BUCKET_BYTES
from syncline.updates.clustered.contribution import DECAY, MIN_WEIGHT
from syncline.updates.clustered.grouping import ClusterChoice
from syncline.updates.clustered.outer_rounds import Mixing
from syncline.updates.clustered.record_schedule import RecordSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusteredSettings:
    """The choices, as :class:`~syncline.updates.clustered.rule.Clustered` explains them, and what follows from them."""

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
            check_whole(f"Clustered: {name}", getattr(self, name), 1)
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
