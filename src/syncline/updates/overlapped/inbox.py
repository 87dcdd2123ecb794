"""Three buffers in which a worker pulls the sums of one bucket, without copying any.

One holds the sum that was used last (the *base*, nothing at a period's start), one the newest that was pulled since,
and one is where the next will land. The training thread takes base and newest to read them; the loop's thread puts what
has landed in their places. Both hold the updater's lock when they call these methods.
"""

from __future__ import annotations

from syncline.updates.overlapped.terms import BucketTerms, Message, Terms


class PullBuffers:
    """Which of the buffers is what."""

    def __init__(self, bucket: BucketTerms, terms: Terms) -> None:
        self._bucket, self._terms = bucket, terms
        self._buffers = [bucket.make_down(terms) for _ in range(3)]
        self._free = [0, 1, 2]
        self._base: int | None = None
        self._newest: int | None = None
        self._early: int | None = None
        self._landing: int | None = None
        self._taken: tuple[int, int | None] | None = None
        self._was_reset = False
        self._average: int | None = None

    def begin_landing(self) -> Message | None:
        """Return the buffer in which the next message may land, if there is one and none lands yet."""
        if self._landing is not None:
            return None
        if not self._free:
            return None
        self._landing = self._free.pop()
        return self._buffers[self._landing]

    def landed(self) -> Message:
        """Return what has landed; one of the next three methods follows."""
        assert self._landing is not None
        return self._buffers[self._landing]

    def keep_newest(self) -> None:
        """Let what has landed be the newest sum."""
        self._release(self._newest)
        self._newest, self._landing = self._landing, None

    def keep_early(self) -> None:
        """Let what has landed be the newest sum of the next period, which this worker has not begun."""
        self._release(self._early)
        self._early, self._landing = self._landing, None

    def take_early(self) -> None:
        """Let the sum that came early be the newest one: its period has begun."""
        self._release(self._newest)
        self._newest, self._early = self._early, None

    def drop_early(self) -> None:
        """Forget the sum that came early."""
        self._release(self._early)
        self._early = None

    def keep_average(self) -> None:
        """Let what has landed be the average, perhaps once more."""
        self._release(self._average)
        self._average, self._landing = self._landing, None

    def drop_landed(self) -> None:
        """Let what has landed be forgotten (or, with nothing landed, what was to land)."""
        self._release(self._landing)
        self._landing = None

    def abandon_landing(self) -> bool:
        """Give up the buffer in which a message may land later; whether there was one."""
        if self._landing is None:
            return False
        self._buffers[self._landing] = self._bucket.make_down(self._terms)
        self._release(self._landing)
        self._landing = None
        return True

    def take(self) -> tuple[Message, Message | None]:
        """Return the newest sum and the base, to be read until ``give_back``."""
        assert self._newest is not None
        assert self._taken is None
        self._taken, self._newest, self._was_reset = (self._newest, self._base), None, False
        newest, base = self._taken
        return self._buffers[newest], None if base is None else self._buffers[base]

    def give_back(self) -> None:
        """End the reading: what was newest is the base, unless everything was forgotten meanwhile."""
        assert self._taken is not None
        (newest, base), self._taken = self._taken, None
        self._release(base)
        if self._was_reset:
            self._release(newest)
        else:
            self._base = newest

    def average(self) -> Message | None:
        """Return the average, if it has landed."""
        return None if self._average is None else self._buffers[self._average]

    def release_average(self) -> None:
        """Let the average be forgotten."""
        self._release(self._average)
        self._average = None

    def reset(self) -> None:
        """Forget base and newest: the sums begin anew. What is being read is kept until it is given back."""
        if self._taken is None:
            self._release(self._base)
        self._was_reset = True
        self._base = None
        self._release(self._newest)
        self._newest = None

    def _release(self, buffer: int | None) -> None:
        if buffer is not None:
            self._free.append(buffer)
