"""Communicators that talk in memory: all ranks in one process, on one loop, for tests and for trying things out."""

from __future__ import annotations

import threading
from typing import Any

from syncline.arguments import Count, checked
from syncline.fabric import MemoryFabric, memory_fabrics
from syncline.runtime.communicator import CLOSE_S, Communicator
from syncline.runtime.loop import CommunicationLoop
from syncline.topology import Topology


@checked
def communicators_in_memory(
    num_ranks: Count, topology: Topology | None = None, *, seed: int | None = None, **options: Any
) -> tuple[Communicator, ...]:
    """Return ``num_ranks`` communicators on one loop; the thread ends when the last of them is closed.

    ``topology``: default one switch, one host for each rank; :class:`TopologyError` if it has another number of ranks.
    With a ``seed``, messages are delivered in a random order that the seed replays. ``options`` are those of
    :class:`Communicator`.

    >>> first, second = communicators_in_memory(2)
    >>> first.world_size
    2
    >>> first.abort(); second.abort()
    """
    loop = CommunicationLoop("syncline memory")
    loop.start()

    async def connect() -> tuple[MemoryFabric, ...]:
        return memory_fabrics(num_ranks, seed=seed)

    try:
        fabrics = loop.run(connect(), CLOSE_S)
        on_close = _Countdown(num_ranks, loop).count
        shape = topology if topology is not None else Topology.flat(num_ranks)
        return tuple(Communicator(loop, fabric, shape, on_close=on_close, **options) for fabric in fabrics)
    except BaseException:
        loop.stop()
        raise


class _Countdown:
    """Stops the loop when all communicators are closed."""

    def __init__(self, num_open: int, loop: CommunicationLoop) -> None:
        self._num_open = num_open
        self._loop = loop
        self._lock = threading.Lock()

    def count(self) -> None:
        with self._lock:
            self._num_open -= 1
            is_last = self._num_open == 0
        if is_last:
            self._loop.stop()
