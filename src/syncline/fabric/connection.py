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
        self._is_watching_writer = False
        self.is_closed = False
        self.has_ended = False
        """The peer sent its END: an end of file is in good order."""
        self.has_spoken = False
        """Something arrived since the owner last looked."""
        self.overhead_bytes = 0

    def start(self) -> None:
        """Begin to read; and to write what is queued."""
        self._loop.add_reader(self._socket.fileno(), self._on_readable)
        self._tick_end.write_soon(self)

    def use(self, options: FabricOptions) -> None:
        """Send as the options say from now on."""
        mark(self._socket, self.connection_class, options)

    def close(self) -> None:
        """Release the socket. Nothing is told to ``on_broken`` any more."""
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._buffers = []

    @abstractmethod
    def _refill(self) -> bool:
        """Put the next frames into ``_buffers``; False if there are none."""

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

    def _on_readable(self) -> None:
        if self.is_closed:
            return
        self.has_spoken = True
        try:
            self._read()
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, EOFError, FrameError) as error:
            self._break(error)

    def write(self) -> None:
        """Write what is queued, as far as the kernel takes it and the budget goes; the rest when there is room."""
        budget = BUDGET_BYTES
        try:
            while budget > 0 and not self.is_closed and (self._buffers or self._refill()):
                num_bytes = self._socket.sendmsg(self._buffers)
                budget -= num_bytes
                self._drop_sent(num_bytes)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._break(error)
            return
        if not self.is_closed:
            self._watch_writer(is_wanted=bool(self._buffers) or budget <= 0)

    def _watch_writer(self, *, is_wanted: bool) -> None:
        if is_wanted and not self._is_watching_writer:
            self._loop.add_writer(self._socket.fileno(), self.write)
        elif self._is_watching_writer and not is_wanted:
            self._loop.remove_writer(self._socket.fileno())
        self._is_watching_writer = is_wanted

    def _drop_sent(self, num_bytes: int) -> None:
        """Forget the first bytes of what is queued; a buffer that was sent in part becomes a view of its rest."""
        for place, buffer in enumerate(self._buffers):
            if num_bytes < len(buffer):
                self._buffers = self._buffers[place:]
                self._buffers[0] = memoryview(buffer)[num_bytes:]
                return
            num_bytes -= len(buffer)
        self._buffers = []
        self._on_refill_sent()

    def _break(self, error: Exception) -> None:
        if not self.is_closed:
            self._on_broken(error)
