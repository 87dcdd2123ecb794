"""A thread for what must hold up neither the training nor the loop: stepping shards, reading and writing stages."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Sequence

from syncline.runtime.work import Work

JOIN_S = 30.0
"""A disk that does not answer must not hold up the end of a job; the thread is a daemon."""


class WorkerThread:
    """Runs jobs one at a time: of those whose :class:`Work` is done, the lowest urgency number first, then the oldest.

    The first exception of a job is handed to ``on_failure``, and later jobs are dropped. The thread starts with the
    first job and ends with :meth:`close`.
    """

    def __init__(self, name: str, *, on_failure: Callable[[BaseException], None]) -> None:
        self._name = name
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._runnable: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._thread: threading.Thread | None = None
        self._drops = self._closed = False

    def submit(self, urgency: int, ready: Sequence[Work], job: Callable[[], None]) -> None:
        """Let ``job`` run once all of ``ready`` are done, or have failed: the job finds out, and never waits itself."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
            self._thread.start()
        num_left = len(ready)
        if not num_left:
            self._enqueue(urgency, job)

        def count(_: Work) -> None:
            nonlocal num_left
            num_left -= 1
            if not num_left:
                self._enqueue(urgency, job)

        for work in ready:
            work.add_done_callback(count)  # all are called on the communication loop's thread, one after another

    def close(self, *, finishes: bool = False) -> None:
        """End the thread after the job that is running, or with ``finishes`` after all that can run."""
        with self._changed:
            self._closed = True
            self._drops = self._drops or not finishes
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def _enqueue(self, urgency: int, job: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._runnable, (urgency, next(self._order), job))
            self._changed.notify()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._runnable and not self._closed:
                self._changed.wait()
            if self._drops or not self._runnable:
                return None
            return heapq.heappop(self._runnable)[2]

    def _main(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except BaseException as error:
                self._drops = True
                self._on_failure(error)
