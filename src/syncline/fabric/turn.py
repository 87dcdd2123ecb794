"""Turns: what a fabric does each time that the loop comes to it. It reads all that has arrived, grants, and writes.

One epoll watches the sockets of all connections, and the loop watches that epoll. So a turn is one callback of the
loop, however many connections have something. A callback for each socket would cost the loop as much as most frames
cost us; and one more to grant and write at the end, a round of its own in which it asks the kernel in vain.

Within a turn, grants and writes come after all reads, control before data: what all that was read asks for is done once
and together, as each small frame of its own would be a packet.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from operator import itemgetter

from syncline.fabric.callbacks import call_back

MAX_ROUNDS = 4
"""How often a turn looks again for what has arrived while it read and wrote, before the loop does anything else."""


class Turns:
    """Reads and writes the sockets of one fabric, and runs ``grant`` when it was asked for."""

    def __init__(self, loop: asyncio.AbstractEventLoop, grant: Callable[[], None] = lambda: None) -> None:
        self.loop = loop
        self._grant = grant
        self._must_grant = False
        self._writes: list[tuple[int, Callable[[], None]]] = []
        self._is_underway = False
        self._epoll = select.epoll()
        self._readers: dict[int, Callable[[], None]] = {}
        self._writers: dict[int, Callable[[], None]] = {}
        loop.add_reader(self._epoll.fileno(), self._run)

    def __repr__(self) -> str:
        asked = f"{'grants and ' if self._must_grant else ''}{len(self._writes)} writes"
        return f"<Turns: {len(self._readers)} sockets, {asked}>"

    def watch(self, descriptor: int, read: Callable[[], None]) -> None:
        """Call ``read`` whenever there is something to be read, until :meth:`forget`."""
        self._readers[descriptor] = read
        self._epoll.register(descriptor, select.EPOLLIN)

    def watch_writer(self, descriptor: int, write: Callable[[], None] | None) -> None:
        """Call ``write`` whenever the kernel takes more of a socket that is watched; None: no longer."""
        if write is None:
            del self._writers[descriptor]
        else:
            self._writers[descriptor] = write
        self._epoll.modify(descriptor, select.EPOLLIN if write is None else select.EPOLLIN | select.EPOLLOUT)

    def forget(self, descriptor: int) -> None:
        """Watch a socket no longer; it must still be open."""
        if self._readers.pop(descriptor, None) is not None:
            self._writers.pop(descriptor, None)
            self._epoll.unregister(descriptor)

    def grant_soon(self) -> None:
        """Look at the end of this turn whether there is something to grant."""
        self._must_grant = True
        self._end_soon()

    def write_soon(self, connection_class: int, write: Callable[[], None]) -> None:
        """Call ``write`` at the end of this turn, those of lower classes first."""
        self._writes.append((connection_class, write))
        self._end_soon()

    def close(self) -> None:
        """Release the epoll; no socket may be watched any more."""
        if not self._epoll.closed:
            self.loop.remove_reader(self._epoll.fileno())
            self._epoll.close()

    def _end_soon(self) -> None:
        """See to it that a turn ends; outside of one, soon."""
        if not self._is_underway:
            self._is_underway = True
            self.loop.call_soon(self._run)

    def _run(self) -> None:
        self._is_underway = True
        try:
            for _ in range(MAX_ROUNDS):
                self._read()
                if not self._must_grant and not self._writes:
                    break
                self._end()
        finally:
            self._is_underway = False
            if self._must_grant or self._writes:
                self._end_soon()

    def _read(self) -> None:
        if self._epoll.closed:
            return
        for descriptor, events in self._epoll.poll(0):
            if events != select.EPOLLOUT and (read := self._readers.get(descriptor)) is not None:
                call_back(read)
            if events != select.EPOLLIN and (write := self._writers.get(descriptor)) is not None:
                call_back(write)

    def _end(self) -> None:
        if self._must_grant:
            self._must_grant = False
            self._grant()
        writes, self._writes = self._writes, []  # what a write brings about belongs to the next round
        if len(writes) > 1:
            writes.sort(key=itemgetter(0))
        for _, write in writes:
            call_back(write)
