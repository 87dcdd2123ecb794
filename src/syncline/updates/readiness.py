"""Which buckets' parameters are final: the training thread waits here, the other threads report here.

This is the one place that knows when each bucket is under way and who needs it, so a meter of steps listens here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from syncline.errors import DeadlineError
from syncline.priorities.meter import StepMeter


class Readiness:
    """A flag for each bucket, and the first failure, which every later wait raises again.

    Whoever has to wait does so within ``waiting()``.
    """

    def __init__(self, num_buckets: int, waiting: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._waiting = waiting
        self._meter: StepMeter | None = None
        self._final = [True] * num_buckets
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

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
        if self._meter is not None:
            self._meter.gather_began(bucket)

    def finish(self, bucket: int) -> None:
        """Note that the parameters of ``bucket`` are final."""
        if self._meter is not None:
            self._meter.gather_ended(bucket)
        with self._changed:
            self._final[bucket] = True
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
        """Wait until these buckets are final; raises the first failure, or :class:`DeadlineError`, if they are not."""
        wanted = tuple(buckets)
        if self._meter is not None:
            self._meter.needed(wanted)
        if not self.is_final(wanted):
            with self._waiting():
                self._wait(wanted, timeout_s)
        if self._meter is not None:
            self._meter.available(wanted)

    def _wait(self, wanted: tuple[int, ...], timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self.is_final(wanted), timeout_s)
            if self._failure is not None:
                raise self._failure
            late = [index for index in wanted if not self._final[index]]
        if late:
            raise DeadlineError(
                f"The parameters of buckets {late} were not updated and gathered within {timeout_s:g} s; "
                "look for a rank that did not call step(), or raise the timeout of init()"
            )
