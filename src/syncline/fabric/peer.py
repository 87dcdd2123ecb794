"""One peer: its connections, its inbox and outbox, and what its control frames mean."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import Protocol

from syncline.fabric.control_connection import ControlConnection
from syncline.fabric.data_connection import DataConnection
from syncline.fabric.frames import CONTROL_CLASS, MEMORY_CLASS, DamagedFrameError, Frame, FrameError, FrameType
from syncline.fabric.grants import GrantScheduler
from syncline.fabric.inbox import Inbox, InboxLinks
from syncline.fabric.options import FabricOptions
from syncline.fabric.outbox import Outbox
from syncline.fabric.shared_host import Offer, accept_offer
from syncline.fabric.sockets import is_same_machine
from syncline.fabric.statistics import ConnectionStatistics
from syncline.fabric.turn import TurnEnd


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

    def on_news(self, peer: Peer, lost: int, reason: str) -> None:
        """Hear from the peer that rank ``lost`` is lost."""

    def on_control_message(self, peer: Peer, payload: bytes) -> None:
        """Take a control message for the layer above."""

    def on_mismatch(self, peer: Peer, tag: int, expected: int, received: int) -> None:
        """Note that a message differs from its receive."""

    def on_opening(self, peer: Peer) -> None:
        """Note that the peer opens further connection classes, or has them, or that they are all here."""

    def on_memory_shared(self, peer: Peer) -> None:
        """Note that the peer reads this process's memory: both are on one machine."""

    def fetch_soon(self, urgency: int, step: Callable[[int], int]) -> None:
        """Run a step of a copy out of another process's memory, by its urgency, until it returns 0."""


class Peer:
    """The state of one peer, from its first connection to its end."""

    def __init__(
        self,
        rank: int,
        host: str,
        *,
        options: FabricOptions,
        scheduler: GrantScheduler,
        events: PeerEvents,
        turn_end: TurnEnd,
    ) -> None:
        self.rank = rank
        self.host = host
        self.options = options
        self._events = events
        self._turn_end = turn_end
        self._sockets: dict[int, socket.socket] = {}
        self._control: ControlConnection | None = None
        self._data: list[DataConnection] = []
        self._offer: Offer | None = None
        self.is_gone = False
        self.has_said_farewell = False
        self.opening = ""
        """Which connection classes the peer has said that it opens, until this rank agrees."""
        self.num_confirmed = 0
        """How many classes the peer has said that it has."""
        self.outbox = Outbox(eager_bytes=options.eager_bytes)
        self.inbox = Inbox(
            rank,
            credit_bytes=options.credit_bytes,
            scheduler=scheduler,
            links=InboxLinks(
                grant_soon=turn_end.grant_soon,
                send_control=self.send_frame,
                redirect=self._redirect,
                on_mismatch=partial(events.on_mismatch, self),
                fetch_soon=events.fetch_soon,
                on_unreadable=self._on_unreadable,
            ),
        )
        self._handlers = self._make_handlers()

    def __repr__(self) -> str:
        state = "gone" if self.is_gone else "ready" if self.is_ready else f"{len(self._sockets)} connections"
        return f"<Peer {self.name}: {state}>"

    @property
    def name(self) -> str:
        """``"rank 3 (host b1)"``."""
        return f"rank {self.rank} (host {self.host})"

    @property
    def is_ready(self) -> bool:
        """Whether the connections that a fabric begins with are there."""
        return self._control is not None

    @property
    def is_local(self) -> bool:
        """Whether the peer is on this machine, by its address, and memory may be shared with it."""
        return self._offer is not None

    @property
    def num_classes(self) -> int:
        """Number of data connections in use."""
        return len(self._data)

    @property
    def is_flushed(self) -> bool:
        """Whether the kernel has taken everything."""
        return all(connection.is_flushed for connection in self._connections())

    def has_connection(self, connection_class: int) -> bool:
        """Whether there is a connection of this class already."""
        is_used = self.is_ready and connection_class < len(self._data)
        return is_used or self.is_gone or connection_class in self._sockets

    def expect(self, options: FabricOptions) -> None:
        """Use these classes and marks from now on; the further connections are attached when they are there."""
        self.options = options
        self.outbox.eager_bytes = options.eager_bytes
        for connection in self._connections():
            connection.use(options)

    def attach(self, connection_class: int, sock: socket.socket) -> None:
        """Take an authenticated socket; with the last one the peer is ready, or has its further classes."""
        assert not self.has_connection(connection_class)
        self._sockets[connection_class] = sock
        if self._control is None:
            if len(self._sockets) == 1 + self.options.num_classes:
                self._start()
        elif len(self._sockets) == self.options.num_classes - len(self._data):
            for added in self._add_data_connections():
                added.start()
            self._events.on_opening(self)

    def send_frame(self, kind: FrameType, *, tag: int = 0, message_bytes: int = 0, payload: bytes = b"") -> None:
        """Queue a control frame."""
        if self._control is not None:
            self._control.send(kind, tag=tag, message_bytes=message_bytes, payload=payload)

    def flush_control(self) -> None:
        """Write queued control frames now."""
        if self._control is not None:
            self._control.flush()

    def take_heard(self) -> bool:
        """Whether anything arrived since the last time this was asked."""
        is_heard = False
        for connection in self._connections():
            is_heard |= connection.has_spoken
            connection.has_spoken = False
        return is_heard

    def end(self) -> None:
        """Say on each connection that nothing more will come."""
        for connection in self._data:
            connection.end()
        self.send_frame(FrameType.END)

    def close(self) -> None:
        """Release everything; the peer is gone."""
        if self.is_gone:
            return
        self.is_gone = True
        for connection in self._connections():
            connection.close()
        for sock in self._sockets.values():
            sock.close()
        self.outbox.close()
        self.inbox.close()

    def statistics(self) -> tuple[ConnectionStatistics, ...]:
        """Return the counters of each connection."""
        if self._control is None:
            return ()
        control = ConnectionStatistics(
            peer=self.rank,
            connection_class=CONTROL_CLASS,
            sent_bytes=0,
            sent_messages=0,
            received_bytes=0,
            received_messages=0,
            overhead_bytes=self._control.overhead_bytes,
            queued_bytes=0,
        )
        data = (
            ConnectionStatistics(
                peer=self.rank,
                connection_class=connection.connection_class,
                sent_bytes=connection.sent_bytes,
                sent_messages=connection.sent_messages,
                received_bytes=connection.received_bytes,
                received_messages=connection.received_messages,
                overhead_bytes=connection.overhead_bytes,
                queued_bytes=self.outbox.queued_bytes(connection.connection_class),
            )
            for connection in self._data
        )
        return (control, *data, *self._memory_statistics())

    def _memory_statistics(self) -> tuple[ConnectionStatistics, ...]:
        if not self.outbox.num_fetched and not self.inbox.num_fetched:
            return ()
        memory = ConnectionStatistics(
            peer=self.rank,
            connection_class=MEMORY_CLASS,
            sent_bytes=self.outbox.fetched_bytes,
            sent_messages=self.outbox.num_fetched,
            received_bytes=self.inbox.fetched_bytes,
            received_messages=self.inbox.num_fetched,
            overhead_bytes=0,
            queued_bytes=0,
        )
        return (memory,)

    def _connections(self) -> list[ControlConnection | DataConnection]:
        return [] if self._control is None else [self._control, *self._data]

    def _start(self) -> None:
        is_local = self.options.shares_memory and is_same_machine(self._sockets[CONTROL_CLASS])
        control = ControlConnection(
            self._sockets.pop(CONTROL_CLASS), self._turn_end, on_frame=self._on_frame, on_broken=self._on_control_broken
        )
        self._add_data_connections()
        self._control = control
        self.outbox.attach(control, self._data)
        self.send_frame(FrameType.CREDIT, message_bytes=self.options.credit_bytes)
        if is_local:
            self._offer = Offer()
            self.send_frame(FrameType.OFFER, payload=self._offer.encode())
        for started in self._connections():
            started.start()
        self._events.on_ready(self)

    def _add_data_connections(self) -> list[DataConnection]:
        """Make a connection of each socket that waits, in the order of the classes."""
        added = [
            DataConnection(
                self._sockets.pop(connection_class),
                self._turn_end,
                connection_class=connection_class,
                chunk_bytes=self.options.chunk_bytes,
                receiver=self.inbox,
                on_message_sent=partial(self.outbox.on_message_sent, connection_class),
                on_end=self._check_ended,
                on_broken=partial(self._on_data_broken, connection_class),
            )
            for connection_class in range(len(self._data), self.options.num_classes)
        ]
        self._data += added
        return added

    def _on_open(self, payload: bytes) -> None:
        if self.opening:
            raise FrameError("it opens further connections before the last ones were agreed")
        self.opening = payload.decode(errors="replace")
        self._events.on_opening(self)

    def _on_opened(self, num_classes: int) -> None:
        self.num_confirmed = num_classes
        self._events.on_opening(self)

    def _make_handlers(self) -> dict[int, Callable[[Frame, bytes], None]]:
        """Return what each type of control frame does."""
        return {
            FrameType.END: self._on_end,
            FrameType.REQUEST: lambda frame, _: self.inbox.on_request(frame),
            FrameType.GRANT: lambda frame, _: self.outbox.on_grant(frame.tag, frame.message_bytes),
            FrameType.DISCARD: lambda frame, _: self.outbox.on_discard(frame.tag),
            FrameType.CREDIT: lambda frame, _: self.outbox.on_credit(frame.message_bytes),
            FrameType.CONTROL: lambda _, payload: self._events.on_control_message(self, payload),
            FrameType.HEARTBEAT: lambda _frame, _payload: None,
            FrameType.FAREWELL: self._on_farewell,
            FrameType.OFFER: lambda _, payload: self._on_offer(payload),
            FrameType.ACCEPT: lambda _frame, _payload: self._on_accept(),
            FrameType.FETCHED: lambda frame, _: self.outbox.on_fetched(frame.tag),
            FrameType.OPEN: lambda _, payload: self._on_open(payload),
            FrameType.OPENED: lambda frame, _: self._on_opened(frame.tag),
            FrameType.LOST: lambda frame, payload: self._events.on_news(
                self, frame.tag, payload.decode(errors="replace")
            ),
        }

    def _on_frame(self, frame: Frame, payload: bytes) -> None:
        self._handlers[frame.type](frame, payload)

    def _on_offer(self, payload: bytes) -> None:
        if self._offer is not None:
            self.inbox.readable_pid = accept_offer(payload)
        if self.inbox.readable_pid is not None:
            self.send_frame(FrameType.ACCEPT)

    def _on_accept(self) -> None:
        if self._offer is None:
            raise FrameError("memory was accepted that was not offered")
        self.outbox.is_memory_readable = True
        self._events.on_memory_shared(self)

    def _on_unreadable(self, error: OSError) -> None:
        if isinstance(error, ProcessLookupError):
            self._events.on_broken(self, "is lost: its process died or was killed", must_tell=False)
        else:
            self._events.on_broken(self, f"is lost: {error}", must_tell=True)

    def _on_end(self, _frame: Frame, _payload: bytes) -> None:
        assert self._control is not None
        self._control.has_ended = True
        self._check_ended()

    def _on_farewell(self, _frame: Frame, _payload: bytes) -> None:
        self.has_said_farewell = True
        self._events.on_farewell(self)

    def _check_ended(self) -> None:
        if all(connection.has_ended for connection in self._connections()):
            self.send_frame(FrameType.FAREWELL)
            self.flush_control()
            self._events.on_ended(self)

    def _redirect(self, tag: int) -> None:
        for connection in self._data:
            connection.redirect(tag)

    def _on_control_broken(self, error: Exception) -> None:
        self._on_broken(self._control, error)

    def _on_data_broken(self, connection_class: int, error: Exception) -> None:
        self._on_broken(self._data[connection_class], error)

    def _on_broken(self, connection: ControlConnection | DataConnection | None, error: Exception) -> None:
        """Judge the end of a connection: in good order, broken, or broken for a reason that the peer told."""
        assert connection is not None
        assert self._control is not None
        if isinstance(error, FrameError):
            what = "is lost, as a frame was damaged" if isinstance(error, DamagedFrameError) else "broke the protocol"
            self._events.on_broken(self, f"{what}: {error}", must_tell=True)
            return
        if connection.has_ended:
            connection.close()
            if all(other.has_ended for other in self._connections()):
                self._on_farewell_missed()
            return
        self._control.read_last_words()
        if not self.is_gone:
            self._events.on_broken(self, f"is lost: {_describe(error)}", must_tell=False)

    def _on_farewell_missed(self) -> None:
        if not self.is_gone and not self.has_said_farewell:
            self._events.on_farewell(self)


def _describe(error: Exception) -> str:
    if isinstance(error, EOFError | ConnectionResetError | BrokenPipeError):
        return "connection closed: its process died or was killed"
    if isinstance(error, TimeoutError):
        return "connection timed out: the network between the hosts, or the peer's machine, is down"
    return f"connection failed: {error}"
