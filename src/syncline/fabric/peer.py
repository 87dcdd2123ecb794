"""One peer: from its first connection to its end, and what its control frames mean."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from syncline.errors import escape_text
from syncline.fabric.frames import CONTROL_CLASS, DamagedFrameError, FrameError, FrameType
from syncline.fabric.handshake import FrameKeys
from syncline.fabric.options import FabricOptions
from syncline.fabric.shared_host import MemoryOffers, Offer, has_ended
from syncline.fabric.sockets import is_same_machine

if TYPE_CHECKING:
    from syncline.fabric.peer_transport import TransportSet

DIED = "its process died or was killed"


class PeerEvents(Protocol):
    """What a peer tells the fabric that it belongs to."""

    def on_ready(self, peer: Peer) -> None:
        """Note that all connections are there."""

    def on_broken(self, peer: Peer, reason: str, *, must_tell: bool) -> None:
        """End a peer that cannot go on; ``must_tell`` if it may be alive and should hear why."""

    def on_ended(self, peer: Peer) -> None:
        """Note that everything that the peer sent has been read, and that it will send no more."""

    def on_farewell(self, peer: Peer) -> None:
        """Note that the peer has read everything that was sent to it before our END."""

    def on_news(self, peer: Peer, tag: int, reason: str) -> None:
        """Hear from the peer that a rank is lost: the one that ``tag`` says (:func:`read_loss`)."""

    def on_control_message(self, peer: Peer, payload: bytes) -> None:
        """Take a control message for the layer above."""

    def on_opening(self, peer: Peer) -> None:
        """Note that the peer opens further connection classes, or has them, or that they are all here."""

    def on_rest(self, peer: Peer, tag: int) -> None:
        """Hear that the peer would close connections that nobody uses, or agrees to that."""

    def on_closed(self, peer: Peer) -> bool:
        """Hear that a connection ended; return whether that was agreed, and they rest now."""

    def on_memory_shared(self) -> None:
        """Note that a peer reads this process's memory: both are on one machine."""


class OverlayEvents(Protocol):
    """What a peer tells the overlay by which ranks hear of each other that are not connected."""

    def on_gossip(self, peer: Peer, tag: int, body: bytes) -> None:
        """Take what a rank tells many, from the peer that passes it on."""

    def on_routed(self, tag: int, payload: bytes) -> None:
        """Take a control message that may be for another rank, and is passed on then."""


class Peer:
    """The state of one peer, from its first connection to its end."""

    def __init__(
        self,
        rank: int,
        name: str,
        host: str,
        *,
        options: FabricOptions,
        transport_set: TransportSet,
        offers: MemoryOffers,
        events: PeerEvents,
    ) -> None:
        self.rank = rank
        self.name = name
        """``"rank 3 (host b1)"``, by its number in the job."""
        self.host = host
        self.options = options
        self._events = events
        self._sockets: dict[int, tuple[socket.socket, FrameKeys | None]] = {}
        self._offers = offers
        self._offer: Offer | None = None
        self._pid: int | None = None
        self.num_classes = 0
        """Number of data connections in use."""
        self.is_ready = False
        """Whether the connections that a fabric begins with are there."""
        self.rests = self.is_waking = False
        """Whether its connections are closed while nobody uses them; whether they are being opened again."""
        self.num_told = 0
        """Control messages of the layer above, both ways, but for what is passed on."""
        self.is_gone = self.has_said_farewell = self._has_offered = False
        self._last_words = ""
        """Why it is lost, as it said itself when it ended."""
        self.opening = ""
        """Which connection classes the peer has said that it opens, until this rank agrees."""
        self.num_confirmed = 0
        """How many classes the peer has said that it has."""
        self.transport = transport_set.transport(rank, options=options, events=self)
        self.send_frame, self.flush_control = self.transport.send_frame, self.transport.flush_control
        self._handlers = self._make_handlers()
        self.overlay: OverlayEvents | None = None
        """The overlay, if not all ranks are connected."""
        self.is_neighbour = True
        """Whether gossip is passed on to it."""
        self.looks_local = False
        """Whether it would be local if it were connected."""
        self._waiting: list[Callable[[], None]] = []
        self.reopen: Callable[[Peer, int, Exception], None] = lambda peer, _class, error: peer.on_broken(error)
        """Opens a connection again that broke, and says so; or says that it cannot be done."""
        self.tasks: set[asyncio.Task[None]] = set()
        """Those that open connections again, until the peer is gone."""

    def __repr__(self) -> str:
        states = {"gone": self.is_gone, "ready": self.is_ready, "rests": self.rests}
        state = next((state for state, is_so in states.items() if is_so), f"{len(self._sockets)} connections")
        return f"<Peer {self.name}: {state}>"

    @property
    def is_local(self) -> bool:
        """Whether the peer is on this machine, by its address, and memory may be shared with it."""
        return self._offer is not None if self.is_ready else self.looks_local

    @property
    def is_drained(self) -> bool:
        """Whether everything that was sent is with the kernel, or for nobody any more, and no rest ends just now."""
        return self.is_gone or (not (self._waiting or self.is_waking) and self.transport.is_drained)

    @property
    def is_idle(self) -> bool:
        """Whether its connections may rest: it is no neighbour, and has all that this rank ever sent."""
        is_used = self.is_neighbour or self._waiting or self.opening or self.tasks
        return not (is_used or self.is_gone) and self.is_ready and self.transport.is_idle

    @property
    def num_exchanged(self) -> int:
        """How many messages were sent and received."""
        return self.num_told + self.transport.num_messages

    @property
    def is_half_open(self) -> bool:
        """Whether some of the connections that a fabric begins with are there, and some are not."""
        return not (self.is_ready or self.is_gone or self.rests) and bool(self._sockets)

    def wait(self, act: Callable[[], None]) -> None:
        """Do this when the peer is connected, after what was to be done before; nothing if it is lost."""
        self._waiting.append(act)

    def go_on(self) -> None:
        """Do what waited for the connection."""
        waiting, self._waiting = self._waiting, []
        for act in waiting:
            act()

    def has_connection(self, connection_class: int) -> bool:
        """Whether there is a connection of this class already."""
        return self.is_using(connection_class) or self.is_gone or connection_class in self._sockets

    def is_using(self, connection_class: int) -> bool:
        """Whether frames pass on the connection of this class; before that it waits for the others."""
        return (self.is_ready or self.rests) and connection_class < self.num_classes

    def expect(self, options: FabricOptions) -> None:
        """Use these classes and marks from now on; the further connections are attached when they are there."""
        self.options = options
        self.transport.use(options)

    def attach(self, connection_class: int, sock: socket.socket, keys: FrameKeys | None = None) -> None:
        """Take an authenticated socket; with the last one the peer is ready, or has its further classes.

        ``keys`` authenticate its frames.
        """
        assert not self.has_connection(connection_class)
        self._sockets[connection_class] = sock, keys
        if not self.is_ready:
            if len(self._sockets) == 1 + self.options.num_classes:
                self._start()
        elif len(self._sockets) == self.options.num_classes - self.num_classes:
            self._hand_over()
            self._events.on_opening(self)

    def detach(self, connection_class: int) -> None:
        """Close a connection that waits for others, if it is there: the peer opens it again."""
        if (waiting := self._sockets.pop(connection_class, None)) is not None:
            waiting[0].close()

    def rest(self) -> bool:
        """Close all connections until somebody needs them; False if one is over for good: the peer is about to leave.

        Then those that are not are opened again.
        """
        are_suspended = [self.transport.suspend(each) for each in range(CONTROL_CLASS, self.num_classes)]
        self.rests = all(are_suspended)
        for each in self.transport.suspended:
            if self.rests:
                self.transport.forget_socket(each)
            else:
                self.reopen(self, each, EOFError())
        self.is_ready = self.is_ready and not self.rests
        return self.rests

    def on_resumed(self) -> None:
        """Go on as before the rest, if all connections are there again."""
        if self.rests and not self.transport.suspended:
            self.rests = self.is_waking = False
            self.is_ready = True
            self._events.on_ready(self)

    def close(self) -> None:
        """Release everything; the peer is gone."""
        if self.is_gone:
            return
        self.is_gone, self.rests, self.is_waking = True, False, False
        for task in self.tasks:
            task.cancel()
        for sock, _ in self._sockets.values():
            sock.close()
        self._waiting.clear()
        self.transport.close()

    # --- what the wire tells (PeerTransportEvents) ---

    def on_frame(self, kind: FrameType, tag: int, payload: bytes) -> None:
        """Do what a control frame says."""
        self._handlers[kind](tag, payload)

    def on_all_ended(self) -> None:
        """Let the peer know that everything was read."""
        self.send_frame(FrameType.FAREWELL)
        self.flush_control()
        self._events.on_ended(self)

    def on_all_closed(self) -> None:
        """Take it for a farewell: the peer closes nothing before it has read everything."""
        if not self.is_gone and not self.has_said_farewell:
            self._events.on_farewell(self)

    def on_broken(self, error: Exception, more: str = "") -> None:
        """Say what became of the peer; ``more`` is what was tried in vain, though it may be alive."""
        more = f"; {more}" if more else ""
        if isinstance(error, FrameError):
            what = "is lost, as a frame was damaged" if isinstance(error, DamagedFrameError) else "broke the protocol"
            self._events.on_broken(self, f"{what}: {error}{more}", must_tell=True)
        elif self._last_words:
            self._events.on_broken(self, self._last_words, must_tell=False)
        elif not self.is_gone:
            seen = f"{DIED} ({_describe(error)})" if self._has_ended() else _describe(error)
            self._events.on_broken(self, f"is lost: {seen}{more}", must_tell=bool(more))

    def on_suspended(self, connection_class: int, error: Exception) -> None:
        """Have the connection opened again, unless there is nobody at the other end."""
        if self._has_ended():
            self.on_broken(error)
        elif not (self.is_gone or (self.rests and not self.is_waking) or self._events.on_closed(self)):
            self.reopen(self, connection_class, error)

    def on_unreadable(self, error: OSError) -> None:
        """Say what became of a peer on this machine."""
        if isinstance(error, ProcessLookupError):
            self._events.on_broken(self, f"is lost: {DIED}", must_tell=False)
        else:
            self._events.on_broken(self, f"is lost: {error}", must_tell=True)

    # --- inside ---

    def _has_ended(self) -> bool:
        return self._pid is not None and has_ended(self._pid)

    def _start(self) -> None:
        is_local = self.options.shares_memory and is_same_machine(self._sockets[CONTROL_CLASS][0])
        self._hand_over()
        self.is_ready = True
        self.send_frame(FrameType.CREDIT, message_bytes=self.options.credit_bytes)
        if is_local:
            self._offer = self._offers.make(target=self.rank)
            self.send_frame(FrameType.OFFER, payload=self._offer.encode())
        self._events.on_ready(self)

    def _hand_over(self) -> None:
        """Give the transport each socket that waits, in the order of the classes."""
        self.transport.attach([self._sockets[number] for number in sorted(self._sockets)])
        self._sockets.clear()
        self.num_classes = self.options.num_classes

    def _on_control(self, payload: bytes) -> None:
        self.num_told += 1
        self._events.on_control_message(self, payload)

    def _on_open(self, payload: bytes) -> None:
        if self.opening:
            raise FrameError("it opens further connections before the last ones were agreed")
        self.opening = escape_text(payload)
        self._events.on_opening(self)

    def _on_opened(self, num_classes: int) -> None:
        self.num_confirmed = num_classes
        self._events.on_opening(self)

    def _make_handlers(self) -> dict[FrameType, Callable[[int, bytes], None]]:
        """Return what each type of control frame does, with its tag and its payload."""
        return {
            FrameType.CONTROL: lambda _, payload: self._on_control(payload),
            FrameType.FAREWELL: lambda _tag, _payload: self._on_farewell(),
            FrameType.OFFER: lambda _, payload: self._on_offer(payload),
            FrameType.ACCEPT: lambda _tag, _payload: self._on_accept(),
            FrameType.OPEN: lambda _, payload: self._on_open(payload),
            FrameType.OPENED: lambda tag, _: self._on_opened(tag),
            FrameType.LOST: lambda tag, payload: self.on_news(tag, escape_text(payload)),
            FrameType.GOSSIP: lambda tag, payload: self._overlay().on_gossip(self, tag, payload),
            FrameType.REST: lambda tag, _: self._events.on_rest(self, tag),
            FrameType.ROUTED: lambda tag, payload: self._overlay().on_routed(tag, payload),
        }

    def _overlay(self) -> OverlayEvents:
        if self.overlay is None:
            raise FrameError("it passes something on, and all ranks are connected")
        return self.overlay

    def _on_offer(self, payload: bytes) -> None:
        if self._has_offered:
            raise FrameError("it offers its memory twice")
        self._has_offered = True
        pid = self._offers.accept(payload, source=self.rank) if self._offer is not None else None
        if pid is not None:
            self._pid = pid
            self.transport.let_be_read(pid)
            self.send_frame(FrameType.ACCEPT)

    def _on_accept(self) -> None:
        if self._offer is None:
            raise FrameError("memory was accepted that was not offered")
        self.transport.let_read_us()
        self._events.on_memory_shared()

    def on_news(self, tag: int, reason: str) -> None:
        """Hear from the peer that a rank is lost, or why it ends itself."""
        if tag == self.rank:
            self._last_words = reason
        self._events.on_news(self, tag, reason)

    def _on_farewell(self) -> None:
        self.has_said_farewell = True
        self._events.on_farewell(self)


def _describe(error: Exception) -> str:
    """Say what was seen; why it is so is known only where the peer's process is known to have ended."""
    if isinstance(error, EOFError):
        return "its side closed the connection without saying goodbye; look there for how its process ended"
    if isinstance(error, ConnectionResetError | BrokenPipeError | ConnectionAbortedError):
        return "the connection was reset by its side, or between the hosts; look there for how its process ended"
    if isinstance(error, TimeoutError):
        return "connection timed out: nothing acknowledges what is sent; check its machine and the network between"
    return f"connection failed: {error}"
