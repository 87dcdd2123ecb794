"""What moves a fabric's bytes: a *peer transport* is one peer's connections and what waits there, in compiled code.

A transport knows messages, grants and frames (``native/``); what the end of a peer means, and what is told to others,
is for :mod:`syncline.fabric.peer`. The loop watches all connections of a fabric as one, and hears of whole messages:
for a request, a grant or a piece of a message the interpreter does not run. Of a call whose slices compiled code
executes it hears when all are over.

Importing this needs the compiled module (:func:`syncline.fabric.compiled.check_compiled`).
"""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from syncline.fabric import _native
from syncline.fabric._native import GrantScheduler, NativeTransport, wait
from syncline.fabric.frames import CONTROL_CLASS, MEMORY_CLASS, DamagedFrameError, FrameError, FrameType
from syncline.fabric.handshake import FrameKeys
from syncline.fabric.options import FabricOptions
from syncline.fabric.protocol import call_back
from syncline.fabric.sizing import GrantSizes
from syncline.fabric.slice_executor import (
    CALL_TAGS,
    SLICE_TAGS,
    Dataflow,
    Execution,
    Reduction,
    SlicedCall,
    SliceExecutor,
    Slices,
)
from syncline.fabric.sockets import TcpCounters, mark, sent_in_vain, tcp_counters

if TYPE_CHECKING:
    from syncline.fabric.statistics import ConnectionStatistics

SENT, RECEIVED, FRAME, MISMATCH, UNREADABLE, BROKEN, VIOLATION, ALL_ENDED, ALL_CLOSED, DRAINED, DONE = range(1, 12)
FAULT, SUSPENDED = 12, 13
"""Kinds of events, as ``native/events.hpp`` counts them; those with whom to call bring nothing else."""
MAX_PASSES = 8
"""How often what Python does may bring about more, before the loop has its turn."""


class PeerTransportEvents(Protocol):
    """What a transport tells of its peer."""

    def on_frame(self, kind: FrameType, tag: int, payload: bytes) -> None:
        """Take a control frame that concerns the peer as a whole; FrameError if it is not allowed."""

    def on_all_ended(self) -> None:
        """Note that the peer's END has arrived on every connection: everything it sent was read."""

    def on_all_closed(self) -> None:
        """Note that the peer closed every connection after its END."""

    def on_broken(self, error: Exception) -> None:
        """End a peer whose connection broke for good (OSError) or who broke the protocol (FrameError).

        What it had said on the control connection before is told first.
        """

    def on_suspended(self, connection_class: int, error: Exception) -> None:
        """Open a connection again that broke (OSError, EOFError), or on which bytes were changed (DamagedFrameError).

        What the peer had said on the control connection before is told first.
        """

    def on_unreadable(self, error: OSError) -> None:
        """End a peer whose memory cannot be read any more."""


class TransportSet:
    """All transports of one fabric, on the running loop, and the grants that order their senders."""

    def __init__(self, sizes: GrantSizes) -> None:
        self._loop = asyncio.get_running_loop()
        self.scheduler = GrantScheduler(**sizes)
        self.native_transport = NativeTransport(self.scheduler)
        self._transports: dict[int, PeerTransport] = {}
        self.mismatched: dict[int, Mismatched] = {}
        """Who hears of mismatches of the calls that compiled code executes, by their tags in units of CALL_TAGS."""
        self._on_drained: Callable[[], None] = lambda: None
        self._is_closed = False
        self._loop.add_reader(self.native_transport, self._on_ready)

    def __repr__(self) -> str:
        return f"<TransportSet: {'closed' if self._is_closed else f'{len(self._transports)} transports'}>"

    def transport(self, peer: int, *, options: FabricOptions, events: PeerTransportEvents) -> PeerTransport:
        """Make the transport of one peer."""
        self._transports[peer] = PeerTransport(peer, options=options, events=events, transport_set=self)
        return self._transports[peer]

    def open_executor(self, most_bytes: int, ranks: Sequence[int]) -> SliceExecutor:
        """Return who executes slices here (see :class:`~syncline.fabric.protocol.Transport`)."""
        return CompiledSliceExecutor(self, most_bytes, ranks)

    def tell_drained(self, on_drained: Callable[[], None]) -> None:
        """Tell from now on whenever everything that was sent to a peer is with the kernel."""
        self._on_drained = on_drained
        self.native_transport.tells_drained = True

    def close(self) -> None:
        """Watch nothing any more; every transport is closed."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self.native_transport)
            self.native_transport.close()

    def _on_ready(self) -> None:
        if not self.native_transport.is_served:  # else it has been polled
            self.native_transport.poll()
        for _ in range(MAX_PASSES):
            self._tell()
            self.native_transport.finish()
            if not self.native_transport.has_events:
                return

    def _tell(self) -> None:
        while (event := self.native_transport.next_event()) is not None:
            if len(event) == 2:
                call_back(event[1])
            else:
                self._handle(*event)

    def _handle(self, kind: int, peer: int, tag: int, number: int, other: int, text: bytes) -> None:
        if kind == DRAINED:
            self._on_drained()
        else:
            call_back(partial(self._transports[peer].handle, kind, tag, number, other, text))


class PeerTransport:
    """The connections to one peer, from the first to the last.

    ``send(tag, payload, **settings)`` queues a message (see :class:`~syncline.fabric.protocol.Fabric`), ``send_frame``
    a control frame, and ``flush_control`` writes queued ones now, as far as the kernel takes them. ``end`` says on each
    connection that nothing more will come. ``take_heard`` tells whether anything arrived since it was last asked,
    ``received_position(connection_class)`` how many bytes of what the peer sends there are here, in whole frames.
    After ``let_read_us`` requests name the addresses of their messages: the peer can copy them. ``let_be_read(pid)``
    copies messages out of the peer's memory where it does so, which is that of process ``pid``.
    """

    def __init__(
        self, peer: int, *, options: FabricOptions, events: PeerTransportEvents, transport_set: TransportSet
    ) -> None:
        self._peer = peer
        self._options = options
        self._events = events
        self._transport_set = transport_set
        self._native_transport = transport_set.native_transport
        self._sockets: list[socket.socket] = []
        self._in_vain: list[int | None] = []
        """What data connections had moved by the last look, of those on which nothing arrives."""
        self._mismatched: dict[int, Callable[[int], None]] = {}
        self._is_closed = False
        self._native_transport.add_peer(peer, eager_bytes=options.eager_bytes, credit_bytes=options.credit_bytes)
        self.send = partial(self._native_transport.send, peer)
        self.send_frame = partial(self._native_transport.send_frame, peer)
        self.flush_control = partial(self._native_transport.flush_control, peer)
        self.end = partial(self._native_transport.end, peer)
        self.take_heard = partial(self._native_transport.take_heard, peer)
        self.let_be_read = partial(self._native_transport.let_be_read, peer)
        self.let_read_us = partial(self._native_transport.let_read_us, peer)
        self.received_position = partial(self._native_transport.received_position, peer)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self._sockets)} connections"
        return f"<PeerTransport to rank {self._peer}: {state}>"

    @property
    def is_drained(self) -> bool:
        """Whether everything that was sent is with the kernel."""
        return not self._native_transport.num_unsent(self._peer)

    @property
    def is_idle(self) -> bool:
        """Whether neither waits for the other: the peer is known to have every message, and no receive is posted."""
        native, peer = self._native_transport, self._peer
        return self.is_drained and not (native.num_unacknowledged(peer) or native.num_pending(peer))

    @property
    def num_messages(self) -> int:
        """How many were sent and received."""
        of_memory = self._native_transport.memory_counters(self._peer)
        counters = self._native_transport.counters(self._peer)
        return of_memory[1] + of_memory[3] + sum(entry[2] + entry[4] for entry in counters)

    @property
    def suspended(self) -> list[int]:
        """The classes of the connections that are."""
        classes = range(CONTROL_CLASS, CONTROL_CLASS + len(self._sockets))
        return [each for each in classes if self._native_transport.is_suspended(self._peer, each)]

    @property
    def progress(self) -> int:
        """What the peer's last heartbeat carried (:class:`~syncline.fabric.progress.Progress`)."""
        return self._native_transport.progress(self._peer)

    def look_if_stuck(self) -> bool:
        """Return whether a data connection has moved nothing since the last look, though TCP sends again and again."""
        before, self._in_vain = self._in_vain, [sent_in_vain(sock) for sock in self._sockets[1:]]
        return any(now is not None and now == then for now, then in zip(self._in_vain, before, strict=False))

    def attach(self, sockets: Sequence[tuple[socket.socket, FrameKeys | None]]) -> None:
        """Take the next sockets, control before the data connections, with the keys that authenticate their frames."""
        for sock, keys in sockets:
            sock.setblocking(False)
            connection_class = CONTROL_CLASS + len(self._sockets)
            self._sockets.append(sock)
            if connection_class == CONTROL_CLASS:
                self._native_transport.attach_control(self._peer, sock.fileno(), keys=keys)
            else:
                self._native_transport.attach_data(
                    self._peer, sock.fileno(), chunk_bytes=self._options.chunk_bytes, keys=keys
                )
            self._native_transport.start(self._peer, connection_class)

    def suspend(self, connection_class: int) -> bool:
        """Neither read nor write a connection until it goes on with another socket; False if it is over for good."""
        self._native_transport.suspend(self._peer, connection_class)
        return self._native_transport.is_suspended(self._peer, connection_class)

    def forget_socket(self, connection_class: int) -> None:
        """Close the socket of a suspended connection."""
        self._native_transport.forget_socket(self._peer, connection_class)
        self._sockets[connection_class - CONTROL_CLASS].close()

    def resume(self, connection_class: int, sock: socket.socket, position: int) -> int:
        """Let a suspended connection go on with another socket, behind the first bytes, which the peer has.

        Returns how many bytes are sent again; :class:`~syncline.fabric.frames.FrameError` if it cannot have them.
        """
        self.forget_socket(connection_class)
        sock.setblocking(False)
        self._sockets[connection_class - CONTROL_CLASS] = sock
        resent_bytes = self._native_transport.resume(self._peer, connection_class, sock.fileno(), position=position)
        if resent_bytes < 0:
            raise FrameError(f"it cannot have {position} bytes of what was sent on connection {connection_class}")
        return resent_bytes

    def use(self, options: FabricOptions) -> None:
        """Send with these marks and in these sizes from now on."""
        self._options = options
        self._native_transport.use(self._peer, eager_bytes=options.eager_bytes, chunk_bytes=options.chunk_bytes)
        for connection_class, sock in enumerate(self._sockets, start=CONTROL_CLASS):
            if sock.fileno() >= 0:
                mark(sock, connection_class, options)

    def receive(
        self,
        tag: int,
        destination: memoryview,
        *,
        signature: int,
        urgency: int,
        on_received: Callable[[], None],
        on_mismatch: Callable[[int], None] | None = None,
    ) -> None:
        """Post a receive."""
        if on_mismatch is not None:
            self._mismatched[tag] = on_mismatch
            on_received = partial(self._received, tag, on_received)
        self._native_transport.receive(
            self._peer, tag, destination, signature=signature, urgency=urgency, on_received=on_received
        )

    def cancel(self, tag: int) -> None:
        """Forget a receive."""
        self._mismatched.pop(tag, None)
        self._native_transport.cancel(self._peer, tag)

    def drop_streams(self, streams: range) -> None:
        """Throw away what comes in these streams from now on, and what came early; it is counted."""
        self._native_transport.drop_streams(self._peer, streams.start, streams.stop)

    def close(self) -> None:
        """Release the connections, and forget what was not received whole."""
        self._is_closed = True
        self._native_transport.close_peer(self._peer)
        for sock in self._sockets:
            sock.close()

    def connections(self) -> list[ConnectionStatistics]:
        """Return a frozen record of the counters of each connection."""
        from syncline.fabric.statistics import ClassStatistics, ConnectionStatistics  # a start counts nothing

        names = [field.name for field in fields(ClassStatistics)]  # of which compiled code has the first, in this order
        counters = self._native_transport.counters(self._peer)
        sent_bytes, num_sent, received_bytes, num_received = self._native_transport.memory_counters(self._peer)
        if num_sent or num_received:
            counters.append((MEMORY_CLASS, sent_bytes, num_sent, received_bytes, num_received, 0, 0, 0, 0))
        of_kernel = {number: tcp_counters(sock) for number, sock in enumerate(self._sockets, start=CONTROL_CLASS)}
        return [
            ConnectionStatistics(
                peer=self._peer,
                **dict(zip(names, entry, strict=False)),
                **of_kernel.get(entry[0], TcpCounters())._asdict(),
            )
            for entry in counters
        ]

    def handle(self, kind: int, tag: int, number: int, other: int, text: bytes) -> None:
        """Tell of one event; a peer that is gone has no more to tell."""
        if self._is_closed:
            return
        if kind == FRAME:
            try:
                self._events.on_frame(FrameType(number), tag, text)
            except FrameError as error:
                self._events.on_broken(error)
        elif kind == UNREADABLE:
            self._events.on_unreadable(OSError(number, f"reading its memory: {os.strerror(number)}"))
        elif kind == MISMATCH:
            self._tell_mismatch(tag, other)
        elif kind == ALL_ENDED:
            self._events.on_all_ended()
        elif kind == ALL_CLOSED:
            self._events.on_all_closed()
        elif kind == SUSPENDED:
            self._tell_suspended(tag + CONTROL_CLASS, number, is_damage=bool(other), text=text)
        else:
            self._events.on_broken(_error_of(kind, number, text))

    def _tell_suspended(self, connection_class: int, number: int, *, is_damage: bool, text: bytes) -> None:
        """Tell that a connection broke, unless it goes on already: the peer was faster."""
        if self._native_transport.is_suspended(self._peer, connection_class):
            error = DamagedFrameError(text.decode()) if is_damage else _error_of(BROKEN, number, b"")
            self._events.on_suspended(connection_class, error)

    def _received(self, tag: int, on_received: Callable[[], None]) -> None:
        del self._mismatched[tag]
        on_received()

    def _tell_mismatch(self, tag: int, received: int) -> None:
        """Tell who posted the receive, in Python or in compiled code."""
        if tag in self._mismatched:
            self._mismatched.pop(tag)(received)
        elif tag // CALL_TAGS in self._transport_set.mismatched:
            self._transport_set.mismatched[tag // CALL_TAGS](self._peer, tag, received)


def _error_of(kind: int, number: int, text: bytes) -> Exception:
    if kind == BROKEN:
        return OSError(number, os.strerror(number)) if number else EOFError()
    if kind == FAULT:
        return RuntimeError(text.decode(errors="replace"))
    return DamagedFrameError(text.decode()) if number else FrameError(text.decode())


_EPOLLIN, _EPOLLOUT = 1, 4


class Selector(selectors.EpollSelector):
    """Serves every native transport that is registered to be read, so that the loop sleeps while they need no Python.

    asyncio asks its selector what is ready. Requests, grants and pieces of messages make sockets ready and need no
    Python at all: here they are dealt with inside that question, without the interpreter's lock, and the loop wakes up
    for whole messages, timers and what other threads ask of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._native_transports: list[NativeTransport] = []
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Watch a file, or serve a native transport."""
        key = super().register(fileobj, events, data)
        self._keys[key.fd] = key
        if isinstance(fileobj, _native.NativeTransport):
            self._native_transports.append(fileobj)
            fileobj.is_served = True
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Watch a file for something else."""
        key = super().modify(fileobj, events, data)
        self._keys[key.fd] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Watch a file, or serve a native transport, no longer."""
        if isinstance(fileobj, _native.NativeTransport):
            self._native_transports.remove(fileobj)
            fileobj.is_served = False
        key = super().unregister(fileobj)
        del self._keys[key.fd]
        return key

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready for Python within ``timeout`` seconds (None: forever)."""
        if not self._native_transports:
            return super().select(timeout)
        found = []
        for descriptor, mask in wait(
            self.fileno(), -1.0 if timeout is None else max(timeout, 0.0), self._native_transports
        ):
            key = self._keys.get(descriptor)
            if key is None:
                continue
            events = (selectors.EVENT_WRITE if mask & ~_EPOLLIN else 0) | (
                selectors.EVENT_READ if mask & ~_EPOLLOUT else 0
            )
            if events & key.events:
                found.append((key, events & key.events))
        return found


MAX_KEPT = 1024
"""Layouts, and dataflows for them, that are kept for the next call of their kind."""

Mismatched = Callable[[int, int, int], None]
"""Told (peer, tag, received signature)."""


class CompiledSliceExecutor:
    """Executes calls on a native transport.

    Rank k of a call is ``ranks[k]`` of the native transport, which tells of a mismatch who stands in ``mismatched`` for
    the call, by its first tag in units of CALL_TAGS.
    """

    def __init__(self, transport_set: TransportSet, most_bytes: int, ranks: Sequence[int]) -> None:
        self._native_transport = transport_set.native_transport
        self._ranks = list(ranks)
        self.mismatched = transport_set.mismatched
        self._pool = _native.TemporaryPool(2 * most_bytes)
        self._executor = _native.SliceExecutor(self._native_transport, self._pool, most_bytes)
        self._layouts: dict[tuple[int, str, str], tuple[Slices, _native.Layout]] = {}
        self._dataflows: dict[int, tuple[Dataflow, _native.Dataflow]] = {}

    def __repr__(self) -> str:
        in_use = f"{self._pool.used_bytes} temporary bytes in use"
        return f"<CompiledSliceExecutor: {self._executor.num_active_slices} slices, {in_use}>"

    def open(self, call: SlicedCall) -> Execution:
        """Return an execution that has not begun."""
        return CompiledExecution(self, call)

    def heard_s(self, peer: int) -> float:
        """Return when a message of ``peer`` last arrived, by the loop's clock; 0 if none did."""
        return self._native_transport.heard_s(self._ranks[peer])

    def compile(self, call: SlicedCall, on_done: Callable[[], None]) -> _native.CallRun:
        """Return ``call`` as compiled code runs it."""
        return _native.CallRun(
            self._executor,
            self._layout(call.slices, call.reduction),
            call.buffer,
            tag=call.tag,
            tag_step=SLICE_TAGS,
            signature=call.signature,
            urgency=call.urgency,
            connection_class=call.connection_class,
            number=call.number,
            on_done=on_done,
        )

    def place_of(self, rank: int) -> int:
        """Return which rank of the calls a rank of the native transport is."""
        return self._ranks.index(rank)

    def _layout(self, slices: Slices, reduction: Reduction) -> _native.Layout:
        """Return the slices for compiled code. Training makes the same calls at each step, so they are kept.

        What an entry is filed under is kept alive in it, so that no id is used again.
        """
        key = id(slices), reduction.dtype, reduction.op
        known = self._layouts.get(key)
        if known is None:
            if len(self._layouts) >= MAX_KEPT:
                self._layouts.clear()
                self._dataflows.clear()
            dataflows = [self._dataflow(dataflow) for dataflow, _ in slices]
            offsets = [[offset * reduction.itemsize for offset in offsets] for _, offsets in slices]
            layout = _native.Layout(dataflows, offsets, reduction.dtype, reduction.op)
            known = self._layouts[key] = slices, layout
        return known[1]

    def _dataflow(self, dataflow: Dataflow) -> _native.Dataflow:
        known = self._dataflows.get(id(dataflow))
        if known is None:
            known = self._dataflows[id(dataflow)] = dataflow, _native.Dataflow(dataflow, self._ranks)
        return known[1]


class CompiledExecution:
    """All slices of one call on their way."""

    __slots__ = ("_call", "_executor", "_run", "is_over")

    def __init__(self, executor: CompiledSliceExecutor, call: SlicedCall) -> None:
        self._executor = executor
        self._call = call
        self._run = executor.compile(call, self._done)
        self.is_over = False

    @property
    def has_more(self) -> bool:
        """Whether there are slices that were not begun."""
        return self._run.has_more

    def start(self) -> None:
        """Begin as many slices as there is room for; the others follow."""
        self._executor.mismatched[self._call.tag // CALL_TAGS] = self._mismatched
        self._run.start()

    def stop(self) -> None:
        """Withdraw: after this nothing is written to the buffer any more, whatever arrives."""
        self._end()
        self._run.stop()

    def awaited_peers(self) -> set[int]:
        """Return who has not delivered yet what may be delivered now."""
        return self._run.awaited_peers()

    def open_peers(self) -> set[int]:
        """Return the ranks that slices under way still have to exchange messages with (-1: none, but work is left)."""
        return self._run.open_peers()

    def _done(self) -> None:
        if not self.is_over:  # else it was stopped meanwhile
            self._end()
            self._call.on_over()

    def _end(self) -> None:
        self.is_over = True
        self._executor.mismatched.pop(self._call.tag // CALL_TAGS, None)

    def _mismatched(self, rank: int, tag: int, received: int) -> None:
        self._call.on_mismatch(self._executor.place_of(rank), tag, received)
