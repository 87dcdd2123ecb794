"""The clustered update as an update rule: the user's choice, and what a training thread does for each batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch

from syncline.arguments import Count, Share, Whole, check_fields
from syncline.errors import ConfigurationError, PeerLostError
from syncline.machines.clustering import Inventory
from syncline.machines.features import NETWORK, summarise
from syncline.machines.measurement import read_machine
from syncline.members.job_record import NO_FLAGS
from syncline.topology import Topology
from syncline.updates.allreduce import AllReduce
from syncline.updates.bucket import DEFAULT_BUCKET_BYTES, Bucket, take_written
from syncline.updates.clustered.driver import ClusterDriver, ClusteredStatistics, mean_of
from syncline.updates.clustered.gradients import DividedGradientVectors, GradientVectors
from syncline.updates.clustered.grouping import ClusterChoice, Pace, Start, regroup
from syncline.updates.clustered.means import Contributions, Period
from syncline.updates.clustered.messages import Agreed, Clusters, Kind, Measurement, Provided, RecordSchedule
from syncline.updates.clustered.node import Node
from syncline.updates.combinations import OF_DIVIDING_PARTIES, OF_INDEPENDENT_RANKS, Combination, one_gateway
from syncline.updates.control import ControlStream
from syncline.updates.flat import Vector
from syncline.updates.party import PartyRule, PartyUpdater
from syncline.updates.report import PendingReport
from syncline.updates.rule import GrowthAgreement, MemberNews, Newcomers, Setting, WholeRule
from syncline.updates.sharded import Sharded
from syncline.updates.sharded_updater import ShardedUpdater
from syncline.updates.state import StateSource

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemporaryServer(WholeRule):
    """What the ranks of a cluster do in every batch: one, drawn at random for a term, makes the mean of the gradients.

    A rank that dies is left out, whoever it is, and its cluster goes on; a rank that is in reach of less than the part
    ``quorum`` of all ranks that have not left by themselves (itself included) stops with an error. A rank cannot tell a
    death from a cut of the network, so with the default, a half, at most one part of a job goes on: the one with more
    than half of those ranks, or with exactly half and the lowest rank among them. With a smaller ``quorum`` few ranks
    go on, but so may both sides of a cut. Raises :class:`ConfigurationError` unless it is a number from 0 to 1.

    >>> syncline.Clustered(period=16, within=syncline.updates.TemporaryServer(quorum=0.3)).within
    TemporaryServer(quorum=0.3)
    """

    quorum: Share = 0.5

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def bucket_bytes(self) -> int:
        """Gradients are sent as one vector, however they are cut."""
        return DEFAULT_BUCKET_BYTES


_SERVER = TemporaryServer()


@dataclass(frozen=True, slots=True, kw_only=True)
class Clustered(PartyRule):
    """Average gradients inside clusters, sites or like machines, each batch, and between clusters once a period.

    `docs/mechanisms.md`, Clusters.

    ``period``: batches between two outer rounds of the clusters. ``reelect_every``: periods after which each cluster
    draws a new temporary server. ``clusters``: ``"auto"`` (from ``features``, as ``syncline cluster`` shows),
    how many, or the ranks of each. ``features``: the names of those that count, of what each machine reads of itself
    and what the topology's file says of it. Default: what the network says alone (``site``, ``uplink_bytes_per_s``,
    ``latency_s``), as what crosses slow links is what clusters are to save; and machines are not looked at. Where that
    divides nobody there is one cluster, and a warning says so.

    At a period's end the sum of the own cluster's means is replaced by the mean of all clusters', weighted by samples,
    the same for all. ``averages``: average the parameters at each re-election (default: where clusters can drift apart,
    which is with a period above 1; where clusters see different data this is what keeps an adaptive optimizer together,
    so re-elect often; with SGD without momentum the outer round alone makes clusters equal at the end of a period, and
    ``averages=False`` halves what goes between them). :meth:`literal` exchanges as the sources say.

    ``forecast``: step in each batch on the cluster's mean, plus a part of what the period before told of how the mean
    of all clusters differs from it (SCAFFOLD, Karimireddy et al., 2020): where clusters see different data, training
    takes fewer steps so. ``"auto"`` learns the part, from how well the forecasts before have held; a number from 0 to 1
    gives it, and 0 forecasts nothing. It needs a period above 1.

    ``within``: what the ranks of a cluster do in every batch. :class:`~syncline.updates.TemporaryServer` is what the
    sources say: all send their gradients to one rank, and the job goes on without ranks that die. With ``AllReduce()``
    and ``Sharded()`` they make the mean by collectives, under the backward pass, so that links inside of a cluster
    carry less; clipping and ``GradScaler`` see the cluster's mean, and a lost rank ends the job. ``Sharded()`` also
    divides the optimizer's state, and what a rank adds up over a period; ``align``, ``cost`` and ``portions`` (not
    those of hosts) count within the cluster. Servers are drawn for outer rounds all the same.

    Of a job with a temporary server a rank that lives, but whose training thread makes no call for
    ``syncline.init(stall_s=...)`` while others wait for it as long, is left behind as if it were dead, and told so when
    it wakes. An elastic job takes newcomers in when a term ends, unless ``clusters`` are written down, or the
    parameters are not made equal then (``averages=False`` with a period above 1).

    Clusters are made when the training starts. With ``recluster_every`` above 0, after every so many terms one server
    looks at the mean of what each machine measured in past periods (clocks, free memory, and its own seconds for a
    batch), and proposes new clusters if their silhouette is clearly higher; that is agreed together with the average of
    the parameters, and the optimizers of clusters that have changed begin anew, without state. It needs ``averages``, a
    temporary server, clusters that were not written down, and ``features`` of machines, such as ``("batch_s",)``.
    ``optimizer.statistics()`` tells what a machine measured: ``history`` in each period, ``features`` on average.

    Each rank keeps four vectors of the size of the gradients beside them (with ``forecast`` five; two of them in parts
    with ``Sharded()``), and a temporary server one for each member. Clusters' parameters are equal when a term has
    ended; ``optimizer.end_period()`` ends the period, and the term where parameters are averaged. Buffers (BatchNorm)
    and optimizer state are each rank's, or each cluster's, own. A checkpoint has rank 0's; with ``AllReduce()`` and
    ``Sharded()`` the state of each cluster, all ranks save it together, and a job with as many clusters goes on to the
    bit, but for what past periods told (``forecast``, and the weights of :meth:`literal`), which is learnt anew.

    Raises :class:`ConfigurationError` for values that are out of range or exclude each other, ``distribute()`` also for
    clusters that do not name each rank once, and :class:`UpdateError` for an optimizer that wants a closure.
    ``step()``, on the training thread, raises :class:`QuorumLostError` on a rank that may not go on; it and
    ``backward()`` raise what a collective does (:class:`PeerLostError`, :class:`DeadlineError`).

    >>> model, optimizer = syncline.distribute(model, optimizer, syncline.Clustered(period=16))
    >>> model(x).sum().backward(); optimizer.step(); optimizer.end_period()
    >>> optimizer.statistics().clusters
    ((0,),)
    """

    period: Count = 16
    reelect_every: Count = 1
    clusters: ClusterChoice = "auto"
    recluster_every: Whole = 0
    forecast: Share | Literal["auto"] = "auto"
    features: Sequence[str] = ()
    averages: bool | None = None
    within: TemporaryServer | AllReduce | Sharded = _SERVER
    is_literal: bool = field(default=False, init=False)
    combinations: ClassVar[tuple[Combination, ...]] = (
        Combination(
            "elastic=True",
            "with within=AllReduce() or Sharded(): a lost rank ends its cluster's collectives",
            "leave out within, or elastic=",
            when=lambda rule, _: not rule.is_served,
        ),
        *OF_INDEPENDENT_RANKS,
        *OF_DIVIDING_PARTIES,
        one_gateway("in which whoever is elected server exchanges with other hosts"),
        Combination(
            'Priorities(search="equal")',
            "whose messages all go in the last class",
            "leave out priorities",
            is_refused=False,
        ),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        self.check_within("cluster", "leave out compress")
        if self.recluster_every and not self.is_served:
            raise ConfigurationError(
                "Clustered: recluster_every moves ranks between clusters, which within=AllReduce() and Sharded() make "
                "once; leave out within, or recluster_every"
            )
        if self.recluster_every and (not self.will_average or not isinstance(self.clusters, str | int)):
            raise ConfigurationError(
                "Clustered: recluster_every needs clusters that are not written down, and parameters that are averaged "
                "at each re-election; leave out clusters=(...) and say averages=True, or leave out recluster_every"
            )
        if self.recluster_every and not self.looks_at_machines:
            raise ConfigurationError(
                "Clustered: recluster_every compares what machines measure while they train; name what counts, as "
                'features=("batch_s",), or leave out recluster_every'
            )
        if self.forecast not in (0, "auto") and self.period == 1:
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
        if rule.forecast not in (0, "auto"):
            raise ConfigurationError(
                f"Clustered.literal: forecast must be left out, not {rule.forecast}: it is made of sums over whole "
                "periods, which Clustered() exchanges"
            )
        object.__setattr__(rule, "is_literal", True)
        return rule

    @property
    def looks_at_machines(self) -> bool:
        """Whether anything counts that a machine reads of itself."""
        return not set(self.features).issubset(NETWORK)

    @property
    def is_served(self) -> bool:
        """Whether a temporary server makes the means of a cluster, so that nobody waits for its other ranks."""
        return isinstance(self.within, TemporaryServer)

    @property
    def will_average(self) -> bool:
        """Whether parameters are averaged at each re-election."""
        return (self.period > 1 or self.is_literal) if self.averages is None else self.averages

    @property
    def why_no_newcomers(self) -> str:
        """Why nobody can come into a job with it; empty if ranks can."""
        if not isinstance(self.clusters, str | int):
            return "Clustered(clusters=) names ranks, and newcomers are none of them"
        if not self.will_average and (self.period > 1 or self.is_literal):
            return "Clustered(averages=False) never makes parameters equal on all ranks"
        return ""

    def has_others(self, num_clusters: int) -> bool:
        """Whether one of so many clusters has others beside it, or may come to."""
        return num_clusters > 1 or self.recluster_every > 0

    def record_schedule(self, num_clusters: int, *, takes_newcomers: bool = False) -> RecordSchedule:
        """Return the order in which a job with so many clusters agrees on things.

        Where newcomers may come in, one cluster has outer rounds too, without vectors: they tell who comes. So it has
        where there are no other records.
        """
        has_others = self.has_others(num_clusters)
        return RecordSchedule(
            period=self.period,
            reelect_every=self.reelect_every,
            has_means=self.is_served,
            has_outer_rounds=has_others or takes_newcomers or not self.is_served,
            averages=has_others and self.will_average,
        )

    def start(self, setting: Setting) -> ClusteredUpdater:
        """Agree on the clusters, and begin to work on a model."""
        return ClusteredUpdater(setting, self)


SEED = 0
"""Of the draws of temporary servers."""
FAREWELL_S = 10.0
"""A rank that ends the job does not wait longer for the others to have all that they need."""


class ClusteredUpdater(PartyUpdater):
    """The clustered update at work on one model; its parties are clusters, or with a temporary server each rank."""

    def __init__(self, setting: Setting, rule: Clustered) -> None:
        super().__init__(setting, rule.within)
        self._rule = rule
        self._newcomers = setting.newcomers
        self._is_ending = False
        gpu, reads = gpu_of(self.buckets), rule.looks_at_machines
        start: Start = setting.begins_with or self._agree_on_start(gpu=gpu, reads=reads)
        if not start.keeps_state:
            self.optimizer.state.clear()
        self.inventory, self.clusters = start.inventory, start.clusters
        num_clusters, takes_newcomers = len(self.clusters), setting.newcomers is not None
        self.record_schedule = rule.record_schedule(num_clusters, takes_newcomers=takes_newcomers)
        ranks = tuple((rank,) for rank in range(self.collectives.world_size))
        self._start_parties(ranks if rule.is_served else self.clusters, num_beside=2)  # the last round's vectors
        self._vectors = GradientVectors(self.buckets)
        if isinstance(self._party, ShardedUpdater):
            self._vectors = DividedGradientVectors(self._party)
        self._period = self._new_period()
        self._contributions = Contributions(self._vectors.shape) if rule.is_literal else None
        self._driver = self._open_driver(setting)
        self._position = 0
        self._num_batches = 0
        """Of this period."""
        self._samples = 1.0
        """Behind the gradients; a batch of them that no pass has brought counts as one."""
        self._present: Sequence[bool] = ()
        self._samples_of_period = self._samples_of_term = 0.0
        self._pace = Pace(gpu=gpu, reads=reads)
        self._driver.start()

    @property
    def checkpoint_writer(self) -> int | None:
        """The lowest rank that lives, where one may be lost at any time, so that nobody waits for all."""
        return self._driver.living[0] if self._rule.is_served else None

    def begin_backward(self) -> None:
        """Raise why this rank cannot go on, if it cannot."""
        self._driver.raise_failure()
        super().begin_backward()

    def finish_backward(self, report: PendingReport) -> Sequence[bool] | None:
        """Take note of how many samples are behind the gradients: a server is sent them as the user leaves them."""
        present = super().finish_backward(report)
        self._samples, self._present = report.total, report.present
        return present

    def raise_first(self, error: PeerLostError) -> None:  # noqa: ARG002 - servers hear of every loss
        """Raise what has gone wrong in the job, if anything has."""
        self._driver.raise_first()

    def step(self) -> None:
        """Step on the cluster's mean; at the end of a period, also exchange."""
        if not self.divides_gradients:
            self._present = take_written(self.buckets)
        self._batch(self._samples, is_pass=True)
        self.step_number += 1

    @property
    def is_at_period_start(self) -> bool:
        """Whether all ranks have the same parameters, as no batch has been made since they had."""
        if not self.record_schedule.has_outer_rounds:
            return True
        if self._position == 0 or self._num_batches:
            return not self._num_batches
        return self.record_schedule.levels(self.record_schedule.record(self._position - 1))

    def end_period(self) -> None:
        """End the period now, and the term too if parameters are averaged at its end; every rank calls it."""
        while not self.is_at_period_start:
            if not self.record_schedule.has_means:
                self._num_batches = self.record_schedule.period - 1
            self._batch(0.0, is_pass=False)

    def load_state(self, source: StateSource) -> None:
        """Take the cluster's, and go on as at the beginning of a period."""
        super().load_state(source)
        self._num_batches, self._samples_of_period, self._samples_of_term = 0, 0.0, 0.0
        self._period = self._new_period()

    def finish(self) -> None:
        """End what is under way, so that all ranks have the same parameters, and wait until they have."""
        self._is_ending = True
        self.end_period()
        self._driver.depart(FAREWELL_S)

    def meet(self, control: ControlStream, topology: Topology, num_old: int) -> GrowthAgreement:
        """Make clusters of all ranks, from what hosts measured when they began, and say whose states are equal."""
        host = self.inventory.topology.host_of(self.collectives.rank)
        wanted = replace(self.inventory, topology=topology, measured={})
        try:
            features = self.inventory.measured.get(host.name, {})
            start = Start.agree(control, wanted, self._choice(topology), read=lambda: features)
        except ConfigurationError as error:  # what divided the machines at the start may not divide these
            _log.warning("all ranks are one cluster: %s", error)
            start = Start(inventory=wanted, clusters=(tuple(range(topology.num_ranks)),))
        steps_alike = not self._rule.will_average  # all step on the mean of all, in each batch
        kinds = control.all_gather(0 if steps_alike else self._cluster, "clusters before")
        return GrowthAgreement(groups=start.clusters, begins_with=start.after(kinds[:num_old], control.rank))

    def statistics(self) -> ClusteredStatistics:
        """Return the clusters, their servers, the contributions, what this rank sent, and its machine's history."""
        counted = self._driver.statistics()
        if self._contributions is not None:
            table = self._contributions.table.tolist()
            counted = replace(counted, contributions=tuple(map(tuple, table)))
        return replace(counted, features=summarise(self._pace.history), history=tuple(self._pace.history))

    def close(self) -> None:
        """Release everything."""
        self._driver.close()
        self._pace.close()
        super().close()

    def _batch(self, samples: float, *, is_pass: bool) -> None:
        """Go through the records of one batch: its mean, and at a period's end the result and the average."""
        mean = self._mean(samples, is_pass=is_pass)
        self._num_batches = (self._num_batches + 1) % self.record_schedule.period
        if self.record_schedule.has_outer_rounds and not self._num_batches:
            step_on = self._outer(mean)
        else:
            step_on = mean if self._period is None else self._period.step_on(mean)
        is_levelled = mean is None and not is_pass and self.record_schedule.averages
        if step_on is not None and not is_levelled:  # where nobody had data parameters alone become equal
            if self._rule.is_served or step_on is not mean:
                self._vectors.show(step_on, is_pass=is_pass)
            self.step_party()
        if self.record_schedule.record(self._position).kind is Kind.AVERAGE:
            self._average()

    def _mean(self, samples: float, *, is_pass: bool) -> Vector | None:
        """Return the cluster's mean, or this rank's part of it; None if nobody had data."""
        own = self._vectors.take(self._present) if is_pass else None
        if not self._rule.is_served:
            self._count_samples(samples)
            return own if own is not None and bool(own.presence.any()) else None
        self._pace.computed(is_batch=is_pass)
        mean: Vector | None = self._agree(Provided(samples=samples, payload=own), "cluster mean").payload
        self._pace.began()
        return mean

    def _count_samples(self, samples: float) -> None:
        self._samples_of_period += samples
        self._samples_of_term += samples

    def _new_period(self) -> Period | None:
        """Return what adds up means, where clusters exchange sums."""
        sums = self._rule.period > 1 and not self._rule.is_literal and self._rule.has_others(len(self.clusters))
        weight = self._rule.forecast
        learned = None if weight == "auto" else weight
        return Period(forecast_weight=learned, products=self._vectors.products) if sums else None

    def _outer(self, mean: Vector | None) -> Vector | None:
        """Exchange what the period brought; return what to step on in the last batch."""
        brought = mean if self._period is None else self._period.bring(mean)
        samples, self._samples_of_period = self._samples_of_period, 0.0
        self._pace.end_period()
        own = None
        if self._rule.has_others(len(self.clusters)):
            own = self._vectors.shape.zeros() if brought is None else self._vectors.join(brought)
            if self._contributions is not None:
                own = self._contributions.bring(own, self._cluster, len(self.clusters))
        provided = Provided(samples=samples, payload=own, measurement=self._measurement())
        agreed = self._agree(provided, "exchange of clusters")
        result: Vector | None = agreed.payload
        if self._contributions is not None and result is not None:
            result = self._contributions.weigh(result, agreed.samples, self._cluster)
        if result is not None:
            result = self._vectors.part(result)
        if self._period is not None:
            return self._period.end(mean, result)
        return mean if result is None else result

    def _average(self) -> None:
        """Average the parameters over the clusters."""
        own = self._vectors.shape.zeros()
        for bucket, part in zip(self.buckets, own.parts, strict=False):
            bucket.stage_parameters()
            bucket.wait_staged()
            part.copy_(bucket.wire_parameters)
        samples, self._samples_of_term = self._samples_of_term, 0.0
        provided = Provided(samples=samples, payload=own, clusters=self._propose())
        average = self._agree(provided, "average of parameters").payload
        if average is None:
            return
        for bucket, part in zip(self.buckets, average.parts, strict=False):
            bucket.wire_parameters.copy_(part)
            bucket.unstage_parameters()

    def _is_regrouping(self) -> bool:
        """Whether the term of the next record is one after which clusters may be made anew."""
        term = self.record_schedule.record(self._position).term
        return self._rule.recluster_every > 0 and (term + 1) % self._rule.recluster_every == 0

    def _measurement(self) -> Measurement:
        """Return what this rank's machine measured in past periods, where clusters may follow from it."""
        return tuple(sorted(summarise(self._pace.history).items())) if self._is_regrouping() else ()

    def _propose(self) -> Clusters:
        """Return new clusters if this rank is the one to propose them, and finds better ones."""
        if not self._is_regrouping():
            return ()
        start_s = time.monotonic()
        measurements = self._driver.measurements()
        choice, living = self._choice(self.inventory.topology), self._driver.living
        wanted = choice if isinstance(choice, int) else None
        proposed = regroup(self.inventory, self.clusters, measurements, living=living, num_clusters=wanted)
        self._pace.waited(time.monotonic() - start_s)  # this too is for others
        return proposed

    def _move(self, agreed: Agreed) -> None:
        """Go on in a new cluster: its optimizers begin anew, and so are equal."""
        before = next(ranks for ranks in self.clusters if self.collectives.rank in ranks)
        self.clusters = agreed.clusters
        if before not in self.clusters:
            self.optimizer.state.clear()
            if self._period is not None:
                self._period.forget()

    @property
    def _cluster(self) -> int:
        """The number of this rank's cluster."""
        return next(number for number, ranks in enumerate(self.clusters) if self.collectives.rank in ranks)

    def _open_driver(self, setting: Setting) -> ClusterDriver:
        """Return what agrees with the others on the records."""
        communicator, stream = self.collectives.communicator, self.collectives.bucket_schedules[0].stream
        port = communicator.open_port(
            f"clustered {self.clusters} {self.record_schedule} literal={self._rule.is_literal}"
        )
        node = Node(
            job=f"{SEED}/{stream}",
            rank=port.rank,
            clusters=self.clusters,
            record_schedule=self.record_schedule,
            mean=mean_of,
            quorum=self._rule.within.quorum if isinstance(self._rule.within, TemporaryServer) else None,
            reclusters=self._rule.recluster_every > 0,
            elders=() if setting.newcomers is None else setting.newcomers.elders,
        )
        return ClusterDriver(
            port,
            communicator,
            self._vectors.shape,
            node,
            stream=stream,
            timeout_s=self.collectives.timeout_s,
            trace=self.collectives.trace,
            newcomers=setting.newcomers,
        )

    def _agree_on_start(self, *, gpu: int | None, reads: bool) -> Start:
        """Return the clusters of a job that begins."""
        wanted = Inventory(topology=self.collectives.communicator.topology, use=self._rule.features)
        read = partial(read_machine, gpu=gpu) if reads and isinstance(self._rule.clusters, str | int) else None
        return Start.agree(self.collectives.control, wanted, self._choice(wanted.topology), read=read)

    def _choice(self, topology: Topology) -> ClusterChoice:
        """Return which clusters the user wants; where machines come and go, no more than there are."""
        wanted = self._rule.clusters
        return min(wanted, len(topology.hosts)) if self._newcomers is not None and isinstance(wanted, int) else wanted

    def _tell_of_members(self, newcomers: Newcomers) -> tuple[int, ...]:
        """Return what this rank tells of newcomers, and of who is lost."""
        living, flags = self._driver.living, NO_FLAGS if self._is_ending else newcomers.flags()
        lost = (rank for rank in range(self.collectives.world_size) if rank not in living)
        return (self.collectives.rank, *flags, *lost)

    def _agree(self, provided: Provided, phase: str) -> Agreed:
        """Provide what the next record needs, wait for it, and return it."""
        if self._newcomers is not None and self.record_schedule.levels(self.record_schedule.record(self._position)):
            provided = replace(provided, told=self._tell_of_members(self._newcomers))
        start_s = time.monotonic()
        self._driver.provide(provided)
        record, agreed = self._driver.wait(phase)
        assert record.index == self._position, f"record {record.index} came in place of {self._position}"
        self._position += 1
        self._pace.waited(time.monotonic() - start_s)
        if record.kind is Kind.MEAN:
            self._count_samples(agreed.samples[0])
        if agreed.clusters:
            self._move(agreed)
        if agreed.told:
            _, begun, decided, *lost = agreed.told
            self._news = MemberNews(flags=(begun, decided), lost=tuple(lost))
        return agreed


def gpu_of(buckets: Sequence[Bucket]) -> int | None:
    """Return the number of the CUDA device that a model trains on; None if that is not known."""
    indices = [bucket.plan.device.index for bucket in buckets if bucket.plan.device.type == "cuda"]
    if indices and indices[0] is not None:
        return indices[0]
    has_begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.current_device() if has_begun else None
