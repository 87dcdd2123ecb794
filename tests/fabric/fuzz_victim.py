"""The rank that `fuzz_wire` attacks, and what it watches: destinations, what was reported, and what was kept."""

from __future__ import annotations

import os
import random
import socket
from dataclasses import dataclass, field

from syncline.fabric.frames import CONTROL_CLASS, FrameType
from syncline.fabric.options import FabricOptions
from syncline.fabric.peer_transport import TransportSet
from syncline.fabric.shared_host import address_of
from syncline.fabric.sizing import GrantWindow

CREDIT_BYTES = 150_000
OPTIONS = FabricOptions(credit_bytes=CREDIT_BYTES, eager_bytes=4096, chunk_bytes=4096)
SIZES = (0, 1, 47, 300, 4096, 5000, 20_000, 60_000)
UNTOUCHED = 0xEE
"""What destinations hold at first; payloads have no such byte."""
GUARD_BYTES = 64
SOURCE = memoryview(bytes(place % 200 for place in range(70_000)))
"""Payloads, and memory that the peer lets be copied."""
ADDRESS = address_of(SOURCE)
MAX_NUMBER = (1 << 64) - 1


class RuleBrokenError(AssertionError):
    """What the rank did that it must not."""


@dataclass(eq=False)
class Destination:
    """A posted receive, and the memory around it."""

    tag: int
    num_bytes: int
    memory: bytearray = field(init=False)
    is_over: bool = False
    is_copied: bool = False
    """The peer named an address of its choice: what lies there may be any bytes."""
    kept: bytes | None = None
    """What it held when it was cancelled."""

    def __post_init__(self) -> None:
        self.memory = bytearray([UNTOUCHED]) * (self.num_bytes + 2 * GUARD_BYTES)

    def view(self) -> memoryview:
        """Return what may be written."""
        return memoryview(self.memory)[GUARD_BYTES : GUARD_BYTES + self.num_bytes]

    def check(self) -> None:
        """Raise if it was written where or when it must not."""
        edges = self.memory[:GUARD_BYTES] + self.memory[GUARD_BYTES + self.num_bytes :]
        if edges.count(UNTOUCHED) != len(edges):
            raise RuleBrokenError(f"bytes beside the destination of message {self.tag} were written")
        if self.kept is not None and self.kept != self.memory:
            raise RuleBrokenError(f"the destination of message {self.tag} was written after it was cancelled")
        if self.is_over and not self.is_copied and UNTOUCHED in self.memory[GUARD_BYTES : GUARD_BYTES + self.num_bytes]:
            raise RuleBrokenError(f"message {self.tag} was reported whole, but a part of it never came")


class Victim:
    """The rank under attack: one transport, and what it tells (PeerTransportEvents)."""

    def __init__(self, generator: random.Random, num_classes: int) -> None:
        self._generator = generator
        most_bytes = generator.choice([2000, 20_000, 100_000])
        learns = generator.random() < 0.3
        window = (
            GrantWindow(most_bytes=most_bytes, least_bytes=most_bytes // 4, bytes_per_s=1e6)
            if learns
            else GrantWindow.fixed(most_bytes)
        )
        self.transport_set = TransportSet(
            {"window": window, "quantum_bytes": generator.choice([500, 8192]), "sender_bytes": {}, "shares": {}}
        )
        self.transport = self.transport_set.transport(1, options=OPTIONS, events=self)
        pairs = [socket.socketpair() for _ in range(num_classes + 1)]
        self.theirs = {number: pair[1] for number, pair in enumerate(pairs, start=CONTROL_CLASS)}
        for sock in self.theirs.values():
            sock.setblocking(False)
        self.transport.attach([(pair[0], None) for pair in pairs])
        self.is_read = generator.random() < 0.4
        if self.is_read:
            self.transport.let_be_read(os.getpid())
        if generator.random() < 0.3:
            self.transport.let_read_us()
        self.transport.send_frame(FrameType.CREDIT, message_bytes=CREDIT_BYTES)
        self.destinations: list[Destination] = []
        self.num_sends = 0
        self.outcome = ""

    def on_frame(self, kind: FrameType, tag: int, payload: bytes) -> None:
        """Take what concerns the peer as a whole; a loss ends it."""
        if kind in (FrameType.LOST, FrameType.FAREWELL):
            self.end(kind.name)

    def on_all_ended(self) -> None:
        """End as a fabric does."""
        self.end("ended")

    def on_all_closed(self) -> None:
        """End as a fabric does."""
        self.end("closed")

    def on_broken(self, error: Exception) -> None:
        """Drop the peer."""
        if isinstance(error, RuntimeError):
            raise RuleBrokenError(f"the rank failed by itself: {error}")
        self.end(type(error).__name__)

    def on_suspended(self, connection_class: int, error: Exception) -> None:
        """Drop the peer: it does not dial again."""
        self.on_broken(error)

    def on_unreadable(self, error: OSError) -> None:
        """Drop the peer."""
        self.end(f"unreadable: {error.errno}")

    def end(self, outcome: str) -> None:
        """Release the connections."""
        if not self.outcome:
            self.outcome = outcome
            self.transport.close()

    def act(self) -> None:
        """Do what a rank does: receive, send, cancel."""
        choice = self._generator.random()
        if choice < 0.6:
            destination = Destination(tag=len(self.destinations), num_bytes=self._size())
            self.destinations.append(destination)
            self.transport.receive(
                destination.tag,
                destination.view(),
                signature=7,
                urgency=self._generator.randrange(3),
                on_received=lambda: self._received(destination),
            )
        elif choice < 0.85:
            payload = SOURCE[: self._generator.choice(SIZES)]
            self.transport.send(
                self.num_sends, payload, signature=7, urgency=0, connection_class=self._generator.randrange(2)
            )
            self.num_sends += 1
        elif self.destinations:
            destination = self._generator.choice(self.destinations)
            if not destination.is_over and destination.kept is None:
                self.transport.cancel(destination.tag)
                destination.kept = bytes(destination.memory)

    def _size(self) -> int:
        """Most often what the peer expects of the next message."""
        return SIZES[len(self.destinations) % len(SIZES)] if self._generator.random() < 0.9 else 5000

    def _received(self, destination: Destination) -> None:
        if destination.is_over or destination.kept is not None:
            raise RuleBrokenError(f"message {destination.tag} was reported twice, or after it was cancelled")
        destination.is_over = True

    def check(self) -> None:
        """Raise if a rule is broken."""
        for destination in self.destinations:
            destination.check()
        waiting_bytes = self.transport_set.native_transport.unexpected_bytes(1)
        if not self.outcome and waiting_bytes > CREDIT_BYTES:
            raise RuleBrokenError(f"{waiting_bytes} bytes wait for nobody; {CREDIT_BYTES} are allowed")

    def close(self) -> None:
        """Release everything, and check that nothing is held any more."""
        self.end("over")
        self.transport_set.close()
        for sock in self.theirs.values():
            sock.close()
