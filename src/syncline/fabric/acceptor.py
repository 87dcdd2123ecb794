"""The accept loop: strangers get one address, few sockets and little time.

At most 64 sockets more than honest ranks need are unauthenticated at once, each for the handshake's deadline at most.
When all places are taken, the oldest loses its place if it had half a second (an honest handshake takes milliseconds,
where the machine is not busy); until then the kernel's backlog holds the others. An honest rank that loses its place
comes again. What is refused is counted, and logged at most once in five seconds.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial

from syncline.fabric.dialling import AskedError, CalledError, Holds, greet
from syncline.fabric.forks import close_in_children
from syncline.fabric.handshake import Admission, Refusal, RefusedError, Resume, Terms
from syncline.fabric.shared_port import SharedListener

MAX_UNAUTHENTICATED = 64
MAX_ACCEPTS_AT_ONCE = 16
PATIENCE_S = 0.5
PAUSE_S = 0.05
LOG_INTERVAL_S = 5.0

_log = logging.getLogger(__name__)


class RareLines:
    """Warnings of one kind, of which one is logged in ``LOG_INTERVAL_S``, with how many there were."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged_s = float("-inf")
        self._num_unlogged = 0

    def warn(self, text: str, *values: object) -> None:
        """Log a line, or count it for the next one; on a loop's thread."""
        self._num_unlogged += 1
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_s >= LOG_INTERVAL_S:
            self._log.warning(f"{text}; %d since the last such line", *values, self._num_unlogged)
            self._logged_s, self._num_unlogged = now_s, 0


class Acceptor:
    """Accepts connections and hands the authenticated ones to ``on_connection(admission, socket)``.

    ``num_expected`` connections of honest ranks may come at once. ``resume`` and ``holds`` are asked for connections
    that are opened again (:mod:`syncline.fabric.reopening`); ``on_call`` takes a socket on which this rank is called
    (:mod:`syncline.fabric.reach`), or says that it does not.
    """

    def __init__(
        self,
        sock: socket.socket | SharedListener,
        terms: Terms,
        *,
        handshake_s: float,
        num_expected: int = 0,
        is_taken: Callable[[int, int], bool],
        on_connection: Callable[[Admission, socket.socket], None],
        resume: Resume = lambda *_: None,
        holds: Holds = lambda *_: False,
        on_call: Callable[[bytes, socket.socket], bool] = lambda *_: False,
    ) -> None:
        self._socket = sock
        self._terms = terms
        self._handshake_s = handshake_s
        self._num_places = MAX_UNAUTHENTICATED + num_expected
        self._is_taken = is_taken
        self._on_connection = on_connection
        self._resume_connection = resume
        self._holds = holds
        self._on_call = on_call
        self._loop = asyncio.get_running_loop()
        self.handshakes: dict[asyncio.Task[Admission], float] = {}
        """Those that are under way, and since when."""
        self._resume: asyncio.TimerHandle | None = None
        self._rare_lines = RareLines(_log)
        self.num_refused = 0
        self.last_refusal = ""
        self.last_remedy = ""
        """What the last of those that speak as we do was told; strangers do not count."""
        self._loop.add_reader(sock.fileno(), self._accept)

    def use_terms(self, terms: Terms) -> None:
        """Greet by these terms from now on."""
        self._terms = terms

    def greet(self, sock: socket.socket, address: str) -> asyncio.Task[Admission]:
        """Shake hands with whoever is at the other end of a connected socket, at ``address``, and begins."""
        task = self._loop.create_task(self._greet(sock))
        self.handshakes[task] = self._loop.time()
        task.add_done_callback(partial(self._finish, sock, address))
        return task

    def close(self) -> list[asyncio.Task[Admission]]:
        """Stop accepting; return the handshakes that were under way, cancelled."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
        if self._resume is not None:
            self._resume.cancel()
        tasks = list(self.handshakes)
        for task in tasks:
            task.cancel()
        return tasks

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS_AT_ONCE):
            if len(self.handshakes) >= self._num_places and not self._make_room():
                self._pause()
                return
            try:
                sock, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._complain(f"cannot accept connections: {error}")
                self._pause()
                return
            close_in_children(sock).setblocking(False)
            self.greet(sock, str(address[0]))

    def _make_room(self) -> bool:
        oldest = next(iter(self.handshakes))
        if self._loop.time() - self.handshakes[oldest] < PATIENCE_S:
            return False
        del self.handshakes[oldest]
        oldest.cancel()
        return True

    def _pause(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._resume = self._loop.call_later(PAUSE_S, self._loop.add_reader, self._socket.fileno(), self._accept)

    async def _greet(self, sock: socket.socket) -> Admission:
        async with asyncio.timeout(self._handshake_s):
            return await greet(sock, self._terms, self._is_taken, self._resume_connection, self._holds)

    def _finish(self, sock: socket.socket, address: str, task: asyncio.Task[Admission]) -> None:
        """Hand the socket over, or close and count it."""
        self.handshakes.pop(task, None)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            self._on_connection(task.result(), sock)
            return
        if isinstance(error, CalledError) and self._on_call(error.message, sock):
            return
        if isinstance(error, AskedError):
            sock.close()
            return
        self.num_refused += 1  # before the other side sees the end
        sock.close()
        self.last_refusal = error.refusal.name if isinstance(error, RefusedError) else type(error).__name__
        if isinstance(error, RefusedError) and error.refusal is not Refusal.GARBAGE:
            self.last_remedy = str(error)
        self._complain(f"refused a connection from {address} ({self.last_refusal})")

    def _complain(self, what: str) -> None:
        self._rare_lines.warn("rank %d %s", self._terms.rank, what)
