"""A connection: one authenticated socket that the loop watches, and its sending half.

The sockets are ours and non-blocking; asyncio's transports are not used, as in Python 3.11 they copy whatever the
kernel did not take at once. Here a frame's header and its payload go to ``sendmsg`` as they lie in memory, and what was
not taken is remembered as a view.

To be fair to the other connections, one callback moves at most a budget of bytes; the loop then calls it again.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable

from syncline.fabric.frame_checks import FrameKeys, make_checks
from syncline.fabric.frames import CONTROL_CLASS, FrameError
from syncline.fabric.options import FabricOptions
from syncline.fabric.sockets import mark
from syncline.fabric.tick import TickEnd

BUDGET_BYTES = 2 << 20
"""What one callback moves at most in its direction before others have their turn."""


class Connection(ABC):
    """The part that control and data connections share.

    A subclass fills ``_buffers`` in :meth:`_refill`, and reads in :meth:`_read`. Whatever ends the connection is told
    once to ``on_broken``; what arrives marks ``has_spoken``.
    """

    connection_class = CONTROL_CLASS

    def __init__(
        self,
        sock: socket.socket,
        tick_end: TickEnd,
        *,
        on_broken: Callable[[Exception], None],
        keys: FrameKeys | None = None,
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._loop = tick_end.loop
        self._tick_end = tick_end
        self._on_broken = on_broken
        self._sending, self._receiving = make_checks(keys)
        self._buffers: list[bytes | memoryview] = []
        self._buffers_bytes = 0
        self._is_watching_writer = False
        self._is_write_scheduled = False
        self.is_closed = False
        self.has_ended = False
        """The peer sent its END: an end of file is in good order."""
        self.has_spoken = False
        """Something arrived since the owner last looked."""
        self.overhead_bytes = 0

    def start(self) -> None:
        """Begin to read; and to write what is queued."""
        self._loop.add_reader(self._socket.fileno(), self._guarded_read)
        self.schedule_write()

    def use(self, options: FabricOptions) -> None:
        """Send as the options say from now on."""
        mark(self._socket, self.connection_class, options)

    def schedule_write(self) -> None:
        """Write soon: what is queued in one tick of the loop leaves together."""
        if not (self._is_write_scheduled or self._is_watching_writer or self.is_closed):
            self._is_write_scheduled = True
            self._tick_end.write_soon(self.connection_class, self._write)

    def close(self) -> None:
        """Release the socket. Nothing is told to ``on_broken`` any more."""
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._buffers = []

    @property
    def is_flushed(self) -> bool:
        """Whether the kernel has taken everything that was queued."""
        return not (self._buffers or self._is_write_scheduled or self._is_watching_writer)

    @abstractmethod
    def _refill(self) -> bool:
        """Put the next frames into ``_buffers`` (and their size into ``_buffers_bytes``); False if there are none."""

    @abstractmethod
    def _on_refill_sent(self) -> None:
        """Take note that everything that the last refill gave is with the kernel."""

    @abstractmethod
    def _read(self) -> None:
        """Read what there is, within the budget."""

    def read_last_words(self) -> None:
        """Read what arrived before the connection broke; errors no longer matter."""
        if not self.is_closed:
            try:
                self._read()
            except (OSError, EOFError, FrameError):
                return

    def _guarded_read(self) -> None:
        if self.is_closed:
            return
        self.has_spoken = True
        try:
            self._read()
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, EOFError, FrameError) as error:
            self._break(error)

    def _write(self) -> None:
        self._is_write_scheduled = False
        if self.is_closed:
            return
        try:
            is_done = self._write_within_budget()
        except (BlockingIOError, InterruptedError):
            is_done = False
        except OSError as error:
            self._break(error)
            return
        if self.is_closed or is_done == (not self._is_watching_writer):
            return
        self._is_watching_writer = not is_done
        if is_done:
            self._loop.remove_writer(self._socket.fileno())
        else:
            self._loop.add_writer(self._socket.fileno(), self._write)

    def _write_within_budget(self) -> bool:
        """Send until nothing is queued (True), or the kernel takes no more or the budget is spent (False)."""
        budget = BUDGET_BYTES
        while budget > 0:
            if not self._buffers and not self._refill():
                return True
            num_bytes = self._socket.sendmsg(self._buffers)
            budget -= num_bytes
            self._buffers_bytes -= num_bytes
            if self._buffers_bytes:
                self._drop_sent(num_bytes)
                return False
            self._buffers = []
            self._on_refill_sent()
            if self.is_closed:
                return True
        return False

    def _drop_sent(self, num_bytes: int) -> None:
        """Forget the first bytes of what is queued; a buffer that was sent in part becomes a view of its rest."""
        for place, buffer in enumerate(self._buffers):
            if num_bytes < len(buffer):
                self._buffers = self._buffers[place:]
                self._buffers[0] = memoryview(buffer)[num_bytes:]
                return
            num_bytes -= len(buffer)
        raise AssertionError("more was sent than was queued")

    def _break(self, error: Exception) -> None:
        if not self.is_closed:
            self._on_broken(error)
