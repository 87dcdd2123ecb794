"""A connection: one authenticated socket that the loop watches, and its sending half.

The sockets are ours and non-blocking; asyncio's transports are not used, as in Python 3.11 they know nothing of what
the peer has. What is sent is kept until then (:mod:`syncline.fabric.send_stream`): where a socket breaks, the
connection is suspended and goes on with the next one.

To be fair to the other connections, one callback moves at most a budget of bytes; the loop then calls it again.
"""

from __future__ import annotations

import contextlib
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable

from syncline.fabric.frame_checks import FrameKeys, make_checks
from syncline.fabric.frames import CONTROL_CLASS, FrameError
from syncline.fabric.options import FabricOptions
from syncline.fabric.send_stream import SendStream
from syncline.fabric.sockets import mark
from syncline.fabric.tick import TickEnd

BUDGET_BYTES = 2 << 20
"""What one callback moves at most in its direction before others have their turn."""
ACKNOWLEDGED_BYTES = 512 << 10
"""So much of what the peer sends is not acknowledged yet at most, and keeps its memory."""
MAX_BUFFERS = 1024
"""In one ``sendmsg``, as the kernel allows."""


class Connection(ABC):
    """The part that control and data connections share.

    A subclass appends to ``stream`` in :meth:`_refill`, and reads in :meth:`_read`. Whatever ends the socket is told
    once to ``on_broken``; what arrives marks ``has_spoken``.
    """

    connection_class = CONTROL_CLASS
    acknowledged_bytes = ACKNOWLEDGED_BYTES
    """How much is acknowledged without waiting for a heartbeat."""
    beat_bytes = 1
    """How much is acknowledged with a heartbeat."""

    def __init__(
        self,
        sock: socket.socket,
        tick_end: TickEnd,
        *,
        on_broken: Callable[[Exception], None],
        on_acknowledge: Callable[[int, int], None] = lambda _class, _position: None,
        keys: FrameKeys | None = None,
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._loop = tick_end.loop
        self._tick_end = tick_end
        self._on_broken = on_broken
        self._on_acknowledge = on_acknowledge
        self._sending, self._receiving = make_checks(keys)
        self._is_watching_writer = False
        self.stream = SendStream()
        self.received_position = 0
        """How many bytes of the peer's stream are here, in whole frames."""
        self.acknowledged_position = 0
        """How many of them were acknowledged."""
        self.num_resumed = 0
        self.is_closed = False
        self.is_suspended = False
        """Its socket broke: nothing is read or written until there is another."""
        self.has_ended = False
        """The peer sent its END: an end of file is in good order."""
        self.has_spoken = False
        """Something arrived since the owner last looked."""
        self.overhead_bytes = 0

    def start(self) -> None:
        """Begin to read; and to write what is queued."""
        self._loop.add_reader(self._socket.fileno(), self.on_readable)
        self._tick_end.write_soon(self)

    def use(self, options: FabricOptions) -> None:
        """Send as the options say from now on."""
        if self._socket.fileno() >= 0:
            mark(self._socket, self.connection_class, options)

    def close(self) -> None:
        """Release the socket. Nothing is told to ``on_broken`` any more."""
        if self.is_closed:
            return
        self.is_closed = True
        self.forget_socket()
        self.stream.clear()

    def suspend(self) -> None:
        """Neither read nor write until there is another socket; the rest of a frame comes again there."""
        if self.is_suspended or self.is_closed:
            return
        self.is_suspended = True
        self._unwatch()
        self._receiving.restart()
        self._interrupt()

    def forget_socket(self) -> None:
        """Close the socket, if it is not closed."""
        self._unwatch()
        self._socket.close()

    def resume(self, sock: socket.socket, position: int) -> bool:
        """Go on with another socket, behind the first bytes, which the peer has; False if it cannot have them."""
        if not self.stream.rewind(position):
            return False
        self.forget_socket()
        sock.setblocking(False)
        self._socket = sock
        self.is_suspended = False
        self.has_spoken = True
        self.num_resumed += 1
        self.start()
        return True

    @abstractmethod
    def _interrupt(self) -> None:
        """Forget what of a frame is here."""

    @abstractmethod
    def _refill(self) -> bool:
        """Append the next frames to the stream; False if there are none."""

    @abstractmethod
    def _on_refill_sent(self) -> None:
        """Take note that everything that the last refill gave is with the kernel."""

    @abstractmethod
    def _read(self) -> None:
        """Read what there is, within the budget."""

    def on_readable(self) -> None:
        """Read what there is; also what arrived before another connection broke."""
        if self.is_closed or self.is_suspended:
            return
        self.has_spoken = True
        try:
            self._read()
        except (BlockingIOError, InterruptedError):
            pass
        except (OSError, EOFError, FrameError) as error:
            self._break(error)
            return
        self.acknowledge(self.acknowledged_bytes)

    def acknowledge(self, least_bytes: int) -> None:
        """Let the peer know what is here, if that is so much more than what it knows."""
        if self.received_position - self.acknowledged_position >= least_bytes and not self.is_closed:
            self.acknowledged_position = self.received_position
            self._on_acknowledge(self.connection_class, self.received_position)

    def write(self) -> None:
        """Write what is queued, as far as the kernel takes it and the budget goes; the rest when there is room."""
        if self.is_closed or self.is_suspended:
            return
        budget = BUDGET_BYTES
        try:
            while budget > 0 and not self.is_closed and (self.stream.unsent or self._refill()):
                budget -= self._send()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._break(error)
            return
        if not self.is_closed:
            self._watch_writer(is_wanted=bool(self.stream.unsent) or budget <= 0)

    def write_last_words(self) -> None:
        """Write what is queued, even where nothing is read any more, if the kernel takes it."""
        if not self.is_suspended:
            self.write()
        elif self._socket.fileno() >= 0:
            with contextlib.suppress(OSError):
                while self.stream.unsent or self._refill():
                    self._send()

    def _send(self) -> int:
        buffers = self.stream.unsent
        num_bytes = self._socket.sendmsg(buffers if len(buffers) <= MAX_BUFFERS else buffers[:MAX_BUFFERS])
        self.stream.drop_sent(num_bytes)
        if not self.stream.unsent:
            self._on_refill_sent()
        return num_bytes

    def _unwatch(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
        self._is_watching_writer = False

    def _watch_writer(self, *, is_wanted: bool) -> None:
        if is_wanted and not self._is_watching_writer:
            self._loop.add_writer(self._socket.fileno(), self.write)
        elif self._is_watching_writer and not is_wanted:
            self._loop.remove_writer(self._socket.fileno())
        self._is_watching_writer = is_wanted

    def _break(self, error: Exception) -> None:
        if not self.is_closed and not self.is_suspended:
            self._on_broken(error)
