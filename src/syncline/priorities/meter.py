"""What one rank measures of a step: when all-gathers began and ended, and what the forward pass computed in between."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One forward pass and the all-gathers that it waited for; sequences go by bucket."""

    forward_s: tuple[float, ...]
    """Computing time from the first need of this bucket to the first need of another."""
    issued_s: tuple[float, ...]
    """When its all-gather began, counted from the beginning of the forward pass."""
    bytes_per_s: float
    """Bytes of all buckets over the time in which any of them was under way."""
    time_s: float
    """The whole forward pass, waits and all."""

    def values(self) -> list[float]:
        """Return it as numbers that can be summed over ranks."""
        return [*self.forward_s, *self.issued_s, self.bytes_per_s, self.time_s]

    @classmethod
    def of_values(cls, values: Sequence[float], num_buckets: int) -> StepSample:
        """Take back what :meth:`values` gave."""
        return cls(
            forward_s=tuple(values[:num_buckets]),
            issued_s=tuple(values[num_buckets : 2 * num_buckets]),
            bytes_per_s=values[-2],
            time_s=values[-1],
        )


def median_of(samples: Sequence[StepSample]) -> StepSample:
    """Return the median of each quantity: a step that was disturbed counts for nothing."""
    columns = zip(*(sample.values() for sample in samples), strict=True)
    return StepSample.of_values([statistics.median(column) for column in columns], len(samples[0].forward_s))


class StepMeter:
    """Measures one step after another; all-gathers and needs are told from any thread, all else from the training's.

    Only the training thread's needs count. ``clock`` returns seconds.
    """

    def __init__(self, num_bytes: Sequence[int], clock: Callable[[], float]) -> None:
        self._num_bytes = tuple(num_bytes)
        self._clock = clock
        self._lock = threading.Lock()
        self._started_s: dict[int, float] = {}
        self._ended_s: dict[int, float] = {}
        self._begin_s: float | None = None
        self._thread = 0
        self._mark_s = 0.0
        self._forward_s: list[float] = []
        self._needed: set[int] = set()
        self._current: int | None = None

    def begin_step(self) -> None:
        """Forget the last step: all-gathers of a new one are about to begin."""
        with self._lock:
            self._started_s.clear()
            self._ended_s.clear()
        self._begin_s = None

    def gather_began(self, bucket: int) -> None:
        """Note that a bucket's all-gather was handed to the engine."""
        with self._lock:
            self._started_s[bucket] = self._clock()
            self._ended_s.pop(bucket, None)

    def gather_ended(self, bucket: int) -> None:
        """Note that a bucket has arrived."""
        with self._lock:
            self._ended_s[bucket] = self._clock()

    def begin_forward(self) -> None:
        """Note that the forward pass begins."""
        self._thread = threading.get_ident()
        self._begin_s = self._mark_s = self._clock()
        self._forward_s = [0.0] * len(self._num_bytes)
        self._needed = set()
        self._current = None

    def needed(self, buckets: Collection[int]) -> None:
        """Note that the forward pass needs these, and computes no more until :meth:`available`."""
        if self._are_new(buckets):
            self._count()

    def available(self, buckets: Collection[int]) -> None:
        """Note that they are there; what is computed from now on counts for the last of them that is new."""
        if self._are_new(buckets):
            self._mark_s = self._clock()
            self._current = max(bucket for bucket in buckets if bucket not in self._needed)
            self._needed.update(buckets)

    def end_forward(self) -> StepSample | None:
        """Return the step's sample; None if not all buckets were gathered for it, or it was measured before."""
        if self._begin_s is None:
            return None
        self._count()
        begin_s, self._begin_s = self._begin_s, None
        with self._lock:
            started_s, ended_s = dict(self._started_s), dict(self._ended_s)
            self._started_s.clear()
        everything = range(len(self._num_bytes))
        if not all(bucket in started_s and bucket in ended_s for bucket in everything):
            return None
        busy_s = _union_s([(started_s[bucket], ended_s[bucket]) for bucket in everything])
        return StepSample(
            forward_s=tuple(self._forward_s),
            issued_s=tuple(started_s[bucket] - begin_s for bucket in everything),
            bytes_per_s=sum(self._num_bytes) / max(busy_s, 1e-9),
            time_s=self._clock() - begin_s,
        )

    def _are_new(self, buckets: Collection[int]) -> bool:
        is_measured = self._begin_s is not None and threading.get_ident() == self._thread
        return is_measured and not self._needed.issuperset(buckets)

    def _count(self) -> None:
        """Count the computing since the last wait; before the first need it belongs to the first bucket."""
        self._forward_s[self._current or 0] += self._clock() - self._mark_s


def _union_s(spans: Iterable[tuple[float, float]]) -> float:
    """Return the time that is covered by any span."""
    total_s, reached_s = 0.0, float("-inf")
    for start_s, end_s in sorted(spans):
        total_s += max(0.0, end_s - max(start_s, reached_s))
        reached_s = max(reached_s, end_s)
    return total_s
