"""What a caller holds of calls on tensors that are under way, and what a barrier joins of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from syncline.runtime.work import Work


class TensorWork:
    """A collective on tensors that is under way; the result is there after :meth:`wait`. Any thread may wait."""

    def __init__(self, works: Iterable[Work], finish: Callable[[], object] | None = None) -> None:
        self.works = tuple(works)
        """What moves; when all are done, :meth:`wait` has only to put the result in place."""
        self._finish = finish
        self._finishing = threading.Lock()
        self.under_way: PendingCalls | None = None
        """Where a barrier finds it, as long as nobody has waited for it."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it is over, and put the result in place; raises what went wrong."""
        try:
            for work in self.works:
                work.wait(timeout_s)
            if self._finish is not None:
                self._finish_once()
        finally:
            if self.under_way is not None and self.done():
                self.under_way.remove(self)

    def _finish_once(self) -> None:
        with self._finishing:
            if self._finish is not None:
                self._finish()
                self._finish = None

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return all(work.done() for work in self.works)

    def aside(self) -> AbstractContextManager[object]:
        """Wait within this on a thread other than the caller's, whose streams of a device must not be held up."""
        return nullcontext()

    def then(self, finish: Callable[[], object]) -> TensorWork:
        """Return a work that is this one, and ``finish`` at the end of its first wait."""

        def finish_both() -> None:
            self.wait()
            finish()

        return TensorWork(self.works, finish_both)

    @classmethod
    def together(cls, parts: Sequence[TensorWork]) -> TensorWork:
        """Return a work that is over when all ``parts`` are."""

        def finish_all() -> None:
            for part in parts:
                part.wait()

        return cls([work for part in parts for work in part.works], finish_all)


def end_work(under_way: set[Any], lock: threading.Lock, work: TensorWork, error: BaseException | None) -> None:
    """End a work that is among those ``under_way``, once."""
    with lock:
        is_first = work in under_way
        under_way.discard(work)
    if is_first:
        work.works[0].end(error)


OVER = TensorWork(())
"""That of a call that was over when it returned."""


class PendingCalls:
    """The calls of a group for which nobody has waited yet: its barriers join them. Any thread may add and take."""

    def __init__(self) -> None:
        self._works: dict[TensorWork, None] = {}
        self._lock = threading.Lock()

    def add(self, work: TensorWork) -> None:
        """Keep a call that goes on while its caller does; end those in front that are over, as nobody may wait."""
        work.under_way = self
        while (first := self._first()) is not None and first.done():
            with suppress(Exception):  # it is told to whoever waits for that call
                first.wait()
            self.remove(first)
        with self._lock:
            self._works[work] = None

    def remove(self, work: TensorWork) -> None:
        """Forget a call that is over."""
        with self._lock:
            self._works.pop(work, None)

    def all(self) -> list[TensorWork]:
        """Return them in the order in which they were made."""
        with self._lock:
            return list(self._works)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until each is over and its result is in place; raises what went wrong in one."""
        for work in self.all():
            work.wait(timeout_s)

    def _first(self) -> TensorWork | None:
        with self._lock:
            return next(iter(self._works), None)
