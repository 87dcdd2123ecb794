"""Connections that nobody uses: who agrees to close them, and when.

Of many ranks two that are no neighbours connect when one has something to send (:mod:`syncline.fabric.overlay`). If
neither has sent the other a message for ``idle_s``, the higher asks, the lower agrees, and the higher closes them. Both
keep what a connection that broke needs to go on, and open it like one (:mod:`syncline.fabric.reopening`) as soon as
either has something to send; until then they hear of each other as ranks do that never met.

Who has nothing to send does not know that the other waits. So each has all that the other sent before they rest: data
is acknowledged, control frames come before the two of this in order, and whoever has exchanged a message since it asked
or agreed does not close, or opens again at once. Nor does who waits for a message: it judges by the other's heartbeats
whether that one's program still runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from syncline.fabric.frames import FrameError, FrameType
from syncline.fabric.peer import Peer

ASKS, AGREES = 0, 1
"""What a REST frame says, by its tag."""
LOOKS = 4
"""So often it is looked in ``idle_s`` who has exchanged something."""


class RestingFabric(Protocol):
    """What idle connections need of their fabric."""

    @property
    def rank(self) -> int:
        """This process's rank."""

    @property
    def may_rest(self) -> bool:
        """Whether connections may be closed now: not while further ones are opened to all, nor in the end."""

    def let_rest(self, peer: Peer) -> None:
        """Close the connections to a peer until somebody needs them."""

    def wake(self, peer: Peer) -> None:
        """Open them again."""


class IdleConnections:
    """Those of one fabric."""

    def __init__(self, fabric: RestingFabric, *, idle_s: float) -> None:
        self._fabric = fabric
        self._idle_s = idle_s
        self._looked_s = float("-inf")
        self._exchanged: dict[int, tuple[int, float]] = {}
        """How much was exchanged with each peer, and since when that is so."""
        self._asked: dict[int, int] = {}
        self._agreed: dict[int, int] = {}
        """How much it was when this rank asked, or agreed."""
        self._resting: dict[int, Peer] = {}

    def __repr__(self) -> str:
        return f"<IdleConnections: {len(self._resting)} peers rest>"

    def look(self, now_s: float, peers: Iterable[Peer]) -> None:
        """Ask those of ``peers`` with whom nothing was exchanged; wake whom a call that is under way sends something.

        What begins later wakes them by itself.
        """
        for peer in self._resting.values():
            if not peer.is_drained:
                self._fabric.wake(peer)
        if now_s - self._looked_s < self._idle_s / LOOKS:
            return
        self._looked_s = now_s
        for peer in peers:
            if self._idle_for_s(peer, now_s) >= self._idle_s and peer.rank < self._fabric.rank and self._can_rest(peer):
                self._asked[peer.rank] = peer.num_exchanged
                peer.send_frame(FrameType.REST, tag=ASKS)

    def on_frame(self, peer: Peer, tag: int, now_s: float) -> None:
        """Agree if this rank has nothing to say either, or close what the other agrees to close."""
        if tag != (ASKS if peer.rank > self._fabric.rank else AGREES):
            raise FrameError("it lets connections rest that are not its to close")
        is_idle = self._can_rest(peer)
        if tag == AGREES:
            if self._asked.pop(peer.rank, None) == peer.num_exchanged and is_idle:
                self._fabric.let_rest(peer)
        elif is_idle and self._idle_for_s(peer, now_s) >= self._idle_s / 2:
            self._agreed[peer.rank] = peer.num_exchanged
            peer.send_frame(FrameType.REST, tag=AGREES)

    def has_agreed(self, peer: Peer) -> bool:
        """Whether that a connection ended is what this rank agreed to, and has sent nothing since."""
        return self._agreed.pop(peer.rank, None) == peer.num_exchanged and self._can_rest(peer)

    def begin(self, peer: Peer) -> None:
        """Take note that its connections are closed."""
        self._resting[peer.rank] = peer

    def end(self, peer: Peer) -> None:
        """Take note that they are there again, or that it is lost."""
        for each in (self._resting, self._exchanged, self._asked, self._agreed):
            each.pop(peer.rank, None)

    def _can_rest(self, peer: Peer) -> bool:
        return self._fabric.may_rest and peer.is_idle

    def _idle_for_s(self, peer: Peer, now_s: float) -> float:
        num_exchanged, since_s = self._exchanged.get(peer.rank, (-1, now_s))
        if num_exchanged != peer.num_exchanged:
            since_s = now_s
            self._exchanged[peer.rank] = peer.num_exchanged, now_s
        return now_s - since_s
