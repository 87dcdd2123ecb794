"""What a caller holds of a collective that is under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from syncline.arguments import is_number
from syncline.errors import ConfigurationError, DeadlineError, FabricClosedError
from syncline.fabric import Progress
from syncline.runtime.flight_recorder import CallRecord
from syncline.runtime.loop import CommunicationLoop

GRACE_S = 30.0
"""The loop itself fails a call at its deadline; only if the loop does not answer does the waiting thread give up."""
Make = Callable[["Work", float], None]
"""Told a work and how many seconds it may take."""


class Work:
    """A collective under way, or done; any thread may wait for it.

    ``loop`` is where it ends and where callbacks run; ``progress`` is told of threads that wait. One that is *made by
    waiting* goes on only while some thread waits for it, or asks whether it is done: that thread makes it.

    >>> first, second = communicators_in_memory(2)
    >>> work = first.barrier()
    >>> work.done()
    False
    >>> second.barrier().wait(); work.wait()
    >>> first.close(); second.close()
    """

    __slots__ = (
        "_callbacks",
        "_ended",
        "_error",
        "_lock",
        "_loop",
        "_make",
        "_progress",
        "_timeout_s",
        "is_over",
        "label",
        "record",
    )

    def __init__(
        self, label: str, *, timeout_s: float, loop: CommunicationLoop, progress: Progress | None = None
    ) -> None:
        self.label = label
        self._timeout_s = timeout_s
        self._loop = loop
        self._progress = progress or Progress()
        self.is_over = False
        """Whether it has ended, as far as that was done; unlike :meth:`done`, this makes nothing."""
        self._ended = threading.Lock()  # held until then: an Event is made of five objects, and most are over at once
        self._ended.acquire()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Work], None]] = []
        self._error: BaseException | None = None
        self._make: Make | None = None
        self.record: CallRecord | None = None
        """What is kept of the call when it is over."""

    def __repr__(self) -> str:
        state = "under way" if not self.is_over else "done" if self._error is None else f"failed: {self._error}"
        return f"<Work {self.label}: {state}>"

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        if (make := self._make) is not None:
            make(self, 0.0)
        return self.is_over

    @property
    def is_made_by_waiting(self) -> bool:
        """Whether it goes on only while some thread waits for it."""
        return self._make is not None

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context in which this thread waits for it."""
        return self._progress.waiting()

    def make_by_waiting(self, make: Make | None) -> None:
        """Let whoever waits for it call ``make``, which ends it or comes back after so many seconds; None: no more."""
        self._make = make

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended; raise what went wrong, if anything did.

        Raises :class:`DeadlineError` if it is not over within ``timeout_s`` (it goes on then). None waits as long as
        the call itself may take.
        """
        if timeout_s is not None and not is_number(timeout_s):
            raise ConfigurationError(f"timeout_s must be a number of seconds, or None, not {timeout_s!r}")
        assert self.is_over or not self._loop.is_current(), f"a callback waits for {self.label}, which needs its thread"
        self._loop.check_process()
        limit_s = self._timeout_s + GRACE_S if timeout_s is None else timeout_s
        if not self.is_over:
            with self._progress.waiting():
                self._wait(limit_s)
        if not self.is_over:
            raise DeadlineError(f"{self.label} was waited for but not done within {limit_s:g} s; it is still under way")
        if self._error is not None:
            raise self._error

    def wait_elsewhere(self) -> None:
        """Take it that foreign code waits until it has ended: a rank that waits for others does not hang."""
        if not self.is_over:
            self._progress.hold()
            self.add_done_callback(lambda _: self._progress.release())

    def exception(self) -> BaseException | None:
        """Return what went wrong; None if nothing did, or it is still under way."""
        return self._error

    def add_done_callback(self, callback: Callable[[Work], None]) -> None:
        """Call ``callback(self)`` on the communication loop's thread once it has ended."""
        with self._lock:
            is_under_way = not self.is_over
            if is_under_way:
                self._callbacks.append(callback)
        if not is_under_way:
            self._loop.call_soon(callback, self)
        elif self._make is not None:  # nobody need wait for it, so somebody must
            waiting = partial(self._wait, self._timeout_s + GRACE_S)
            threading.Thread(target=waiting, name=f"syncline-{self.label}", daemon=True).start()

    def finish(self, error: BaseException | None) -> None:
        """End it; called once, on the communication loop's thread."""
        with self._lock:
            assert not self.is_over, f"{self.label} ended twice"
            self._set(error)
        for callback in self._callbacks:
            callback(self)
        self._callbacks.clear()

    def end(self, error: BaseException | None) -> None:
        """End it from the thread that made it; callbacks run on the loop's thread all the same, while there is one."""
        with self._lock:
            self._make = None
            has_callbacks = bool(self._callbacks)
            if not has_callbacks:
                self._set(error)
        if has_callbacks:
            try:
                self._loop.call_soon(self.finish, error)
            except FabricClosedError:
                self.finish(error)

    def _set(self, error: BaseException | None) -> None:
        self._error = error
        if self.record is not None:
            self.record.end(error)
        self.is_over = True
        self._ended.release()

    def _wait(self, limit_s: float) -> None:
        until_s = time.monotonic() + limit_s
        if (make := self._make) is not None:
            make(self, limit_s)
        if self._ended.acquire(timeout=min(max(until_s - time.monotonic(), 0.0), threading.TIMEOUT_MAX)):
            self._ended.release()
