"""Which buckets' parameters are final: the training thread waits here, the other threads report here.

This is the one place that knows when each bucket is under way and who needs it, so a meter of steps listens here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from syncline.errors import UpdateError
from syncline.priorities.meter import StepMeter
from syncline.runtime.work import GRACE_S


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
