"""A transport in Python: an inbox, an outbox, and connections that the loop watches one by one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from syncline.fabric.control_connection import ControlConnection
from syncline.fabric.data_connection import DataConnection
from syncline.fabric.fetching import Fetcher
from syncline.fabric.frame_checks import FrameKeys
from syncline.fabric.frames import CONTROL_CLASS, MEMORY_CLASS, DamagedFrameError, Frame, FrameError, FrameType
from syncline.fabric.grant_window import GrantWindow
from syncline.fabric.grants import GrantScheduler
from syncline.fabric.inbox import Inbox, InboxLinks
from syncline.fabric.options import FabricOptions
from syncline.fabric.outbox import Outbox
from syncline.fabric.peer_transport import PeerTransportEvents
from syncline.fabric.sizing import GrantSizes
from syncline.fabric.slice_executor import SliceExecutor
from syncline.fabric.statistics import ConnectionStatistics, PeerStatistics
from syncline.fabric.tick import TickEnd

CAN_GO_ON = (EOFError, ConnectionResetError, BrokenPipeError, ConnectionAbortedError, DamagedFrameError)
"""After what there may be somebody at the other end; whoever does not answer at all is judged elsewhere."""


class PythonTransportSet:
    """All transports of one fabric, on the running loop."""

    def __init__(self, sizes: GrantSizes) -> None:
        loop = asyncio.get_running_loop()
        self.scheduler = GrantScheduler(**sizes)
        self.tick_end = TickEnd(loop, self._grant)
        self.fetcher = Fetcher(loop)
        self._transports: dict[int, PythonPeerTransport] = {}

    def __repr__(self) -> str:
        return f"<PythonTransportSet: {len(self._transports)} transports, {self.scheduler!r}>"

    def transport(self, peer: int, *, options: FabricOptions, events: PeerTransportEvents) -> PythonPeerTransport:
        """Make the wire of one peer."""
        self._transports[peer] = PythonPeerTransport(peer, options=options, events=events, transport_set=self)
        return self._transports[peer]

    def open_executor(self, reference: SliceExecutor, ranks: Sequence[int]) -> SliceExecutor:  # noqa: ARG002 - it knows
        """Return ``reference``: slices are executed in Python."""
        return reference

    def resize(self, *, window: GrantWindow, quantum_bytes: int, sender_bytes: Mapping[int, int]) -> None:
        """Grant with these sizes from now on."""
        self.scheduler.resize(window=window, quantum_bytes=quantum_bytes, sender_bytes=sender_bytes)

    def tell_drained(self, on_drained: Callable[[], None]) -> None:
        """Tell from now on whenever everything that was sent to a peer is with the kernel."""
        for transport in self._transports.values():
            transport.outbox.on_drained = on_drained

    def keep_beating(self, *, interval_s: float, limit_s: float) -> None:
        """Nothing: a thread of Python's stands still as well when somebody holds the interpreter."""

    def close(self) -> None:
        """Copy nothing any more; the connections are closed with their transports."""
        self.fetcher.close()

    def _grant(self) -> None:
        for grant in self.scheduler.grants():
            self._transports[grant.peer].inbox.on_granted(grant.tag, grant.limit_bytes)


class PythonPeerTransport:
    """The connections to one peer."""

    def __init__(
        self, peer: int, *, options: FabricOptions, events: PeerTransportEvents, transport_set: PythonTransportSet
    ) -> None:
        self._peer = peer
        self._options = options
        self._events = events
        self._tick_end = transport_set.tick_end
        self._control: ControlConnection | None = None
        self._data: list[DataConnection] = []
        self._is_closed = False
        self.progress = 0
        self.outbox = Outbox(eager_bytes=options.eager_bytes)
        self.inbox = Inbox(
            peer,
            credit_bytes=options.credit_bytes,
            scheduler=transport_set.scheduler,
            links=InboxLinks(
                grant_soon=transport_set.tick_end.grant_soon,
                send_control=self.send_frame,
                redirect=self._redirect,
                fetch_soon=transport_set.fetcher.add,
                on_unreadable=events.on_unreadable,
            ),
        )
        self.send = self.outbox.send
        self.receive = self.inbox.receive
        self.cancel = self.inbox.cancel
        self._handlers: dict[int, Callable[[Frame], None]] = {
            FrameType.END: lambda _: self._on_end(),
            FrameType.REQUEST: self.inbox.on_request,
            FrameType.GRANT: lambda frame: self.outbox.on_grant(frame.tag, frame.message_bytes),
            FrameType.DISCARD: lambda frame: self.outbox.on_discard(frame.tag),
            FrameType.CREDIT: lambda frame: self.outbox.on_credit(frame.message_bytes),
            FrameType.FETCHED: lambda frame: self.outbox.on_fetched(frame.tag),
            FrameType.HEARTBEAT: self._on_heartbeat,
            FrameType.ACKNOWLEDGED: self._on_acknowledged,
        }

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self._data)} classes"
        return f"<PythonPeerTransport to rank {self._peer}: {state}>"

    @property
    def is_drained(self) -> bool:
        """Whether everything that was sent is with the kernel."""
        return self.outbox.is_drained

    def attach(self, sockets: Sequence[tuple[socket.socket, FrameKeys | None]]) -> None:
        """Take the next sockets, control before the data connections."""
        for sock, keys in sockets:
            if self._control is None:
                self._attach_control(sock, keys)
            else:
                self._attach_data(sock, keys)

    def suspend(self, connection_class: int) -> bool:
        """Neither read nor write a connection until it goes on with another socket; False if it is over for good."""
        connection = self._connection(connection_class)
        connection.suspend()
        return not connection.is_closed

    def forget_socket(self, connection_class: int) -> None:
        """Close the socket of a suspended connection."""
        self._connection(connection_class).forget_socket()

    def received_position(self, connection_class: int) -> int:
        """Return how many bytes of what the peer sends on a connection are here, in whole frames."""
        return self._connection(connection_class).received_position

    def resume(self, connection_class: int, sock: socket.socket, position: int) -> int:
        """Let a suspended connection go on with another socket, behind the first bytes, which the peer has."""
        connection = self._connection(connection_class)
        before_bytes = connection.stream.resent_bytes
        if not connection.resume(sock, position):
            raise FrameError(f"it cannot have {position} bytes of what was sent on connection {connection_class}")
        return connection.stream.resent_bytes - before_bytes

    def use(self, options: FabricOptions) -> None:
        """Send with these marks and in these sizes from now on."""
        self._options = options
        self.outbox.eager_bytes = options.eager_bytes
        for connection in self._connections():
            connection.use(options)

    def send_frame(self, kind: FrameType, *, tag: int = 0, message_bytes: int = 0, payload: bytes = b"") -> None:
        """Queue a control frame."""
        if self._control is None:
            return
        self._control.send(kind, tag=tag, message_bytes=message_bytes, payload=payload)
        if kind is FrameType.HEARTBEAT:
            for connection in self._connections():
                connection.acknowledge(connection.beat_bytes)

    def flush_control(self) -> None:
        """Write queued control frames now."""
        if self._control is not None:
            self._control.write_last_words()

    def end(self) -> None:
        """Say on each connection that nothing more will come."""
        for connection in self._data:
            connection.end()
        self.send_frame(FrameType.END)

    def drop_streams(self, streams: range) -> None:
        """Throw away what comes, or came early, in streams that are over."""
        self.inbox.drop_streams(streams)

    def close(self) -> None:
        """Release the connections, and forget what was not received whole."""
        self._is_closed = True
        for connection in self._connections():
            connection.close()
        self.outbox.close()
        self.inbox.close()
        self._tick_end.grant_soon()

    def take_heard(self) -> bool:
        """Whether anything arrived since the last time this was asked."""
        is_heard = False
        for connection in self._connections():
            is_heard |= connection.has_spoken
            connection.has_spoken = False
        return is_heard

    def let_be_read(self, pid: int) -> None:
        """Copy messages out of the peer's memory where it names their addresses."""
        self.inbox.readable_pid = pid

    def let_read_us(self) -> None:
        """Name the addresses of announced messages."""
        self.outbox.is_memory_readable = True

    def statistics(self) -> PeerStatistics:
        """Return a frozen record of all counters."""
        return PeerStatistics(
            connections=self._connection_statistics(),
            unexpected_bytes=self.inbox.unexpected_bytes,
            pending_receives=self.inbox.num_pending,
            dropped_messages=self.inbox.dropped.num_messages,
        )

    def _connection_statistics(self) -> tuple[ConnectionStatistics, ...]:
        if self._control is None:
            return ()
        control = ConnectionStatistics(
            peer=self._peer,
            connection_class=CONTROL_CLASS,
            sent_bytes=0,
            sent_messages=0,
            received_bytes=0,
            received_messages=0,
            overhead_bytes=self._control.overhead_bytes,
            queued_bytes=0,
            reconnects=self._control.num_resumed,
            resent_bytes=self._control.stream.resent_bytes,
        )
        data = (
            ConnectionStatistics(
                peer=self._peer,
                connection_class=connection.connection_class,
                sent_bytes=connection.sent_bytes,
                sent_messages=connection.sent_messages,
                received_bytes=connection.received_bytes,
                received_messages=connection.received_messages,
                overhead_bytes=connection.overhead_bytes,
                queued_bytes=self.outbox.queued_bytes(connection.connection_class),
                reconnects=connection.num_resumed,
                resent_bytes=connection.stream.resent_bytes,
            )
            for connection in self._data
        )
        return (control, *data, *self._memory_statistics())

    def _attach_control(self, sock: socket.socket, keys: FrameKeys | None) -> None:
        self._control = ControlConnection(
            sock,
            self._tick_end,
            on_frame=self._on_frame,
            on_broken=self._on_control_broken,
            on_acknowledge=self._acknowledge,
            keys=keys,
        )
        self.outbox.attach(self._control, self._data)
        self._control.start()

    def _attach_data(self, sock: socket.socket, keys: FrameKeys | None) -> None:
        connection_class = len(self._data)
        connection = DataConnection(
            sock,
            self._tick_end,
            connection_class=connection_class,
            chunk_bytes=self._options.chunk_bytes,
            receiver=self.inbox,
            on_message_sent=partial(self.outbox.on_message_sent, connection_class),
            on_end=self._check_ended,
            on_broken=partial(self._on_data_broken, connection_class),
            on_acknowledge=self._acknowledge,
            keys=keys,
        )
        self._data.append(connection)
        connection.start()

    def _memory_statistics(self) -> tuple[ConnectionStatistics, ...]:
        if not self.outbox.num_fetched and not self.inbox.num_fetched:
            return ()
        memory = ConnectionStatistics(
            peer=self._peer,
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

    def _on_frame(self, frame: Frame, payload: bytes) -> None:
        handler = self._handlers.get(frame.type)
        if handler is not None:
            handler(frame)
        else:
            self._events.on_frame(FrameType(frame.type), frame.tag, payload)

    def _connection(self, connection_class: int) -> ControlConnection | DataConnection:
        return self._connections()[connection_class - CONTROL_CLASS]

    def _acknowledge(self, connection_class: int, position: int) -> None:
        self.send_frame(FrameType.ACKNOWLEDGED, tag=connection_class - CONTROL_CLASS, message_bytes=position)

    def _on_acknowledged(self, frame: Frame) -> None:
        connections = self._connections()
        if frame.tag >= len(connections):
            raise FrameError(f"an acknowledgement of connection {frame.tag}, which is not there")
        connection = connections[frame.tag]
        if not connection.stream.acknowledge(frame.message_bytes):
            raise FrameError(
                f"an acknowledgement of byte {frame.message_bytes} of class {connection.connection_class}, which was "
                "not sent"
            )
        self._tick_end.write_soon(connection)

    def _on_heartbeat(self, frame: Frame) -> None:
        self.progress = frame.tag

    def _on_end(self) -> None:
        assert self._control is not None
        self._control.has_ended = True
        self._check_ended()

    def _check_ended(self) -> None:
        if all(connection.has_ended for connection in self._connections()):
            self._events.on_all_ended()

    def _redirect(self, tag: int) -> None:
        for connection in self._data:
            connection.redirect(tag)

    def _on_control_broken(self, error: Exception) -> None:
        self._on_broken(self._control, error)

    def _on_data_broken(self, connection_class: int, error: Exception) -> None:
        self._on_broken(self._data[connection_class], error)

    def _on_broken(self, connection: ControlConnection | DataConnection | None, error: Exception) -> None:
        """Tell an end in good order from one that is not; let what the peer said before be heard first."""
        assert connection is not None
        assert self._control is not None
        if not isinstance(error, FrameError):
            if connection.has_ended:
                connection.close()
                if all(other.has_ended for other in self._connections()):
                    self._events.on_all_closed()
                return
            connection.suspend()
            self._control.on_readable()
        if self._is_closed:
            return
        if connection.has_ended or not isinstance(error, CAN_GO_ON):
            self._events.on_broken(error)
            return
        connection.suspend()
        self._events.on_suspended(connection.connection_class, error)
