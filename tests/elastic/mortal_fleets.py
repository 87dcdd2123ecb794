"""Ranks as threads that die in the middle of a step: before any call of theirs, by its number."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from syncline.errors import SynclineError
from syncline.pytorch.fleet import Fleet
from syncline.runtime.communicator import Communicator
from syncline.topology import Topology
from thread_fleets import run_fleets


class DiedError(BaseException):
    """This rank is dead; nothing that handles errors may go on with it."""


_submit = Communicator.submit
_here = threading.local()


def _counting_submit(self: Communicator, *args: Any, **settings: Any) -> Any:
    left = getattr(_here, "num_left", None)
    if left is not None:
        _here.num_left = left - 1
        if left == 0:
            _here.died.add(_here.fleet.base.rank)
            _here.fleet.communicator.abort()  # of this epoch: another thread of this rank may be about to call it
            _here.fleet.base.abort()
            raise DiedError
    return _submit(self, *args, **settings)


@contextmanager
def mortal(fleet: Fleet, num_calls: int | None, died: set[int]) -> Any:
    """Let this rank die before the call of that number within this context, and be in ``died``; None: it lives."""
    _here.fleet, _here.num_left, _here.died = fleet, num_calls, died
    try:
        yield
    finally:
        _here.num_left = None


def run_mortals(
    world: int | Topology, deaths: dict[int, int], body: Callable[[Fleet, Callable[[], Any]], Any], **options: Any
) -> dict[int, Any]:
    """Run ``body`` on threads; ranks die before the call of theirs that ``deaths`` numbers, once ``body`` lets them.

    Returns what each rank that lived returned, or the error that it ended with. ``body`` gets the fleet and a context
    in which the rank is mortal.
    """
    died: set[int] = set()  # what they end with may be what closing without a fabric does
    Communicator.submit = _counting_submit  # type: ignore[method-assign]
    try:
        results = run_fleets(
            world,
            lambda fleet: body(fleet, lambda: mortal(fleet, deaths.get(fleet.members[fleet.rank]), died)),
            accept=(DiedError, SynclineError),
            **options,
        )
    finally:
        Communicator.submit = _submit  # type: ignore[method-assign]
    return {rank: result for rank, result in enumerate(results) if rank not in died}
