"""Calls in which each rank has its own bytes for each other one: gather, scatter, all-to-all.

No rank but the receiver needs those bytes and none can be added up on the way, so no schedule saves traffic: they go
from the one to the other directly. All else is as with a collective: the order of calls, agreement, deadlines, losses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from syncline.errors import ConfigurationError
from syncline.fabric import Transport
from syncline.runtime.call import Call, Description

DirectKind = Literal["gather", "scatter", "all_to_all"]
Messages = tuple[tuple[int, memoryview], ...]
"""Peers, and the bytes for each of them, or of each; a peer has at most one entry."""

MESSAGE_BYTES = 1 << 20
"""Longer ones are sent in several messages, so that urgent ones of other calls pass between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectCall(Call):
    """One rank's part in a call of direct messages.

    Of each pair of ranks, the one must list as many bytes in ``sends`` as the other in ``receives``, none included: the
    empty message tells that there are none. Both are writable bytes that are the engine's until the call ends, and must
    not overlap.
    """

    direction: DirectKind
    root: int | None
    """Who receives in a gather and sends in a scatter."""
    num_ranks: int
    about: str
    """What all ranks must say alike, such as "12 bytes of float32 from each"."""
    sends: Messages
    receives: Messages

    def __post_init__(self) -> None:
        for _, memory in (*self.sends, *self.receives):
            if memory.format != "B" or memory.ndim != 1 or not memory.contiguous:
                raise ConfigurationError(
                    f"{self.what}: messages are contiguous bytes; give memoryview(array).cast('B')"
                )
        self.check_deadline()

    @property
    def kind(self) -> str:
        """``"gather"``, ``"scatter"`` or ``"all_to_all"``."""
        return self.direction

    @property
    def num_bytes(self) -> int:
        """What is sent and received here."""
        return sum(memory.nbytes for _, memory in (*self.sends, *self.receives))

    @property
    def peers(self) -> frozenset[int]:
        """All ranks that this one exchanges messages with."""
        return frozenset(peer for peer, _ in (*self.sends, *self.receives))

    def needed_by(self, rank: int) -> Collection[int]:
        """Return who receives from ``rank``."""
        if self.direction == "gather":
            return [self.root] if self.root is not None and self.root != rank else []
        if self.direction == "scatter" and rank != self.root:
            return []
        return [peer for peer in range(self.num_ranks) if peer != rank]

    def place_own_part(self, rank: int) -> None:
        """Nothing goes to the own rank."""

    def describe(self) -> Description:
        """Describe it by what all ranks must say alike."""
        where = "" if self.root is None else f" {'to' if self.direction == 'gather' else 'from'} rank {self.root}"
        text = f"{self.direction} of {self.about}{where}"
        return Description(identity=text, text=f"{text} ({self.what[:200]})")


class DirectExecution:
    """All messages of one call on their way, as an :class:`~syncline.fabric.slice_executor.Execution`.

    ``tag`` is the first of the call's; those of each direction between two ranks are numbered from it.
    """

    has_more = False
    """All messages begin at once."""

    def __init__(
        self,
        fabric: Transport,
        call: DirectCall,
        *,
        tag: int,
        signature: int,
        on_over: Callable[[], None],
        on_mismatch: Callable[[int, int, int], None],
    ) -> None:
        self._fabric = fabric
        self._call = call
        self._signature = signature
        self._on_over = on_over
        self._on_mismatch = on_mismatch
        self._receives = {(peer, place): part for peer, place, part in _numbered(call.receives, tag)}
        self._sends = {(peer, place): part for peer, place, part in _numbered(_round_robin(call, fabric.rank), tag)}
        self._is_stopped = False

    @property
    def is_over(self) -> bool:
        """Whether every message has been received, or has left."""
        return not self._receives and not self._sends

    def start(self) -> None:
        """Begin all messages: receives first, so that what comes finds its place."""
        for (peer, tag), part in tuple(self._receives.items()):
            self._fabric.receive(
                peer,
                tag,
                part,
                signature=self._signature,
                urgency=self._call.urgency,
                on_received=partial(self._received, peer, tag),
                on_mismatch=partial(self._mismatched, peer, tag),
            )
        for (peer, tag), part in tuple(self._sends.items()):
            self._fabric.send(
                peer,
                tag,
                part,
                signature=self._signature,
                urgency=self._call.urgency,
                connection_class=self._call.connection_class,
                on_sent=partial(self._sent, peer, tag),
            )

    def stop(self) -> None:
        """Withdraw: nothing is written any more."""
        self._is_stopped = True
        for peer, tag in self._receives:
            self._fabric.cancel(peer, tag)

    def awaited_peers(self) -> set[int]:
        """Return who has not delivered yet."""
        return {peer for peer, _ in self._receives}

    def open_peers(self) -> set[int]:
        """Return whom there are still messages to, or from."""
        return self.awaited_peers() | {peer for peer, _ in self._sends}

    def _received(self, peer: int, tag: int) -> None:
        if not self._is_stopped:
            del self._receives[peer, tag]
            self._end()

    def _sent(self, peer: int, tag: int) -> None:
        if not self._is_stopped:
            del self._sends[peer, tag]
            self._end()

    def _end(self) -> None:
        if self.is_over:
            self._on_over()

    def _mismatched(self, peer: int, tag: int, received: int) -> None:
        if not self._is_stopped:
            self._on_mismatch(peer, tag, received)


def _round_robin(call: DirectCall, rank: int) -> Messages:
    """Begin with the next rank, so that not all ranks send to one of them first."""
    return tuple(sorted(call.sends, key=lambda entry: (entry[0] - rank) % call.num_ranks))


def _numbered(messages: Messages, first_tag: int) -> Iterator[tuple[int, int, memoryview]]:
    """Return peer, tag and bytes of each message."""
    for peer, memory in messages:
        starts = range(0, max(1, memory.nbytes), MESSAGE_BYTES)
        for number, start in enumerate(starts):
            yield peer, first_tag + number, memory[start : start + MESSAGE_BYTES]
