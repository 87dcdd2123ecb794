"""The sharded update: reduce-scatter the gradients, step the own shard, all-gather the parameters.

A bucket's reduce-scatter runs under the rest of the backward pass. ``step()`` takes a snapshot of the hyper-parameters;
an update thread steps this rank's shard of each bucket, front layers first, and starts its all-gather. ``step()``
waits for that, unless the user asks that it run under the next forward pass. State exists for owned elements alone.

After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), stage 1 and 2,
with shards that follow the topology's tree in place of equal ones.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from syncline.errors import UpdateError
from syncline.priorities.meter import StepMeter
from syncline.runtime.work import GRACE_S, Work
from syncline.runtime.worker_thread import WorkerThread
from syncline.schedule import Collective
from syncline.schedule.spares import Apart
from syncline.schedule.step_candidates import BALANCED
from syncline.updates.bucket import Bucket
from syncline.updates.bucket_schedule import BucketSchedule
from syncline.updates.control import ControlStream
from syncline.updates.divided import DividedGradients, GradientsOfStep, clip_factor
from syncline.updates.inner import all_hyperparameters
from syncline.updates.ownership import Portions
from syncline.updates.peer_state import HeldState, PeerState, StatePart, redistribute
from syncline.updates.report import PendingReport
from syncline.updates.rule import Setting, Updater
from syncline.updates.shard import Shard, segments_of
from syncline.updates.state import StateEntry, StateSource
from syncline.variables import process_variables

_log = logging.getLogger(__name__)


# Which buckets' parameters are final: the training thread waits here, the other threads report here.
#
# This is the one place that knows when each bucket is under way and who needs it, so a meter of steps listens here.


class Readiness:
    """A flag for each bucket, and the first failure, which every later wait raises again.

    Whoever has to wait does so within ``waiting()``, and until the collectives beneath have ended: they have the one
    deadline, and their errors name who was late. Behind it is a backstop against faults of our own, which nothing that
    a collective or a rank does can reach: ``timeout_s``, that of collectives, and once more, and a grace besides,
    without a bucket that went on.
    """

    def __init__(self, num_buckets: int, waiting: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._waiting = waiting
        self._meter: StepMeter | None = None
        self._final = [True] * num_buckets
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._went_on_s = time.monotonic()

    def watch(self, meter: StepMeter) -> None:
        """Tell ``meter`` from now on of each bucket that is gathered, and of each that is needed."""
        self._meter = meter

    def is_final(self, buckets: Iterable[int]) -> bool:
        """Whether no wait is needed for these buckets; True also if something failed before they were begun."""
        return all(self._final[index] for index in buckets)

    def begin(self) -> None:
        """All parameters are about to change."""
        with self._changed:
            self._final = [False] * len(self._final)

    def gather(self, bucket: int) -> None:
        """Note that the parameters of ``bucket`` are on their way to this rank."""
        with self._changed:
            self._went_on_s = time.monotonic()
        if self._meter is not None:
            self._meter.gather_began(bucket)

    def finish(self, bucket: int) -> None:
        """Note that the parameters of ``bucket`` are final."""
        if self._meter is not None:
            self._meter.gather_ended(bucket)
        with self._changed:
            self._final[bucket] = True
            self._went_on_s = time.monotonic()
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Nothing will become final any more; the first error is the one that is told."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()

    def raise_failure(self) -> None:
        """Raise the first failure, if there was one."""
        if self._failure is not None:
            raise self._failure

    def wait(self, buckets: Iterable[int], timeout_s: float) -> None:
        """Wait until these buckets are final; raises the first failure if they never are."""
        wanted = tuple(buckets)
        if self._meter is not None:
            self._meter.needed(wanted)
        if not self.is_final(wanted):
            with self._waiting():
                self._wait(wanted, timeout_s)
        if self._meter is not None:
            self._meter.available(wanted)

    def _wait(self, wanted: tuple[int, ...], timeout_s: float) -> None:
        """Wait; a collective may begin when another ends, so that two of their times go by between two buckets."""
        limit_s = 2 * timeout_s + GRACE_S
        with self._changed:
            self._went_on_s = time.monotonic()
            while self._failure is None and not self.is_final(wanted):
                left_s = self._went_on_s + limit_s - time.monotonic()
                if left_s <= 0:
                    late = [index for index in wanted if not self._final[index]]
                    raise UpdateError(
                        f"No bucket was updated or gathered for {limit_s:g} s and no collective has failed, so this "
                        f"rank's own update thread does not go on (buckets {late}); look where it is (py-spy dump "
                        "--pid), or give syncline.init() a longer timeout if the optimizer steps for so long"
                    )
                self._changed.wait(left_s)
            if self._failure is not None:
                raise self._failure


_ALIKE = 0.01
_MOST_LISTED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedStatistics:
    """How the parameters, and with them the optimizer's state, are divided among the ranks.

    >>> model, optimizer = syncline.distribute(model, optimizer, syncline.Sharded())
    >>> print(optimizer.statistics())
    portions="balanced": each rank owns 100.0 % of 10 elements
    """

    portions: Literal["balanced", "fastest", "given"] | float
    """What was asked for; "given" are those of a mapping."""
    shares: tuple[float, ...]
    """The part of all elements that each rank owns; what it is the spare of counts."""
    num_elements: int
    """Of all parameters in buckets."""
    num_replicas: int = 1
    """How many parts of the job own all elements, each by itself."""
    spares: Apart | None = None
    """What each range's owner and its spare are apart by: other racks, hosts or ranks; None without spares."""

    @classmethod
    def of(cls, bucket_schedules: Sequence[BucketSchedule], portions: Portions) -> ShardedStatistics:
        """Count what the ranks own of all buckets."""
        owned = [sum(numbers) for numbers in zip(*(one.num_owned for one in bucket_schedules), strict=True)]
        num_elements = sum(one.layout.num_elements for one in bucket_schedules)
        return cls(
            portions="given" if isinstance(portions, Mapping) else portions,
            shares=tuple(number / max(1, num_elements) for number in owned),
            num_elements=num_elements,
            num_replicas=max(1, len(bucket_schedules[0].replicas)) if bucket_schedules else 1,
            spares=bucket_schedules[0].apart if bucket_schedules else None,
        )

    @property
    def is_balanced(self) -> bool:
        """Whether no rank owns more than 1.25 / N, or twice that with what it is the spare of."""
        return max(self.shares, default=0.0) * len(self.shares) <= BALANCED * (1 + _ALIKE) * (
            1 if self.spares is None else 2
        )

    def __str__(self) -> str:
        """One line for people."""
        least, most = min(self.shares, default=0.0), max(self.shares, default=0.0)
        if math.isclose(least, most, rel_tol=_ALIKE):
            owned = f"each rank owns {_percent(most)} of {self.num_elements} elements"
        else:
            listed = ", ".join(
                f"rank {rank} {_percent(share)}" for rank, share in enumerate(self.shares[:_MOST_LISTED])
            )
            more = ", ..." if len(self.shares) > _MOST_LISTED else ""
            owned = f"of {self.num_elements} elements ranks own {_percent(least)} to {_percent(most)}: {listed}{more}"
        if self.spares is not None:
            return f"a spare of each range in another {self.spares}: {owned}"
        if self.num_replicas > 1:
            return f"{self.num_replicas} replicas: {owned}"
        if self.portions == "balanced" and not self.is_balanced:
            owned += (
                "; with at most 1.25 / N each the predicted step would be more than 10 % longer, or parameters are too "
                "large, or gateways or the memory of hosts leave others too little"
            )
        asked = f'"{self.portions}"' if isinstance(self.portions, str) else f"{self.portions:g}"
        return f"portions={asked}: {owned}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


class ShardedUpdater(Updater):
    """The sharded update at work on one model."""

    divides_gradients = True

    def __init__(
        self,
        setting: Setting,
        *,
        whole_parameters: bool,
        overlap_forward: bool,
        portions: Portions,
    ) -> None:
        super().__init__(setting)
        self._whole_parameters, self._portions = whole_parameters, portions
        self.defers_parameters = overlap_forward
        self._checks_stale = overlap_forward and process_variables().get("SYNCLINE_CHECK_STALE") == "1"
        self._follow_schedules()
        if self.collectives.rank == 0:
            _log.info("%s", self._statistics)
        num_parameters = sum(len(bucket.plan.slots) for bucket in self.buckets)
        self._gradients = DividedGradients(
            self.buckets,
            self.shards,
            self.collectives,
            num_parameters=num_parameters,
            is_counted=self.is_in_first_replica,
        )
        self._ready = Readiness(len(self.buckets), self._waiting)
        self._thread = WorkerThread(f"syncline-update-{self.collectives.rank}", on_failure=self._fail)
        if overlap_forward and not self.steps_in_backward:
            setting.tuner.tune(self._ready.watch)

    @property
    def divided_gradients(self) -> DividedGradients:
        """The combined gradients, for norms and scaling; waits until they are there, and a step on them is over."""
        self.synchronize()
        self._gradients.inspect()
        return self._gradients

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:
        """This rank's optimizer state, by the pieces that it owns."""
        return {tensor: state for shard in self.shards for tensor, state in shard.state.items()}

    @property
    def num_state_bytes(self) -> int:
        """Memory of this rank's optimizer state, which grows until the step is over."""
        self.synchronize()
        return sum(shard.num_state_bytes for shard in self.shards)

    def statistics(self) -> ShardedStatistics:
        """Return which rank owns how much."""
        return self._statistics

    def begin_backward(self) -> None:
        """Make ready for new gradients; raises what went wrong since the last step."""
        self._ready.raise_failure()
        self._gradients.begin_pass()

    def reduce(self, bucket: Bucket) -> None:
        """Start the reduce-scatter of a bucket."""
        bucket.stage_gradients()
        self._gradients.add(bucket, self.collectives.start(bucket, Collective.REDUCE_SCATTER, self.step_number))

    def finish_backward(self, report: PendingReport) -> None:
        """Keep the report for the step; nothing is waited for, unless gradients of earlier passes are to be added."""
        self._gradients.end_pass(report)

    def step(self) -> None:
        """Hand the step to the update thread, and return."""
        self._ready.raise_failure()
        gradients = self._gradients.hand_over()
        options = all_hyperparameters(self.optimizer)  # as they are now
        update = partial(self._update, self.step_number, gradients, options)
        self._ready.begin()
        if self._checks_stale and self.collectives.crossing is None:  # which adds to the old values
            for bucket, shard in zip(self.buckets, self.shards, strict=True):
                bucket.poison((segment.start, segment.stop) for segment in shard.segments)
        for bucket, reduction in zip(self.buckets, gradients.reductions, strict=True):
            bucket.allow_step()
            needed = gradients.report.work, reduction
            ready = [work for work in needed if not work.is_made_by_waiting]  # the job waits, and makes it
            self._thread.submit(bucket.index, ready, partial(update, bucket, reduction))
        self.step_number += 1

    def carry(self, kept: Sequence[bool]) -> None:
        """Let the next pass add to the gradients of these positions."""
        if any(kept):
            self.synchronize()
        self._gradients.carry(kept)

    def drop(self, positions: Sequence[int]) -> None:
        """Leave these parameters out of the next step."""
        self._gradients.drop(positions)

    def discard(self) -> None:
        """Forget the combined gradients."""
        self._gradients.discard()

    def wait_parameters(self, buckets: Iterable[int]) -> None:
        """Wait until the all-gather of these buckets is over."""
        self._ready.wait(buckets, self.collectives.timeout_s)

    def synchronize(self) -> None:
        """Wait until all parameters are final; raises what went wrong."""
        self.wait_parameters(range(len(self.buckets)))
        self._ready.raise_failure()

    def clip_grad_norm(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> torch.Tensor:
        """Scale the gradients to a norm of at most ``max_norm``; one number per rank is moved."""
        gradients = self.divided_gradients
        total = gradients.total_norm(norm_type)
        if error_if_nonfinite and not math.isfinite(total):
            raise UpdateError(
                f"The total norm of order {norm_type} of the gradients is {total}, so it cannot be clipped"
            )
        gradients.scale(clip_factor(total, max_norm))
        return torch.tensor(total, dtype=self.buckets[0].plan.dtype, device=self.buckets[0].plan.device)

    def state_entries(self) -> list[StateEntry]:
        """Return the state of the owned elements."""
        self.synchronize()
        return [entry for shard in self.shards for entry in shard.state_entries()]

    def load_state(self, source: StateSource) -> None:
        """Take the owned part of the state."""
        self.synchronize()
        for shard in self.shards:
            shard.load_state(source)

    def divide_anew(self) -> None:
        """Divide state as the schedules say that the buckets have by now, between two steps."""
        self._gradients.forget_stepped()
        held, wanted = self._held(), self._wanted(self.buckets)
        self._take_over(redistribute(self._control_of_move(), held, wanted, distance=self._distance))

    def held_state(self) -> list[HeldState]:
        """Return the state that this rank keeps, which outlives this updater."""
        return [held for shard in self.shards for _, held in shard.pieces()]

    def close(self) -> None:
        """End the update thread, and give up what crosses slow links."""
        self._thread.close()
        self.collectives.close()

    def _fail(self, error: BaseException) -> None:
        self._ready.fail(error)

    def _waiting(self) -> AbstractContextManager[None]:
        return self.collectives.communicator.progress.waiting()

    def _update(
        self,
        number: int,
        gradients: GradientsOfStep,
        options: Sequence[Mapping[str, Any]],
        bucket: Bucket,
        reduction: Work,
    ) -> None:
        """Step the shard of one bucket and start its all-gather; on the update thread."""
        reduction.wait()
        present, factors = gradients.present(), gradients.factors()
        if gradients.scales is None:
            bucket.unstage_gradients()
        self._step_shard(bucket, number, options, present=present, factors=factors)
        self._ready.gather(bucket.index)
        gather = self.collectives.start(bucket, Collective.ALL_GATHER, number)
        if bucket.parameter_copy is None:
            gather.add_done_callback(partial(self._finish, bucket))
        else:
            self._thread.submit(bucket.index, (gather,), partial(self._finish, bucket, gather))

    def _step_shard(
        self,
        bucket: Bucket,
        number: int,
        options: Sequence[Mapping[str, Any]],
        *,
        present: Sequence[bool],
        factors: Sequence[float],
        may_undo: bool = False,
    ) -> None:
        trace = self.collectives.trace
        start_ns = trace.now_ns()
        shard = self.shards[bucket.index]
        if self.collectives.crossing is not None:
            self.collectives.crossing.keep(bucket)
        with self.collectives.communicator.progress.working():
            bucket.begin_step()
            shard.scale(factors)
            shard.step(options[bucket.plan.group], present, may_undo=may_undo)
            bucket.stage_parameters()
        trace.span(f"update of bucket {bucket.index}", "update", start_ns, trace.now_ns(), step=number)

    def _finish(self, bucket: Bucket, gather: Work) -> None:
        error = gather.exception()
        if error is not None:
            self._ready.fail(error)
            return
        trace = self.collectives.trace
        start_ns = trace.now_ns()
        bucket.unstage_parameters()
        if bucket.parameter_copy is not None:
            trace.span(f"after {gather.label}", "to device", start_ns, trace.now_ns())
        self._ready.finish(bucket.index)

    def _take_over(self, source: PeerState | None) -> None:
        """Keep what the schedules say, with the state and gradients that ``source`` has; None: they are lost."""
        self._follow_schedules()
        if source is not None:
            for shard in self.shards:
                shard.load_state(source)
        self._gradients.move(self.shards, source)

    def _follow_schedules(self) -> None:
        """Own what the buckets' schedules say, without any state."""
        schedules = self.collectives.bucket_schedules
        self.shards = [self._new_shard(bucket) for bucket in self.buckets]
        self.replicas = schedules[0].replicas
        self.is_in_first_replica = not self.replicas or self.collectives.rank in self.replicas[0]
        self._statistics = ShardedStatistics.of(schedules, self._portions)

    def _control_of_move(self) -> ControlStream:
        """Return what moves state, on the stream of a bucket: no other call is under way."""
        communicator, schedules = self.collectives.communicator, self.collectives.bucket_schedules
        return ControlStream(communicator, stream=schedules[0].stream)

    def _distance(self, source: int, destination: int) -> int:
        """Return the number of links between two ranks."""
        return len(self.collectives.communicator.topology.route(source, destination))

    def _new_shard(self, bucket: Bucket) -> Shard:
        schedule = self.collectives.bucket_schedules[bucket.index]
        whole = self._whole_parameters
        return Shard(bucket, schedule.owned, self.optimizer, whole_parameters=whole, spared=schedule.spared)

    def _held(self) -> list[HeldState]:
        """Return all that is divided, but for parameters."""
        beside = (
            HeldState(part=segment.part, divided=values) for segment, values in self._gradients.beside() if values
        )
        return [*self.held_state(), *beside]

    def _wanted(self, buckets: Sequence[Bucket]) -> list[list[StatePart]]:
        """Return what each rank is to have."""
        schedules = self.collectives.bucket_schedules
        return [
            [
                segment.part
                for bucket in buckets
                for segment in segments_of(bucket.plan.slots, schedules[bucket.index].held_by(rank))
            ]
            for rank in range(self.collectives.world_size)
        ]
