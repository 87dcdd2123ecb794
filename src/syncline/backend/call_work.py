"""What ``torch.distributed`` holds of a call: a ``Work`` with a future that fails as C++ expects it to.

Futures are completed on threads of their own, since what a user hangs on them runs there too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from syncline.runtime.work import Work
from syncline.runtime.worker_thread import WorkerThread
from syncline.tensors.work import TensorWork
from syncline.updates.private_torch import uncompiled

_NO_TIMEOUT = timedelta(0)
_here = threading.local()
_log = logging.getLogger(__name__)


class CompletionThreads:
    """Runs jobs once what they wait for is over, never on the communication loop.

    A job may run a user's callback, and a callback may make a call of its own and wait for its future: the second
    rounds of PowerSGD do. So what is asked for in a job is done by the next thread, which is started when first needed.
    """

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._threads: list[WorkerThread] = []
        self._is_closed = False

    def submit(self, ready: Sequence[Work], job: Callable[[], None]) -> None:
        """Run ``job`` when all of ``ready`` are over, well or not; at once, here, if this is closed."""
        depth: int = getattr(_here, "depth", 0)
        with self._starting:
            while not self._is_closed and len(self._threads) <= depth:
                name = f"syncline-futures-{len(self._threads)}"
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


class CallWork(dist.Work):
    """A call under way, or over. Whoever waits ends it on the own thread; a future is made only if one is asked for.

    ``result`` is what the future holds in the end: a list of tensors.
    """

    def __init__(self, work: TensorWork, result: Sequence[torch.Tensor], completions: CompletionThreads) -> None:
        super().__init__()
        self._work = work
        self._result = list(result)
        self._completions = completions
        self._error: BaseException | None = None
        self._future: Future[Any] | None = None
        self._lock = threading.Lock()

    @uncompiled
    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True when it is over; raise what went wrong, also :class:`DeadlineError` after ``timeout``, if any."""
        limit_s = timeout.total_seconds() if timeout is not None and timeout > _NO_TIMEOUT else None
        self._work.wait(limit_s)
        return True

    def is_completed(self) -> bool:
        """Whether it is over; then the results are in place."""
        if not self._work.done():
            return False
        self._settle()
        return True

    def is_success(self) -> bool:
        """Whether it is over and went well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return what went wrong; None as long as nothing has."""
        return self._error if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that hold the result."""
        return self._result

    def synchronize(self) -> None:
        """Wait: results are in place when it is over, on a GPU in the order of the current stream."""
        self.wait()

    block_current_stream = synchronize

    def source_rank(self) -> int:
        """Return the group's rank from which a message came; RuntimeError for what is no receive, or not over."""
        source: int | None = getattr(self._work, "source", None)
        if source is None:
            raise RuntimeError("only a receive that is over has a source")
        return source

    _source_rank = source_rank

    @uncompiled
    def get_future(self) -> Future[Any]:
        """Return a future of the tensors, completed on a thread that may run callbacks; DDP waits for it in C++."""
        with self._lock:
            if self._future is None:
                devices = {tensor.device for tensor in self._result if tensor.device.type != "cpu"}
                root: Future[Any] = Future(devices=sorted(devices, key=str))
                # A future that is told of an exception in Python is a success to C++; one whose callback raises is not.
                # It never holds the error, whose frames hold the future: no collector sees a cycle that C++ closes.
                self._future = root.then(self._unwrap)
                for work in self._work.works:
                    work.wait_elsewhere()
                self._completions.submit(self._work.works, partial(self._complete, root))
            return self._future

    def when_over(self, function: Callable[[], None]) -> None:
        """Call ``function`` once, when what moves has come to its end, well or not: here, or on the loop's thread."""
        works = [work for work in self._work.works if not work.done()]
        left = len(works)

        def count(_: Work) -> None:
            nonlocal left
            left -= 1
            if not left:
                function()

        for work in works:
            work.add_done_callback(count)
        if not works:
            function()

    def _settle(self) -> None:
        """Put the results in place, once they can be."""
        try:
            self._work.wait()
        except BaseException as error:
            self._error = error

    def _complete(self, root: Future[Any]) -> None:
        with self._work.aside():  # a future of a device's tensors follows the stream that is current here
            self._settle()
            root.set_result(self._result)

    def _unwrap(self, root: Future[Any]) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        result: list[torch.Tensor] = root.value()
        return result
