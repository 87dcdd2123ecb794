"""The clustered update as an update rule: the user's choice, and the updater that does it for one model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from syncline.errors import ConfigurationError
from syncline.machines.features import FeatureHistory
from syncline.machines.reading import read_moment
from syncline.machines.survey import Survey
from syncline.updates.bucket import DEFAULT_BUCKET_BYTES, Bucket
from syncline.updates.clustered.agenda import Agenda, Kind
from syncline.updates.clustered.contribution import DECAY, MIN_WEIGHT
from syncline.updates.clustered.driver import Driver, Part
from syncline.updates.clustered.exchanges import Mixing
from syncline.updates.clustered.grouping import ClusterChoice, Clusters, agree_on_clusters, measure_hosts
from syncline.updates.clustered.statistics import ClusteredStatistics
from syncline.updates.clustered.vector import Vector, VectorShape
from syncline.updates.inner import check_is_served
from syncline.updates.lane import LaneOptions
from syncline.updates.report import PendingReport
from syncline.updates.rule import Setting
from syncline.updates.whole import WholeUpdater

FAREWELL_S = 10.0
"""A rank that ends the job does not wait longer for the others to have all that they need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clustered:
    """Average gradients inside clusters of like machines each batch, and between clusters once a period (mechanism 5).

    ``period``: batches between two exchanges of the clusters. ``reelect_every``: periods after which each cluster draws
    a new temporary server. ``clusters``: ``"auto"`` (from the machines' features, as ``syncline cluster`` shows), how
    many, or the ranks of each. ``features``: the features that count (default: all); ``weights``: how much (default:
    1 each); ``measures``: whether each machine reads its own, beside what the topology says, and measures latencies and
    uplinks, when the training starts, where the topology does not say them.

    ``exchange="period"`` replaces, at a period's end, the sum of the own cluster's means by the mean of all clusters';
    ``"last"`` exchanges the last batch's mean alone, the literal form. ``contribution="uniform"`` weights clusters by
    samples, so that all get the same mean; ``"cosine"`` also by how alike their past gradients were, with ``decay``
    and at least ``min_weight``. ``averages``: average the parameters at each re-election (default: where clusters can
    drift apart, which is with a period above 1 or with ``"cosine"``; where clusters see different data this is what
    keeps an adaptive optimizer together, so re-elect often).

    A rank that dies is left out, whoever it is, and its cluster goes on; a rank that is in reach of less than the part
    ``quorum`` of all ranks stops. With ``quorum=0.5`` two halves that lost sight of each other both go on: ask for more
    than that where a network can break in the middle.

    Clusters are made once, when the training starts, and stay: optimizer state cannot be handed from one cluster to
    another, so a rank that changed sides would step from another's history. What machines measure later is told by
    ``optimizer.statistics().features``.

    Each rank keeps four vectors of the size of the gradients beside them, and a temporary server one for each member.
    Clusters' parameters are equal when a term has ended; ``optimizer.end_period()`` ends the period, and the term where
    parameters are averaged. Buffers (BatchNorm) and optimizer state are each rank's, or each cluster's, own.
    """

    period: int = 16
    reelect_every: int = 1
    clusters: ClusterChoice = "auto"
    contribution: Literal["uniform", "cosine"] = "uniform"
    exchange: Literal["period", "last"] = "period"
    features: Sequence[str] | None = None
    weights: Mapping[str, float] | None = field(default=None, hash=False)
    measures: bool = True
    averages: bool | None = None
    decay: float = DECAY
    min_weight: float = MIN_WEIGHT
    quorum: float = 0.5
    seed: int = 0
    bucket_bytes: int = DEFAULT_BUCKET_BYTES

    def __post_init__(self) -> None:
        for name, allowed in {"contribution": ("uniform", "cosine"), "exchange": ("period", "last")}.items():
            if getattr(self, name) not in allowed:
                raise ConfigurationError(f"Clustered: {name} is one of {allowed}, not {getattr(self, name)!r}")
        for name in ("period", "reelect_every", "bucket_bytes"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"Clustered: {name} must be at least 1, not {getattr(self, name)}")
        for name in ("decay", "min_weight", "quorum"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigurationError(f"Clustered: {name} must be from 0 to 1, not {getattr(self, name)}")
        if isinstance(self.clusters, str) and self.clusters != "auto":
            raise ConfigurationError(
                f'Clustered: clusters is "auto", a number, or the ranks of each cluster, not {self.clusters!r}'
            )

    @property
    def can_drift(self) -> bool:
        """Whether clusters' parameters can differ at the end of a period."""
        return self.period > 1 or self.contribution == "cosine" or self.exchange == "last"

    @property
    def lane_options(self) -> LaneOptions:
        """No collective moves the buckets; this is the cheapest to plan."""
        return LaneOptions(is_divided=False)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise :class:`UpdateError` if the optimizer wants a closure."""
        check_is_served(optimizer)

    def start(self, setting: Setting) -> ClusteredUpdater:
        """Agree on the clusters, and begin to work on a model."""
        return ClusteredUpdater(setting, self)

    def agenda(self, num_clusters: int) -> Agenda:
        """Return the order in which a job with so many clusters agrees on things."""
        averages = self.can_drift if self.averages is None else self.averages
        has_others = num_clusters > 1
        return Agenda(
            period=self.period,
            reelect_every=self.reelect_every,
            exchanges=has_others,
            averages=has_others and averages,
        )


class ClusteredUpdater(WholeUpdater):
    """The clustered update at work on one model."""

    is_synchronous = False

    def __init__(self, setting: Setting, rule: Clustered) -> None:
        super().__init__(setting)
        communicator = self.channel.communicator
        stream = self.channel.lanes[0].stream
        self.survey = measure_hosts(
            self.channel.control,
            communicator,
            Survey(topology=communicator.topology, use=rule.features, weights=rule.weights),
            stream=stream,
            measures=rule.measures and isinstance(rule.clusters, str | int),
        )
        self.clusters: Clusters = agree_on_clusters(
            self.channel.control, self.survey, clusters=rule.clusters, seed=rule.seed
        )
        self.agenda = rule.agenda(len(self.clusters))
        self._sums_period = rule.exchange == "period" and rule.period > 1
        self._shape = VectorShape.of(self.buckets)
        part = Part(
            job=f"{rule.seed}/{stream}",
            clusters=self.clusters,
            agenda=self.agenda,
            mixing=Mixing(is_uniform=rule.contribution == "uniform", decay=rule.decay, min_weight=rule.min_weight),
            quorum=rule.quorum,
            stream=stream,
            timeout_s=self.channel.timeout_s,
        )
        name = f"clustered update {self.clusters} {self.agenda} {rule.contribution} {rule.exchange}"
        port, trace = communicator.open_port(name), self.channel.trace
        self._driver = Driver(port, communicator.topology, self._shape, part, trace)
        self._position = 0
        self._samples = 0.0
        self._present: Sequence[bool] = ()
        self._sum: Vector | None = None
        self._samples_of_period = 0.0
        self._samples_of_term = 0.0
        self._measures = rule.measures
        self._history = FeatureHistory()
        self._driver.start()

    def begin_backward(self) -> None:
        """Raise why this rank cannot go on, if it cannot."""
        self._driver.raise_failure()

    def reduce(self, bucket: Bucket) -> None:
        """Wait for the step: a gradient is sent as the user leaves it, clipped if he does so."""

    def finish_backward(self, report: PendingReport) -> Sequence[bool]:
        """Take note of how many samples are behind the gradients."""
        self._samples = report.total
        self._present = report.result().present
        return self._present

    def step(self) -> None:
        """Send the own gradients, wait for the cluster's mean, and step; at the end of a period, also exchange."""
        self._batch(self._samples, self._own_gradients())
        self._samples = 0.0
        self.step_number += 1

    def end_period(self) -> None:
        """End the period now, and the term too if parameters are averaged at its end; every rank calls it."""
        while not self._is_at_start():
            self._batch(0.0, None)

    def finish(self) -> None:
        """End what is under way, so that all ranks have the same parameters, and wait until they have."""
        self.end_period()
        self._driver.depart(FAREWELL_S)

    def statistics(self) -> ClusteredStatistics:
        """Return the clusters, their servers, the contributions, what this rank sent, and its machine's history."""
        return replace(self._driver.statistics(), features=self._history.summary())

    def progress(self) -> str:
        """Say the term, who serves, and what this rank sent inside its cluster and between clusters."""
        return self._driver.statistics().progress()

    def close(self) -> None:
        """Release everything."""
        self._driver.close()

    def _batch(self, samples: float, gradients: Vector | None) -> None:
        """Go through the entries of one batch: its mean, and at a period's end the result and the average."""
        mean = self._agree(samples, gradients, "cluster mean")
        if self.agenda.entry(self._position).kind is Kind.RESULT:
            mean = self._exchange(mean)
        elif self.agenda.exchanges and self._sums_period and mean is not None:
            self._sum = mean.copy() if self._sum is None else self._sum.add(mean)
        if mean is not None:
            self._show(mean)
            self.optimizer.step()
        if self.agenda.entry(self._position).kind is Kind.AVERAGE:
            self._average()

    def _exchange(self, mean: Vector | None) -> Vector | None:
        """Return what to step on in the last batch of a period: mean + (the exchange's result - what was brought)."""
        brought = mean
        if self._sum is not None:
            brought = self._sum if mean is None else self._sum.add(mean)
        samples, self._samples_of_period, self._sum = self._samples_of_period, 0.0, None
        if self._measures:
            self._history.record(read_moment())
        result = self._agree(samples, brought if brought is not None else self._shape.zeros(), "exchange of clusters")
        if result is None or brought is mean:
            return mean if result is None else result
        step_on = brought.copy().scale(-1.0) if brought is not None else self._shape.zeros()
        if mean is not None:
            step_on.add(mean)
        step_on.add(result)
        step_on.presence.copy_(result.presence if mean is None else result.presence + mean.presence)
        return step_on

    def _average(self) -> None:
        """Average the parameters over the clusters."""
        own = self._shape.zeros()
        for bucket, part in zip(self.buckets, own.parts, strict=False):
            bucket.stage_parameters()
            part.copy_(bucket.wire_parameters)
        samples, self._samples_of_term = self._samples_of_term, 0.0
        average = self._agree(samples, own, "average of parameters")
        if average is None:
            return
        for bucket, part in zip(self.buckets, average.parts, strict=False):
            bucket.wire_parameters.copy_(part)
            bucket.unstage_parameters()

    def _agree(self, samples: float, payload: Vector | None, phase: str) -> Vector | None:
        """Provide what the next entry needs, wait for it, and return its payload."""
        start_ns = time.monotonic_ns()
        self._driver.provide(samples=samples, payload=payload)
        entry, agreed = self._driver.wait()
        assert entry.index == self._position, f"entry {entry.index} came in place of {self._position}"
        self._position += 1
        self.channel.note_wait(phase, start_ns)
        if entry.kind is Kind.MEAN:
            self._samples_of_period += agreed.samples[0]
            self._samples_of_term += agreed.samples[0]
        found: Vector | None = agreed.payload
        return found

    def _is_at_start(self) -> bool:
        if self._position == 0 or not self.agenda.exchanges:
            return True
        last = self.agenda.entry(self._position - 1)
        return last.kind is (Kind.AVERAGE if self.agenda.averages else Kind.RESULT)

    def _own_gradients(self) -> Vector:
        own = self._shape.empty()
        for bucket, part in zip(self.buckets, own.parts, strict=False):
            bucket.stage_gradients()
            part.copy_(bucket.wire_gradients)
        own.presence.copy_(torch.tensor(self._present, dtype=torch.float32))
        return own

    def _show(self, vector: Vector) -> None:
        """Put what to step on where the optimizer reads it; a parameter that nobody used keeps no gradient."""
        present = (vector.presence > 0).tolist()
        for bucket, part in zip(self.buckets, vector.parts, strict=False):
            bucket.wire_gradients.copy_(part)
            bucket.unstage_gradients()
            bucket.show_gradients(present)
