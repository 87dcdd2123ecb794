"""The seam between a fabric and what moves its bytes: a *peer transport*, one peer's connections and what waits there.

There are two: :mod:`syncline.fabric.python_peer_transport`, and :mod:`syncline.fabric.native_peer_transport` over
compiled code, where that could be built. They speak one protocol on the network, so ranks of either kind make one job.
A transport knows messages, grants and frames; what the end of a peer means, and what is told to others, is for
:mod:`syncline.fabric.peer`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, Unpack

from syncline.fabric.frame_checks import FrameKeys
from syncline.fabric.frames import FrameType
from syncline.fabric.grant_window import GrantWindow
from syncline.fabric.options import FabricOptions
from syncline.fabric.protocol import ReceiveSettings, SendSettings
from syncline.fabric.slice_executor import SliceExecutor
from syncline.fabric.statistics import PeerStatistics


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


class PeerTransport(Protocol):
    """The connections to one peer, from the first to the last."""

    @property
    def is_drained(self) -> bool:
        """Whether everything that was sent is with the kernel."""

    @property
    def progress(self) -> int:
        """What the peer's last heartbeat carried (:class:`~syncline.fabric.progress.Progress`)."""

    def attach(self, sockets: Sequence[tuple[socket.socket, FrameKeys | None]]) -> None:
        """Take the next sockets, control before the data connections, with the keys that authenticate their frames.

        Only the transport in Python can do that.
        """

    def suspend(self, connection_class: int) -> bool:
        """Neither read nor write a connection until it goes on with another socket; False if it is over for good."""

    def forget_socket(self, connection_class: int) -> None:
        """Close the socket of a suspended connection."""

    def received_position(self, connection_class: int) -> int:
        """Return how many bytes of what the peer sends on a connection are here, in whole frames."""

    def resume(self, connection_class: int, sock: socket.socket, position: int) -> int:
        """Let a suspended connection go on with another socket, behind the first bytes, which the peer has.

        Returns how many bytes are sent again.
        :class:`~syncline.fabric.frames.FrameError` if it cannot have them.
        """

    def use(self, options: FabricOptions) -> None:
        """Send with these marks and in these sizes from now on."""

    def send(self, tag: int, payload: memoryview, **settings: Unpack[SendSettings]) -> None:
        """Queue a message (see :class:`~syncline.fabric.protocol.Fabric`)."""

    def receive(self, tag: int, destination: memoryview, **settings: Unpack[ReceiveSettings]) -> None:
        """Post a receive."""

    def cancel(self, tag: int) -> None:
        """Forget a receive."""

    def drop_streams(self, streams: range) -> None:
        """Throw away what comes in these streams from now on, and what came early; it is counted."""

    def send_frame(self, kind: FrameType, *, tag: int = 0, message_bytes: int = 0, payload: bytes = b"") -> None:
        """Queue a control frame."""

    def flush_control(self) -> None:
        """Write queued control frames now, as far as the kernel takes them."""

    def end(self) -> None:
        """Say on each connection that nothing more will come."""

    def close(self) -> None:
        """Release the connections, and forget what was not received whole."""

    def take_heard(self) -> bool:
        """Whether anything arrived since the last time this was asked."""

    def let_be_read(self, pid: int) -> None:
        """Copy messages out of the peer's memory where it names their addresses; it is process ``pid``."""

    def let_read_us(self) -> None:
        """Name the addresses of announced messages: the peer can copy them."""

    def statistics(self) -> PeerStatistics:
        """Return a frozen record of all counters."""


class TransportSet(Protocol):
    """All transports of one fabric, and the grants that order their senders."""

    def transport(self, peer: int, *, options: FabricOptions, events: PeerTransportEvents) -> PeerTransport:
        """Make the wire of one peer."""

    def open_executor(self, reference: SliceExecutor, ranks: Sequence[int]) -> SliceExecutor:
        """Return who executes slices here (see :class:`~syncline.fabric.protocol.Transport`)."""

    def resize(self, *, window: GrantWindow, quantum_bytes: int, sender_bytes: Mapping[int, int]) -> None:
        """Grant with these sizes from now on."""

    def keep_beating(self, *, interval_s: float, limit_s: float) -> None:
        """Repeat the last heartbeat while somebody holds the interpreter, for ``limit_s``, where that is compiled."""

    def tell_drained(self, on_drained: Callable[[], None]) -> None:
        """Tell from now on whenever everything that was sent to a peer is with the kernel."""

    def close(self) -> None:
        """Watch nothing any more; every transport is closed."""
