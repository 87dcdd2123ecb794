"""How an update rule moves its buckets: each by its own schedule, as urgently as its place in the step asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch

from syncline.priorities.settings import Priorities
from syncline.runtime.communicator import Communicator
from syncline.runtime.work import Work
from syncline.runtime.worker_thread import WorkerThread
from syncline.schedule import Collective
from syncline.tensors.device_copies import HostCopy
from syncline.tensors.memory import summands_of
from syncline.updates.bucket import Bucket, BucketPlan
from syncline.updates.bucket_schedule import BucketSchedule
from syncline.updates.control import ControlStream
from syncline.updates.state import StateEntry, StateSource

MOST_SHARED_BYTES = 2 << 20
"""Of a bucket that moves through a segment; communication threads move what is larger, under the computation."""


class Crossing(Protocol):
    """Another way for buckets, in fewer bytes (:mod:`.compression`)."""

    def start(self, index: int, collective: Collective, step: int | None, values: torch.Tensor) -> Work | None:
        """Begin to move ``values``, as many as a bucket has; None if they go the usual way."""

    def keep(self, bucket: Bucket) -> None:
        """Keep the owned parameters of a bucket, before they are stepped."""

    def close(self) -> None:
        """Give up what is under way."""

    def state_entries(self) -> Iterable[StateEntry]:
        """Yield what belongs in a checkpoint."""

    def load_state(self, source: StateSource) -> None:
        """Take that from one."""


def begin_when_loaded(
    thread: WorkerThread, communicator: Communicator, copy: HostCopy, start: Callable[[], Work], label: str
) -> Work:
    """Return the work of a call that ``start`` begins when ``copy`` has what was loaded last from a device.

    ``thread`` waits for the copies, in the order in which they were queued, which is that in which they are done.
    """
    work, trace = communicator.begin_work(label), communicator.trace
    start_ns = trace.now_ns()

    def begin() -> None:
        try:
            copy.wait()
            trace.span(f"for {label}", "from device", start_ns, trace.now_ns())
            call = start()
        except Exception as error:
            work.end(error)
        else:
            call.add_done_callback(lambda call: work.finish(call.exception()))

    thread.submit(0, (), begin)
    return work


class BucketCollectives:
    """Starts collectives on buckets. Buckets may be started in any order, and from any thread."""

    def __init__(
        self,
        communicator: Communicator,
        *,
        control: ControlStream,
        bucket_schedules: tuple[BucketSchedule, ...],
        connection_class: int = 0,
    ) -> None:
        self.timeout_s = communicator.timeout_s
        """How long any of its calls may take."""
        self.trace = communicator.trace
        self.crossing: Crossing | None = None
        self.thread = WorkerThread("syncline-calls", on_failure=lambda _: None)  # works tell of failures
        """Begins calls once what they need is there, in place of the training thread."""
        self.control = control
        self.classes = (connection_class,) * len(bucket_schedules)
        """The connection class of each bucket, for pushes and pulls alike."""
        self.enter(communicator, bucket_schedules)

    def enter(self, communicator: Communicator, bucket_schedules: tuple[BucketSchedule, ...]) -> None:
        """Make all further calls on ``communicator``, by these schedules: in an elastic job, that of a new epoch."""
        self.communicator = communicator
        """What it moves them on, for rules that do more than collectives."""
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self.bucket_schedules = bucket_schedules
        self._stream = bucket_schedules[0].stream if bucket_schedules else 0
        if bucket_schedules:
            communicator.connection_classes.assign(self._stream, self.classes)

    def share_memory(self, bucket_bytes: Sequence[int]) -> None:
        """Let the smallest bucket move through memory that the ranks share, if they share any; all call this alike.

        What a call costs decides there, not its bytes. It is one bucket: more would hold up the computation with their
        copies, which communication threads make beside it. Where links have rates, though all ranks run on one machine,
        a network is tried out: all goes by the plan.
        """
        communicator = self.communicator
        smallest = min(self.bucket_schedules, key=lambda one: bucket_bytes[one.stream - self._stream])
        is_small = bucket_bytes[smallest.stream - self._stream] <= MOST_SHARED_BYTES
        if communicator.has_segment and is_small and not communicator.topology.has_rates:
            communicator.open_segment(stream=smallest.stream)

    def assign_classes(self, classes: Sequence[int], priorities: Priorities) -> None:
        """Let each bucket travel on its class from the next call on; what is missing for that is opened before."""
        assert len(classes) == len(self.bucket_schedules), "one class for each bucket"
        self.communicator.connection_classes.assign(self._stream, classes, priorities)
        self.classes = tuple(classes)

    def start(
        self,
        bucket: Bucket | BucketPlan,
        collective: Collective,
        step: int | None,
        *,
        values: torch.Tensor | None = None,
        is_exact: bool = False,
    ) -> Work:
        """Begin to move a bucket: to sum its gradients over all ranks, or to gather its parameters from their owners.

        After a reduce-scatter each range of the sum is at its owner, and the rest is spoilt. ``values`` are moved in
        place of the bucket's own, one for each of its elements; a plan has none. With ``is_exact`` they are
        not coded where others are: optimizer state has neither earlier values, nor a share in what codes lack.

        Gradients go in backward order, as they begin and since nothing waits for single buckets, and before all
        parameters, which go in forward order. Some gradients are left over at the end of a backward pass only where
        links are slower than it; then the next forward pass, half as long, is done while parameters arrive, and the
        links are never idle in front of the last all-gathers.
        """
        is_gather = collective is Collective.ALL_GATHER
        num_buckets = len(self.bucket_schedules)
        index = bucket.index
        bucket_schedule = self.bucket_schedules[index]
        copy = None
        if values is None:
            assert isinstance(bucket, Bucket), "a plan has no values"
            values = bucket.wire_parameters if is_gather else bucket.wire_gradients
            copy = bucket.parameter_copy if is_gather else bucket.gradient_copy
        if self.crossing is not None and not is_exact:
            if copy is not None:
                copy.wait()
            if (work := self.crossing.start(index, collective, step, values)) is not None:
                return work
        label = f"{collective.value} of bucket {index}"
        start = partial(
            self.communicator.start,
            bucket_schedule.schedules[collective],
            *summands_of(values),
            layout=bucket_schedule.layout,
            stream=bucket_schedule.stream,
            urgency=num_buckets + index if is_gather else num_buckets - 1 - index,
            connection_class=self.classes[index],
            label=label,
            step=step,
        )
        return start() if copy is None else begin_when_loaded(self.thread, self.communicator, copy, start, label)

    def close(self) -> None:
        """Give up what crosses slow links, and begin no more calls."""
        self.thread.close()
        if self.crossing is not None:
            self.crossing.close()
