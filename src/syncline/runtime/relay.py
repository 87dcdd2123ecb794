"""The relay: a communicator's one listener on its fabric, which hands what happens to whom it concerns.

That is the engine of all ranks, the ports, and the groups: some ranks of the job that make collectives among
themselves, with an engine of their own. A group's control messages travel in an envelope with the group's number.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from syncline.errors import FabricClosedError, FabricError
from syncline.fabric import FabricListener

LossHandler = Callable[[int, Exception], None]
ControlHandler = Callable[[int, bytes], None]

_ENVELOPE = struct.Struct("<BH")
_GROUP = 0xFF
"""The first byte of an envelope; no kind of control message of an engine has it."""
_GROUP_BYTE = bytes([_GROUP])
MAX_EARLY_BYTES = 4 << 20
"""What one rank may tell groups that this one has not opened yet, all together; some ten thousand calls."""
COST_BYTES = 256
"""What keeping a message costs beside its bytes."""


class Member(Protocol):
    """A group of which this rank is a member, as the relay sees it; ranks are those of the job."""

    @property
    def streams(self) -> range:
        """Its calls' streams, which nobody else uses; the first is its number."""

    def on_peer_lost(self, peer: int, error: Exception) -> None:
        """Take note that a rank is gone; it need not be a member."""

    def on_control(self, peer: int, payload: bytes) -> None:
        """Take a control message of another member."""


def enclose(number: int, payload: bytes) -> bytes:
    """Return a control message of group ``number`` as it travels."""
    return _ENVELOPE.pack(_GROUP, number) + payload


class Told:
    """Control messages that are of no engine; a member as a group is, of which losses are told elsewhere."""

    def __init__(self, number: int, on_control: ControlHandler) -> None:
        self.streams = range(number, number + 1)
        self.on_control = on_control

    def on_peer_lost(self, peer: int, error: Exception) -> None:
        """Ports watch losses by themselves."""

    def enclose(self, payload: bytes) -> bytes:
        """Return a message to the same number elsewhere as it travels."""
        return enclose(self.streams.start, payload)


class Relay:
    """The fabric's listener: hands everything to the engine or to a group, and losses to everyone."""

    def __init__(self, engine: FabricListener) -> None:
        self._engine = engine
        self._groups: dict[int, Member] = {}
        self._ended_groups: set[int] = set()
        self._early: dict[int, list[tuple[int, bytes]]] = {}
        self._early_bytes: Counter[int] = Counter()
        self._spoilt: dict[int, int] = {}  # groups of which messages were dropped, and who sent too many
        self._losses: dict[int, Exception] = {}
        self.handlers: list[LossHandler] = []

    def on_peer_lost(self, peer: int, error: Exception) -> None:
        """Tell the engines first: their errors name what was under way."""
        self._losses[peer] = error
        self._engine.on_peer_lost(peer, error)
        for group in tuple(self._groups.values()):
            group.on_peer_lost(peer, error)
        for handler in tuple(self.handlers):
            handler(peer, error)

    def losses(self) -> tuple[tuple[int, Exception], ...]:
        """Return who is lost or has left, and what was told of it."""
        return tuple(self._losses.items())

    def end(self, rank: int) -> None:
        """Tell the ports that this very rank leaves, so that nobody waits on them."""
        error = FabricClosedError(f"the communicator of rank {rank} is closed; open a new one with syncline.init()")
        handlers, self.handlers = self.handlers, []
        for handler in handlers:
            handler(rank, error)

    def on_control(self, peer: int, payload: bytes) -> None:
        """Hand a control message to the engine, or to its group, which may not have been opened here yet."""
        if payload[:1] != _GROUP_BYTE or len(payload) < _ENVELOPE.size:
            self._engine.on_control(peer, payload)
            return
        _, number = _ENVELOPE.unpack_from(payload)
        inner = payload[_ENVELOPE.size :]
        if number in self._groups:
            self._groups[number].on_control(peer, inner)
        elif number not in self._ended_groups and number not in self._spoilt:
            self._keep(number, peer, inner)

    def add_group(self, group: Member) -> None:
        """Tell ``group`` from now on, and what was for it before; FabricError if that was too much to be kept."""
        number = group.streams.start
        if number in self._spoilt:
            raise FabricError(
                f"Rank {self._spoilt[number]} told groups more than {MAX_EARLY_BYTES >> 20} MiB before this rank "
                f"opened group {number}, and messages were dropped; let all its ranks open a group before they make "
                "many calls"
            )
        self._groups[number] = group
        for peer, error in self._losses.items():
            group.on_peer_lost(peer, error)
        for peer, payload in self._take_early(number):
            group.on_control(peer, payload)

    def remove_group(self, group: Member) -> None:
        """Drop whatever still comes for ``group``."""
        if self._groups.pop(group.streams.start, None) is not None:
            self._ended_groups.add(group.streams.start)

    def _keep(self, number: int, peer: int, payload: bytes) -> None:
        """Keep a message for a group that is not open yet; if ``peer`` sends too much, forget all that is the group's.

        A group that has missed one message cannot be used: it would wait for it until its deadline.
        """
        self._early.setdefault(number, []).append((peer, payload))
        self._early_bytes[peer] += len(payload) + COST_BYTES
        if self._early_bytes[peer] > MAX_EARLY_BYTES:
            self._take_early(number)
            self._spoilt[number] = peer

    def _take_early(self, number: int) -> list[tuple[int, bytes]]:
        early = self._early.pop(number, [])
        for peer, payload in early:
            self._early_bytes[peer] -= len(payload) + COST_BYTES
        return early
