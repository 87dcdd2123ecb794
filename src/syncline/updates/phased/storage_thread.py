"""The thread on which stages are read and written, in the order in which that was asked for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

JOIN_S = 30.0
"""A disk that does not answer must not hold up the end of a job; the thread is a daemon."""


class StorageThread:
    """Runs jobs one at a time; the first exception is handed to ``on_failure``, and later jobs are dropped."""

    def __init__(self, name: str, *, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._has_failed = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Let ``job`` run after those that were submitted before; from any thread."""
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread after the jobs that were submitted; those that have not begun are dropped after a failure."""
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)

    def give_up(self) -> None:
        """Drop the jobs that have not begun."""
        self._has_failed = True

    def _main(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._has_failed:
                continue
            try:
                job()
            except BaseException as error:
                self._has_failed = True
                self._on_failure(error)
