"""Messages of the fabric in memory: what is on its way, and what waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Parcel:
    """A message on its way; ``payload`` is the sender's memory, or a copy if it was sent ahead."""

    source: int
    target: int
    tag: int
    payload: memoryview
    signature: int
    urgency: int
    connection_class: int
    on_sent: Callable[[], None] | None
    is_control: bool = False
    is_settled: bool = False
    """The sender is done with it; it is the receiver's now."""


@dataclass(slots=True, kw_only=True)
class Posted:
    """A receive that waits for its message."""

    destination: memoryview
    signature: int
    on_received: Callable[[], None]
    on_mismatch: Callable[[int], None] | None


@dataclass(slots=True)
class Counters:
    """What one rank counts of another, in one connection class."""

    sent_bytes: int = 0
    sent_messages: int = 0
    received_bytes: int = 0
    received_messages: int = 0
    queued_bytes: int = 0
