"""The end of a tick of the loop: what all that a tick brought asks for, done once and together.

A tick reads what arrived on all connections; then this rank grants, and then it writes, control connections before
data. Together, since each callback of its own would cost the loop another tick and the kernel another question, and
each small frame of its own a packet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from operator import attrgetter
from typing import Protocol


class Writer(Protocol):
    """A connection that has something to write."""

    connection_class: int

    def write(self) -> None:
        """Write what is queued, as far as the kernel takes it."""


class TickEnd:
    """Runs ``grant`` and the writes that were asked for, once what else is ready in this tick has run."""

    def __init__(self, loop: asyncio.AbstractEventLoop, grant: Callable[[], None] = lambda: None) -> None:
        self.loop = loop
        self._grant = grant
        self._must_grant = False
        self._writers: dict[Writer, None] = {}
        self._is_scheduled = False

    def __repr__(self) -> str:
        return f"<TickEnd: {'grants and ' if self._must_grant else ''}{len(self._writers)} writes>"

    def grant_soon(self) -> None:
        """Look then whether there is something to grant."""
        self._must_grant = True
        self._schedule()

    def write_soon(self, writer: Writer) -> None:
        """Let ``writer`` write then, those of lower classes first."""
        self._writers[writer] = None
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self.loop.call_soon(self._run)

    def _run(self) -> None:
        if self._must_grant:
            self._must_grant = False
            self._grant()
        self._is_scheduled = False  # grants are written now, but what a write brings about belongs to the next tick
        writers, self._writers = self._writers, {}
        for writer in sorted(writers, key=attrgetter("connection_class")):
            writer.write()
