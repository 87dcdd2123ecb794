"""Where futures are completed: on threads of their own, since what a user hangs on them runs there too."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from syncline.runtime.work import Work
from syncline.runtime.worker_thread import WorkerThread

_here = threading.local()
_log = logging.getLogger(__name__)


class CompletionThreads:
    """Runs jobs once what they wait for is over, never on the communication loop.

    A job may run a user's callback, and a callback may make a call of its own and wait for its future: the second
    rounds of PowerSGD do. So what is asked for in a job is done by the next thread, which is started when first needed.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._starting = threading.Lock()
        self._threads: list[WorkerThread] = []
        self._is_closed = False

    def submit(self, ready: Sequence[Work], job: Callable[[], None]) -> None:
        """Run ``job`` when all of ``ready`` are over, well or not; at once, here, if this is closed."""
        depth: int = getattr(_here, "depth", 0)
        with self._starting:
            while not self._is_closed and len(self._threads) <= depth:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(WorkerThread(name, on_failure=_report))
            thread = None if self._is_closed else self._threads[depth]
        if thread is None:
            job()
            return

        def run() -> None:
            _here.depth = depth + 1
            try:
                job()
            except BaseException:  # one callback that fails must not hold up all that come after it
                _log.exception("a callback of a future failed")

        # What is over already needs no loop, which may have stopped.
        thread.submit(0, [work for work in ready if not work.done()], run)

    def close(self) -> None:
        """End the threads when what can run has run."""
        with self._starting:
            self._is_closed = True
            threads = tuple(self._threads)
        for thread in threads:
            thread.close(finishes=True)


def _report(error: BaseException) -> None:
    _log.error("a thread that completes futures ends: %r", error)
