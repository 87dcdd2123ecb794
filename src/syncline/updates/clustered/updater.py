"""The clustered update at work: what a rank's training thread does for each batch, period and term."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from syncline.machines.inventory import Inventory
from syncline.machines.measurement import read_machine
from syncline.updates.bucket import Bucket
from syncline.updates.clustered.contribution import Contributions
from syncline.updates.clustered.driver import ClusterDriver, VectorArithmetic
from syncline.updates.clustered.grouping import Clusters, agree_on_clusters, measure_hosts
from syncline.updates.clustered.messages import Agreed, Measurement
from syncline.updates.clustered.node import Node
from syncline.updates.clustered.pace import Pace
from syncline.updates.clustered.period import Period
from syncline.updates.clustered.record_schedule import Kind
from syncline.updates.clustered.regrouping import Regrouping
from syncline.updates.clustered.statistics import ClusteredStatistics
from syncline.updates.flat import Vector, VectorShape
from syncline.updates.report import PendingReport
from syncline.updates.rule import Setting
from syncline.updates.whole import WholeUpdater

if TYPE_CHECKING:
    from syncline.updates.clustered.rule import Clustered

SEED = 0
"""Of the draws of temporary servers, and of what divides machines."""
FAREWELL_S = 10.0
"""A rank that ends the job does not wait longer for the others to have all that they need."""


class ClusteredUpdater(WholeUpdater):
    """The clustered update at work on one model."""

    is_synchronous = False

    def __init__(self, setting: Setting, rule: Clustered) -> None:
        super().__init__(setting)
        communicator = self.collectives.communicator
        stream = self.collectives.bucket_schedules[0].stream
        wanted = Inventory(topology=communicator.topology, use=rule.features or None)
        gpu, reads = gpu_of(self.buckets), rule.features is None or len(rule.features) > 0
        read = partial(read_machine, gpu=gpu) if reads and isinstance(rule.clusters, str | int) else None
        self.inventory = measure_hosts(self.collectives.control, wanted, read=read)
        self.clusters: Clusters = agree_on_clusters(
            self.collectives.control, self.inventory, clusters=rule.clusters, seed=SEED
        )
        self.record_schedule = rule.record_schedule(len(self.clusters))
        sums = rule.period > 1 and not rule.is_literal and self.record_schedule.has_outer_rounds
        self._period = Period(forecast_weight=rule.forecast) if sums else None
        self._shape = VectorShape.of(self.buckets)
        self._contributions = Contributions(self._shape) if rule.is_literal else None
        name = f"clustered update {self.clusters} {self.record_schedule} literal={rule.is_literal}"
        port = communicator.open_port(name)
        node = Node(
            job=f"{SEED}/{stream}",
            rank=port.rank,
            clusters=self.clusters,
            record_schedule=self.record_schedule,
            arithmetic=VectorArithmetic(),
            quorum=rule.quorum,
            reclusters=rule.recluster_every > 0,
        )
        self._driver = ClusterDriver(
            port,
            communicator,
            self._shape,
            node,
            stream=stream,
            timeout_s=self.collectives.timeout_s,
            trace=self.collectives.trace,
        )
        self._position = 0
        self._samples = 0.0
        self._present: Sequence[bool] = ()
        self._samples_of_period = 0.0
        self._samples_of_term = 0.0
        self._pace = Pace(gpu=gpu) if reads else None
        self._recluster_every = rule.recluster_every
        self._regrouping = Regrouping(
            inventory=self.inventory,
            num_clusters=rule.clusters if isinstance(rule.clusters, int) else None,
            seed=SEED,
        )
        self._driver.start()

    @property
    def checkpoint_writer(self) -> int:
        """The lowest rank that lives: one may be lost at any time, so nobody waits for all."""
        return self._driver.living[0]

    def begin_backward(self) -> None:
        """Raise why this rank cannot go on, if it cannot."""
        self._driver.raise_failure()

    def reduce(self, bucket: Bucket) -> None:
        """Wait for the step: a gradient is sent as the user leaves it, clipped if they do."""

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
        counted = self._driver.statistics()
        if self._contributions is not None:
            table = self._contributions.table.tolist()
            counted = replace(counted, contributions=tuple(map(tuple, table)))
        if self._pace is None:
            return counted
        return replace(counted, features=self._pace.summary(), history=self._pace.periods)

    def progress(self) -> str:
        """Say the term, who serves, and what this rank sent inside its cluster and between clusters."""
        return str(self._driver.statistics())

    def close(self) -> None:
        """Release everything."""
        self._driver.close()
        if self._pace is not None:
            self._pace.close()

    def _batch(self, samples: float, gradients: Vector | None) -> None:
        """Go through the records of one batch: its mean, and at a period's end the result and the average."""
        mean = self._mean(samples, gradients)
        if self.record_schedule.record(self._position).kind is Kind.RESULT:
            step_on = self._outer(mean)
        else:
            step_on = mean if self._period is None else self._period.step_on(mean)
        if step_on is not None:
            self._show(step_on)
            self.optimizer.step()
        if self.record_schedule.record(self._position).kind is Kind.AVERAGE:
            self._average()

    def _mean(self, samples: float, gradients: Vector | None) -> Vector | None:
        """Return the cluster's mean."""
        if self._pace is not None:
            self._pace.computed(is_batch=gradients is not None)
        mean: Vector | None = self._agree(samples, gradients, "cluster mean").payload
        if self._pace is not None:
            self._pace.began()
        return mean

    def _outer(self, mean: Vector | None) -> Vector | None:
        """Exchange what the period brought; return what to step on in the last batch."""
        brought = mean if self._period is None else self._period.bring(mean)
        samples, self._samples_of_period = self._samples_of_period, 0.0
        if self._pace is not None:
            self._pace.end_period()
        own = brought if brought is not None else self._shape.zeros()
        cluster = next(number for number, ranks in enumerate(self.clusters) if self.collectives.rank in ranks)
        if self._contributions is not None:
            own = self._contributions.bring(own, cluster, len(self.clusters))
        agreed = self._agree(samples, own, "exchange of clusters", measurement=self._measurement())
        result: Vector | None = agreed.payload
        if self._contributions is not None and result is not None:
            result = self._contributions.weigh(result, agreed.samples, cluster)
        if self._period is not None:
            return self._period.end(mean, result)
        return mean if result is None else result

    def _average(self) -> None:
        """Average the parameters over the clusters."""
        own = self._shape.zeros()
        for bucket, part in zip(self.buckets, own.parts, strict=False):
            bucket.stage_parameters()
            part.copy_(bucket.wire_parameters)
        samples, self._samples_of_term = self._samples_of_term, 0.0
        average = self._agree(samples, own, "average of parameters", clusters=self._propose()).payload
        if average is None:
            return
        for bucket, part in zip(self.buckets, average.parts, strict=False):
            bucket.wire_parameters.copy_(part)
            bucket.unstage_parameters()

    def _is_regrouping(self) -> bool:
        """Whether the term of the next record is one after which clusters may be made anew."""
        term = self.record_schedule.record(self._position).term
        return self._recluster_every > 0 and (term + 1) % self._recluster_every == 0

    def _measurement(self) -> Measurement:
        """Return what this rank's machine measured in past periods, where clusters may follow from it."""
        return tuple(sorted(self._pace.summary().items())) if self._is_regrouping() and self._pace is not None else ()

    def _propose(self) -> Clusters:
        """Return new clusters if this rank is the one to propose them, and finds better ones."""
        if not self._is_regrouping():
            return ()
        start_s = time.monotonic()
        measurements = self._driver.measurements()
        living = self._driver.living
        proposed = self._regrouping.propose(self.clusters, measurements, living=living)
        if self._pace is not None:
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

    def _agree(
        self,
        samples: float,
        payload: Vector | None,
        phase: str,
        *,
        measurement: Measurement = (),
        clusters: Clusters = (),
    ) -> Agreed:
        """Provide what the next record needs, wait for it, and return it."""
        start_s = time.monotonic()
        self._driver.provide(samples=samples, payload=payload, measurement=measurement, clusters=clusters)
        record, agreed = self._driver.wait(phase)
        assert record.index == self._position, f"record {record.index} came in place of {self._position}"
        self._position += 1
        if self._pace is not None:
            self._pace.waited(time.monotonic() - start_s)
        if record.kind is Kind.MEAN:
            self._samples_of_period += agreed.samples[0]
            self._samples_of_term += agreed.samples[0]
        if agreed.clusters:
            self._move(agreed)
        return agreed

    def _is_at_start(self) -> bool:
        if self._position == 0 or not self.record_schedule.has_outer_rounds:
            return True
        last = self.record_schedule.record(self._position - 1)
        return last.kind is (Kind.AVERAGE if self.record_schedule.averages else Kind.RESULT)

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


def gpu_of(buckets: Sequence[Bucket]) -> int | None:
    """Return the number of the CUDA device that a model trains on; None if that is not known."""
    indices = [bucket.plan.device.index for bucket in buckets if bucket.plan.device.type == "cuda"]
    if indices and indices[0] is not None:
        return indices[0]
    has_begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.current_device() if has_begun else None
