"""How an update rule moves its buckets: each by its own schedule, as urgently as its place in the step asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from syncline.observe import Trace
from syncline.runtime.communicator import Communicator
from syncline.runtime.work import Work
from syncline.schedule import Collective
from syncline.updates.bucket import Bucket
from syncline.updates.bucket_schedule import BucketSchedule
from syncline.updates.control import ControlStream
from syncline.updates.memory import bytes_of, reduction_for


class BucketCollectives:
    """Starts collectives on buckets. Buckets may be started in any order, and from any thread."""

    def __init__(
        self,
        communicator: Communicator,
        *,
        control: ControlStream,
        bucket_schedules: tuple[BucketSchedule, ...],
        trace: Trace,
        timeout_s: float,
    ) -> None:
        self._communicator = communicator
        self._timeout_s = timeout_s
        self.control = control
        self.bucket_schedules = bucket_schedules
        self.trace = trace
        self._gather_began: Callable[[int], None] | None = None
        self._gather_ended: Callable[[int], None] | None = None
        self.assign_classes((0,) * len(bucket_schedules))

    @property
    def communicator(self) -> Communicator:
        """What it moves them on, for rules that do more than collectives."""
        return self._communicator

    @property
    def rank(self) -> int:
        """This rank."""
        return self._communicator.rank

    @property
    def timeout_s(self) -> float:
        """How long any of its calls may take."""
        return self._timeout_s

    @property
    def classes(self) -> tuple[int, ...]:
        """The connection class of each bucket, for pushes and pulls alike."""
        return self._classes

    def assign_classes(self, classes: Sequence[int]) -> None:
        """Let each bucket travel on its class, from the next call on."""
        assert len(classes) == len(self.bucket_schedules), "one class for each bucket"
        self._classes = tuple(classes)
        if self.bucket_schedules:
            self._communicator.note_classes(self.bucket_schedules[0].stream, self._classes)

    def watch_gathers(self, began: Callable[[int], None], ended: Callable[[int], None]) -> None:
        """Tell of each all-gather of parameters, by bucket, when it begins and when it has ended; from any thread."""
        self._gather_began, self._gather_ended = began, ended

    def start(
        self, bucket: Bucket, collective: Collective, step: int | None, *, values: torch.Tensor | None = None
    ) -> Work:
        """Begin to move a bucket: to sum its gradients over all ranks, or to gather its parameters from their owners.

        After a reduce-scatter each range of the sum is at its owner, and the rest is spoilt. ``values`` are moved in
        place of the bucket's own, one for each of its elements.

        Gradients go in backward order, as they begin and since nothing waits for single buckets, and before all
        parameters, which go in forward order. Some gradients are left over at the end of a backward pass only where
        links are slower than it; then the next forward pass, half as long, is done while parameters arrive, and the
        links are never idle in front of the last all-gathers.
        """
        is_gather = collective is Collective.ALL_GATHER
        num_buckets = len(self.bucket_schedules)
        bucket_schedule = self.bucket_schedules[bucket.index]
        if values is None:
            values = bucket.wire_parameters if is_gather else bucket.wire_gradients
        return self._communicator.start(
            bucket_schedule.schedules[collective],
            bytes_of(values),
            reduction_for(values.dtype),
            layout=bucket_schedule.layout,
            stream=bucket_schedule.stream,
            urgency=num_buckets + bucket.index if is_gather else num_buckets - 1 - bucket.index,
            connection_class=self._classes[bucket.index],
            label=f"{collective.value} of bucket {bucket.index}",
            step=step,
            timeout_s=self._timeout_s,
        )

    def note_wait(self, phase: str, start_ns: int) -> None:
        """Record that a thread waited since ``start_ns`` because of ``phase``."""
        end_ns = self.trace.now_ns()
        self._communicator.note_wait(phase, (end_ns - start_ns) / 1e9)
        self.trace.span(phase, "wait", start_ns, end_ns)

    def wait(self, work: Work, phase: str) -> None:
        """Wait for ``work``, and record how long that took."""
        if work.done():
            work.wait()
            return
        start_ns = time.monotonic_ns()
        work.wait()
        self.note_wait(phase, start_ns)
