"""Opening a connection again that broke, so that it costs no rank: who dials, who waits, and when the peer is given up.

Whoever dialled first dials again, at once; the other one asks whether the peer is still there, and waits. Its question
says which connection it means: where a reset is lost on its way, an end that has nothing to send knows of no break. A
peer whose address refuses connections is lost at once, as its process has ended; one that answers has ``LIMIT_S``, and
no more than half of the time for which it may be silent. What both sides have received goes with the handshake, so each
sends again what the other has not got. A connection that breaks again and again with nothing new in between is a loss.

So are the connections of ranks that rest (:mod:`syncline.fabric.resting`) opened by the higher of the two, without
haste: how long that may take is for whoever wakes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from typing import Any

from syncline.fabric.acceptor import RareLines
from syncline.fabric.dialling import ask, dial_once, make_question
from syncline.fabric.frames import DamagedFrameError, FrameError
from syncline.fabric.handshake import Admission, Dialer, FrameKeys, Refusal, RefusedError, Resumption, Terms
from syncline.fabric.options import FabricOptions
from syncline.fabric.peer import Peer
from syncline.fabric.reach import Reach
from syncline.fabric.sockets import prepare_connected
from syncline.observe import Trace

LIMIT_S = 5.0
"""How long a connection may take to be there again."""
ASK_AFTER_S = 0.03
"""Most often the peer has dialled again by then."""
PAUSES_S = (0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5)
"""Between attempts to which the peer's machine answers, but not as it should."""
CONNECT_S = 0.5
"""After so long without an answer of the peer's machine it is asked anew, and twice as long after every second attempt.

So it is where there are ``LIMIT_S``, and in proportion where there is less. TCP itself asks again after 1 s and then
after 3 s, which may be too late for a network that was cut meanwhile.
"""
NEWS_S = 1.0
"""Who ends because of a loss tells its neighbours of it; by then this rank has heard what came first."""
MAX_FRUITLESS = 5
"""So often in a row a connection may break before anything new has arrived on it."""
FORGET_S = 30.0
"""After so long a break is not one of a row any more: idle connections are cut by some firewalls, again and again."""
MAX_FORGED = 8
"""So many frames of a peer may fail their authentication codes."""

_log = logging.getLogger(__name__)


class _GoneError(Exception):
    """There is nobody at the other end, or it has given up this rank."""


@dataclass(slots=True, kw_only=True)
class _Line:
    """A connection over all its sockets."""

    connection_id: bytes
    keys: FrameKeys | None
    number: int
    """Of the last attempt to open it again."""
    positions: tuple[int, int] = (0, 0)
    """What had arrived at both ends when it was opened last."""
    num_fruitless: int = 0
    resumed_s: float = 0.0
    error: Exception = field(default_factory=EOFError)
    task: asyncio.Task[None] | None = None
    on_answer: Callable[[], None] | None = None
    """Hears that the machine of a peer that rests answers."""

    def note_resumed(self, positions: tuple[int, int], now_s: float) -> None:
        is_fruitless = positions == self.positions and now_s - self.resumed_s < FORGET_S
        self.num_fruitless = self.num_fruitless + 1 if is_fruitless else 0
        self.positions, self.resumed_s = positions, now_s


class Reopener:
    """Opens the broken connections of one fabric again; ``greet`` shakes hands on a socket on which a peer begins.

    ``places``: so many handshakes with ranks that rest may be under way.
    """

    def __init__(
        self,
        terms: Terms,
        options: FabricOptions,
        *,
        places: asyncio.Semaphore,
        reach: Reach,
        greet: Callable[[socket.socket, str], object],
        trace: Trace | None,
    ) -> None:
        self._terms = terms
        self._options = options
        self._places = places
        self._reach = reach
        self._greet = greet
        self._trace = trace
        self._limit_s = self._usual_limit_s = min(LIMIT_S, options.dead_s / 2)
        self._lines: dict[tuple[int, int], _Line] = {}
        self._num_forged: dict[int, int] = {}
        self._rare_lines = RareLines(_log)

    def __repr__(self) -> str:
        return f"<Reopener: {len(self._lines)} connections>"

    def use_terms(self, terms: Terms) -> None:
        """Dial by these terms from now on."""
        self._terms = terms

    @contextlib.contextmanager
    def patient(self, limit_s: float) -> Iterator[None]:
        """Give connections so long while all ranks still connect: whoever is busy with that answers late."""
        self._limit_s = max(limit_s, self._usual_limit_s)
        try:
            yield
        finally:
            self._limit_s = self._usual_limit_s

    def opened(self, admission: Admission) -> None:
        """Take note of a connection that was opened for the first time."""
        self._lines[admission.rank, admission.connection_class] = _Line(
            connection_id=admission.connection_id,
            keys=admission.frame_keys,
            number=admission.resumption.number if admission.resumption else 0,
        )

    def reopen(self, peer: Peer, connection_class: int, error: Exception) -> None:
        """Begin to open a connection again that broke with ``error``."""
        line = self._lines.get((peer.rank, connection_class))
        if line is None or self._is_forged_too_often(peer, error):
            peer.on_broken(error)
        elif line.task is None:
            line.error = error
            line.task = asyncio.create_task(self._reopen(peer, connection_class, line))
            line.task.add_done_callback(peer.tasks.discard)
            peer.tasks.add(line.task)

    def wake(self, peer: Peer, error: Exception, on_answer: Callable[[], None]) -> None:
        """Open the connections to a lower rank that rests; ``error`` is why it is lost if nobody is there any more."""
        for connection_class in peer.transport.suspended:
            self._lines[peer.rank, connection_class].on_answer = on_answer
            self.reopen(peer, connection_class, error)

    def give_up_socket(self, peer: Peer, connection_class: int, resumption: Resumption) -> int | None:
        """Let go of the old socket, as the peer dials again; return how much has arrived, None if it is a stranger."""
        line = self._lines.get((peer.rank, connection_class))
        if peer.is_gone or line is None or resumption.number <= line.number:
            return None
        if not hmac.compare_digest(resumption.connection_id, line.connection_id):
            return None
        if not peer.is_using(connection_class):
            peer.detach(connection_class)  # it waits for others, and nothing was read from it or written yet
            line.number = resumption.number
            return 0
        if not peer.transport.suspend(connection_class):
            return None  # the peer had said that nothing more comes, and is about to leave
        line.number = resumption.number
        if peer.rests:
            peer.is_waking = True
        else:
            self.reopen(peer, connection_class, EOFError())  # unless it waits already: this attempt may fail too
        return peer.transport.received_position(connection_class)

    def holds(self, peer: Peer, connection_class: int, resumption: Resumption) -> bool:
        """Say whether a peer that asks is still connected; dial, if only its end of a connection knows of the break."""
        line = self._lines.get((peer.rank, connection_class))
        if line is None or peer.is_gone or not peer.is_using(connection_class):
            return not peer.is_gone
        is_news = peer.rank < self._terms.rank and line.task is None and line.number == resumption.number
        is_meant = hmac.compare_digest(resumption.connection_id, line.connection_id)
        if is_news and is_meant and peer.transport.suspend(connection_class):
            self.reopen(peer, connection_class, EOFError())
        return True

    def called(self, peer: Peer, connection_class: int) -> None:
        """Dial, if only the end of a lower rank, which calls, knows that the connection broke."""
        line = self._lines.get((peer.rank, connection_class))
        if line is None or line.task is not None or peer.is_gone or not peer.is_using(connection_class):
            return
        if peer.transport.suspend(connection_class):
            self.reopen(peer, connection_class, EOFError())

    def accept(self, peer: Peer, connection_class: int, resumption: Resumption, sock: socket.socket) -> None:
        """Go on with a socket on which the peer has dialled again, unless it has done so once more."""
        line = self._lines[peer.rank, connection_class]
        if line.number != resumption.number:
            sock.close()
            return
        waiting = line.task
        if self._go_on(peer, connection_class, line, sock, resumption.position) and waiting is not None:
            waiting.cancel()

    # --- inside ---

    def _is_forged_too_often(self, peer: Peer, error: Exception) -> bool:
        if not self._options.authenticate_frames or not isinstance(error, DamagedFrameError):
            return False
        self._num_forged[peer.rank] = self._num_forged.get(peer.rank, 0) + 1
        return self._num_forged[peer.rank] > MAX_FORGED

    async def _reopen(self, peer: Peer, connection_class: int, line: _Line) -> None:
        try:
            async with asyncio.timeout(self._limit_s if line.on_answer is None else None):
                if peer.rank < self._terms.rank:
                    await self._dial(peer, connection_class, line)
                else:
                    if self._reach.calls(peer.rank):
                        peer.transport.forget_socket(connection_class)
                        await self._call(peer, connection_class)
                    else:
                        await self._ask(peer, connection_class, line)
                        peer.transport.forget_socket(connection_class)  # its end may not know
                    await asyncio.Event().wait()  # until it is accepted
        except _GoneError:
            if peer.rests:
                await asyncio.sleep(NEWS_S)
            peer.on_broken(line.error)
        except TimeoutError:
            peer.on_broken(line.error, f"{_name(connection_class)} could not be opened again in {self._limit_s:g} s")

    async def _dial(self, peer: Peer, connection_class: int, line: _Line) -> None:
        num_refused = 0
        wakes = line.on_answer is not None
        places: AbstractAsyncContextManager[Any] = self._places if wakes else contextlib.nullcontext()
        open_socket = partial(self._open, peer, connection_class, line)
        for attempt, pause_s in enumerate(chain(PAUSES_S, repeat(PAUSES_S[-1]) if wakes else (0.0,))):
            line.number += 1
            position = peer.transport.received_position(connection_class)
            try:
                async with places, asyncio.timeout(self._try_s(attempt) if wakes else self._limit_s / 2):
                    resumption = Resumption(line.number, line.connection_id, position)
                    dialer = Dialer(
                        self._terms, peer=peer.rank, connection_class=connection_class, resumption=resumption
                    )
                    sock, theirs = await dial_once(dialer, open_socket, connect_s=self._connect_s(attempt))
            except ConnectionRefusedError:
                if self._reach.is_dialled(peer.rank):
                    raise _GoneError from None
            except RefusedError as refused:
                num_refused += refused.refusal in (Refusal.GONE, Refusal.JOB, Refusal.EPOCH, Refusal.RANK)
                if num_refused > 1:  # one may come of a bit that was changed in the handshake
                    raise _GoneError from None
            except (OSError, EOFError):
                pass
            else:
                if self._go_on(peer, connection_class, line, sock, theirs):
                    return
            await asyncio.sleep(pause_s)
        raise _GoneError

    async def _open(self, peer: Peer, connection_class: int, line: _Line, connect_s: float | None) -> socket.socket:
        if line.on_answer is None:
            return await self._reach.open(peer.rank, connection_class, connect_s)
        sock = await self._reach.open(peer.rank, connection_class, None)
        line.on_answer()
        return sock

    async def _call(self, peer: Peer, connection_class: int) -> None:
        """Call for the peer, who cannot dial this rank, until the deadline."""
        for attempt, pause_s in enumerate(PAUSES_S):
            with contextlib.suppress(OSError):  # it may be busy, or the third rank at which both meet is gone
                sock = await self._reach.call(peer.rank, connection_class, self._connect_s(attempt))
                self._greet(sock, self._reach.address_of(peer.rank)[0])
            await asyncio.sleep(pause_s)

    async def _ask(self, peer: Peer, connection_class: int, line: _Line) -> None:
        """Return if the peer is there, or nobody can tell."""
        await asyncio.sleep(ASK_AFTER_S)
        if not self._reach.is_dialled(peer.rank):
            return
        num_denied = 0
        for attempt, pause_s in enumerate(PAUSES_S):
            try:
                known = Resumption(line.number, line.connection_id, 0)
                question = make_question(self._terms, peer.rank, connection_class, known)
                address, connect_s = self._reach.address_of(peer.rank), self._connect_s(attempt)
                if await ask(self._options, self._reach.own_address, question, address, connect_s=connect_s):
                    return
                num_denied += 1
                if num_denied > 1:  # as in a handshake
                    break
            except ConnectionRefusedError:
                break
            except (ConnectionResetError, BrokenPipeError, EOFError, TimeoutError):
                pass  # whoever listened there is about to end, or the network cuts this too
            except OSError:
                return
            await asyncio.sleep(pause_s)
        raise _GoneError

    def _try_s(self, attempt: int) -> float:
        """Return how long a try may take of a rank that rests, and may be held up: as a first connection has it."""
        return self._options.handshake_s * (2 << min(attempt, len(PAUSES_S)))

    def _connect_s(self, attempt: int) -> float:
        return CONNECT_S * self._usual_limit_s / LIMIT_S * (1 << min(attempt, len(PAUSES_S)) // 2)

    def _go_on(self, peer: Peer, connection_class: int, line: _Line, sock: socket.socket, theirs: int) -> bool:
        """Use a new socket, unless that broke already."""
        if peer.is_gone:
            sock.close()
            return True
        try:
            prepare_connected(sock, connection_class, peer.options)
        except OSError:
            sock.close()
            return False
        if peer.is_using(connection_class):
            self._resume(peer, connection_class, line, sock, theirs)
        else:
            peer.attach(connection_class, sock, line.keys)
        return True

    def _resume(self, peer: Peer, connection_class: int, line: _Line, sock: socket.socket, theirs: int) -> None:
        line.task = None
        line.on_answer = None
        if not peer.rests:
            now_s = asyncio.get_running_loop().time()
            line.note_resumed((peer.transport.received_position(connection_class), theirs), now_s)
        if line.num_fruitless >= MAX_FRUITLESS:
            sock.close()
            peer.on_broken(
                line.error, f"{_name(connection_class)} broke {MAX_FRUITLESS} times with nothing new in between"
            )
            return
        try:
            resent_bytes = peer.transport.resume(connection_class, sock, theirs)
        except FrameError as error:
            sock.close()
            peer.on_broken(error)
            return
        if peer.rests:
            peer.on_resumed()
        else:
            self._tell(peer, connection_class, _reason(line.error), resent_bytes)

    def _tell(self, peer: Peer, connection_class: int, reason: str, resent_bytes: int) -> None:
        if self._trace is not None:
            details = {"peer": peer.rank, "connection_class": connection_class, "resent_bytes": resent_bytes}
            self._trace.instant("connection was opened again", "communication", reason=reason, **details)
        self._rare_lines.warn(
            "rank %d: connection %d to %s was opened again (%d bytes are sent again): %s",
            self._terms.rank,
            connection_class,
            peer.name,
            resent_bytes,
            reason,
        )


def _reason(error: Exception) -> str:
    if isinstance(error, DamagedFrameError):
        return "a frame was damaged"
    return "its other end was closed" if isinstance(error, EOFError) else "it was reset"


def _name(connection_class: int) -> str:
    return f"its connection {connection_class}" if connection_class >= 0 else "its control connection"
