"""A wire over compiled code (``native/exchange.hpp``): the loop watches all connections as one, and hears of messages.

The rules are those of :mod:`syncline.fabric.python_wire` and what it is made of, and so are the bytes on the network.
What differs is who runs for a request, a grant or a piece of a message: the interpreter does not.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from syncline.fabric._native import CallRun, Dataflow, Exchange, GrantScheduler, Layout, TemporaryPool, Walker, can_add
from syncline.fabric.callbacks import call_back
from syncline.fabric.fetching import Fetcher
from syncline.fabric.fitting import GrantSizes
from syncline.fabric.frame_checks import FrameKeys
from syncline.fabric.frames import CONTROL_CLASS, MEMORY_CLASS, DamagedFrameError, FrameError, FrameType
from syncline.fabric.grant_window import GrantWindow
from syncline.fabric.options import FabricOptions
from syncline.fabric.shared_host import read_memory
from syncline.fabric.sockets import mark
from syncline.fabric.statistics import ConnectionStatistics
from syncline.fabric.wire import WireEvents

__all__ = [
    "CallRun",
    "Dataflow",
    "Exchange",
    "Layout",
    "NativeWire",
    "NativeWiring",
    "TemporaryPool",
    "Walker",
    "can_add",
]

SENT, RECEIVED, FRAME, MISMATCH, FETCH, BROKEN, VIOLATION, ALL_ENDED, ALL_CLOSED, DRAINED, DONE, FAULT = range(1, 13)
"""Kinds of events, as ``exchange.hpp`` counts them; those with whom to call bring nothing else."""
MAX_PASSES = 8
"""How often what Python does may bring about more, before the loop has its turn."""


class NativeWiring:
    """All wires of one fabric, on the running loop."""

    def __init__(self, sizes: GrantSizes) -> None:
        self._loop = asyncio.get_running_loop()
        self._scheduler = GrantScheduler(**sizes)
        self.exchange = Exchange(self._scheduler)
        self.fetcher = Fetcher(self._loop)
        self._wires: dict[int, NativeWire] = {}
        self._on_drained: Callable[[], None] = lambda: None
        self._is_closed = False
        self._loop.add_reader(self.exchange, self._on_ready)

    def __repr__(self) -> str:
        return f"<NativeWiring: {'closed' if self._is_closed else f'{len(self._wires)} wires'}>"

    def wire(self, peer: int, *, options: FabricOptions, events: WireEvents) -> NativeWire:
        """Make the wire of one peer."""
        self._wires[peer] = NativeWire(peer, options=options, events=events, wiring=self)
        return self._wires[peer]

    def resize(self, *, window: GrantWindow, quantum_bytes: int, sender_bytes: Mapping[int, int]) -> None:
        """Grant with these sizes from now on."""
        self._scheduler.resize(window=window, quantum_bytes=quantum_bytes, sender_bytes=dict(sender_bytes))

    def keep_beating(self, *, interval_s: float, limit_s: float) -> None:
        """Repeat the last heartbeat while somebody holds the interpreter."""
        self.exchange.keep_beating(interval_s=interval_s, limit_s=limit_s)

    def tell_drained(self, on_drained: Callable[[], None]) -> None:
        """Tell from now on whenever everything that was sent to a peer is with the kernel."""
        self._on_drained = on_drained
        self.exchange.tells_drained = True

    def close(self) -> None:
        """Watch nothing any more; every wire is closed."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self.exchange)
            self.exchange.close()
            self.fetcher.close()

    def _on_ready(self) -> None:
        if not self.exchange.is_served:  # else it has been polled
            self.exchange.poll()
        for _ in range(MAX_PASSES):
            self._tell()
            self.exchange.finish()
            if not self.exchange.has_events:
                return

    def _tell(self) -> None:
        while (event := self.exchange.next_event()) is not None:
            if len(event) == 2:
                call_back(event[1])
            else:
                self._handle(*event)

    def _handle(self, kind: int, peer: int, tag: int, number: int, other: int, text: bytes, serial: int) -> None:
        if kind == DRAINED:
            self._on_drained()
        else:
            call_back(partial(self._wires[peer].handle, kind, tag, number, other, text, serial))


class NativeWire:
    """The connections to one peer."""

    def __init__(self, peer: int, *, options: FabricOptions, events: WireEvents, wiring: NativeWiring) -> None:
        self._peer = peer
        self._options = options
        self._events = events
        self._wiring = wiring
        self._exchange = wiring.exchange
        self._sockets: list[socket.socket] = []
        self._pid = 0
        self._is_closed = False
        self._exchange.add_peer(peer, eager_bytes=options.eager_bytes, credit_bytes=options.credit_bytes)
        self.send = partial(self._exchange.send, peer)
        self.receive = partial(self._exchange.receive, peer)
        self.cancel = partial(self._exchange.cancel, peer)
        self.send_frame = partial(self._exchange.send_frame, peer)
        self.flush_control = partial(self._exchange.flush_control, peer)
        self.end = partial(self._exchange.end, peer)
        self.take_heard = partial(self._exchange.take_heard, peer)
        self.let_read_us = partial(self._exchange.let_read_us, peer)

    def __repr__(self) -> str:
        return f"<NativeWire to rank {self._peer}: {'closed' if self._is_closed else f'{self.num_classes} classes'}>"

    @property
    def num_classes(self) -> int:
        """Number of data connections in use."""
        return max(len(self._sockets) - 1, 0)

    @property
    def is_drained(self) -> bool:
        """Whether everything that was sent is with the kernel."""
        return not self._exchange.num_unsent(self._peer)

    @property
    def unexpected_bytes(self) -> int:
        """Payload that came before its receive."""
        return self._exchange.unexpected_bytes(self._peer)

    @property
    def num_pending(self) -> int:
        """Number of receives that are posted and not finished."""
        return self._exchange.num_pending(self._peer)

    @property
    def progress(self) -> int:
        """What the peer's last heartbeat carried."""
        return self._exchange.progress(self._peer)

    def use_keys(self, connection_class: int, keys: FrameKeys) -> None:  # noqa: ARG002 - never called
        """Authenticate frames: that is for the wire in Python, which is chosen where it is asked for."""
        raise AssertionError("compiled wires have no keyed hash")

    def open(self, control: socket.socket, data: Sequence[socket.socket]) -> None:
        """Take the sockets that a fabric begins with."""
        control.setblocking(False)
        self._sockets.append(control)
        self._exchange.attach_control(self._peer, control.fileno())
        self._exchange.start(self._peer, CONTROL_CLASS)
        self.add(data)

    def add(self, data: Sequence[socket.socket]) -> None:
        """Take the sockets of further classes."""
        for sock in data:
            sock.setblocking(False)
            connection_class = self.num_classes
            self._sockets.append(sock)
            self._exchange.attach_data(self._peer, sock.fileno(), chunk_bytes=self._options.chunk_bytes)
            self._exchange.start(self._peer, connection_class)

    def use(self, options: FabricOptions) -> None:
        """Send with these marks and in these sizes from now on."""
        self._options = options
        self._exchange.use(self._peer, eager_bytes=options.eager_bytes, chunk_bytes=options.chunk_bytes)
        for connection_class, sock in enumerate(self._sockets, start=CONTROL_CLASS):
            mark(sock, connection_class, options)

    def close(self) -> None:
        """Release the connections, and forget what was not received whole."""
        self._is_closed = True
        self._exchange.close_peer(self._peer)
        for sock in self._sockets:
            sock.close()

    def let_be_read(self, pid: int) -> None:
        """Copy messages out of the peer's memory where it names their addresses."""
        self._pid = pid
        self._exchange.let_be_read(self._peer)

    def statistics(self) -> tuple[ConnectionStatistics, ...]:
        """Return the counters of each connection."""
        names = (
            "connection_class",
            "sent_bytes",
            "sent_messages",
            "received_bytes",
            "received_messages",
            "overhead_bytes",
            "queued_bytes",
        )
        counters = self._exchange.counters(self._peer)
        sent_bytes, num_sent, received_bytes, num_received = self._exchange.memory_counters(self._peer)
        if num_sent or num_received:
            counters.append((MEMORY_CLASS, sent_bytes, num_sent, received_bytes, num_received, 0, 0))
        return tuple(
            ConnectionStatistics(peer=self._peer, **dict(zip(names, entry, strict=True))) for entry in counters
        )

    def handle(self, kind: int, tag: int, number: int, other: int, text: bytes, serial: int) -> None:
        """Tell of one event; a peer that is gone has no more to tell."""
        if self._is_closed:
            return
        if kind == FRAME:
            try:
                self._events.on_frame(FrameType(number), tag, text)
            except FrameError as error:
                self._events.on_broken(error)
        elif kind == FETCH:
            self._wiring.fetcher.add(number, partial(self._fetch, tag, other, serial))
        elif kind == MISMATCH:
            self._events.on_mismatch(tag, number, other)
        elif kind == ALL_ENDED:
            self._events.on_all_ended()
        elif kind == ALL_CLOSED:
            self._events.on_all_closed()
        else:
            self._events.on_broken(_error_of(kind, number, text))

    def _fetch(self, tag: int, address: int, serial: int, limit_bytes: int) -> int:
        """Copy at most ``limit_bytes`` more of a message out of the peer's memory; return how many remain."""
        target = self._exchange.fetch_target(self._peer, tag, serial, limit_bytes)
        if target is None:  # the peer is gone, or the receive was cancelled
            return 0
        destination, start = target
        try:
            read_memory(self._pid, address + start, destination)
        except OSError as error:
            self._events.on_unreadable(error)
            return 0
        return self._exchange.fetched(self._peer, tag, serial, destination.nbytes)


def _error_of(kind: int, number: int, text: bytes) -> Exception:
    if kind == BROKEN:
        return OSError(number, os.strerror(number)) if number else EOFError()
    if kind == FAULT:
        return RuntimeError(text.decode(errors="replace"))
    return DamagedFrameError(text.decode()) if number else FrameError(text.decode())
