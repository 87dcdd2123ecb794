"""Which of a machine's cores the communication thread of each rank there uses, so that these threads never queue.

A kernel that wakes a thread tends to put it on the core of the thread that woke it, as the two seem to work together.
Communication threads of one machine wake each other all the time, and so end up on one core, each waiting for the other
to leave it, while another core is free. MPI launchers bind processes for that reason; this binds one thread only, and
leaves those that compute where the kernel puts them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable


def divide_cores(cores: Iterable[int], *, place: int, num_places: int) -> frozenset[int]:
    """Return the share of ``place``: even runs of neighbouring cores; where there are too few, one, taken in turns."""
    ordered = sorted(cores)
    if num_places >= len(ordered):
        return frozenset(ordered[place % len(ordered) : place % len(ordered) + 1])
    start, stop = (edge * len(ordered) // num_places for edge in (place, place + 1))
    return frozenset(ordered[start:stop])


def unrestricted_cores() -> frozenset[int]:
    """Return the cores of this process; none if someone has restricted it already, or the platform cannot bind."""
    if not hasattr(os, "sched_getaffinity"):
        return frozenset()
    cores = frozenset(os.sched_getaffinity(os.getpid()))  # of the main thread, whatever this one is bound to
    return cores if len(cores) == os.cpu_count() else frozenset()


class ThreadBinding:
    """Binds the thread that calls :meth:`share_with` to its rank's share of the machine's cores.

    A main thread is the program's own, and is left alone.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._ranks = {rank}

    def __repr__(self) -> str:
        return f"<ThreadBinding of rank {self._rank} beside {len(self._ranks) - 1} others>"

    def share_with(self, rank: int) -> None:
        """Take note that ``rank`` runs on this machine too, and bind the thread to what remains of the cores."""
        self._ranks.add(rank)
        if threading.current_thread() is not threading.main_thread():
            with contextlib.suppress(OSError):  # a core went away, or a sandbox refuses: nothing depends on it
                self._bind()

    def _bind(self) -> None:
        cores = unrestricted_cores()
        if cores:
            place = sorted(self._ranks).index(self._rank)
            os.sched_setaffinity(0, divide_cores(cores, place=place, num_places=len(self._ranks)))
