"""One rank's part in the overlay by which many ranks hear of each other: what it spreads, passes on and heeds.

Who its neighbours are, and what gossip is, stands in :mod:`syncline.fabric.gossip`; what a loss means, in
:mod:`syncline.fabric.tcp`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Protocol

from syncline.errors import PeerLostError, escape_text
from syncline.fabric.frames import FrameError, FrameType, cut_reason
from syncline.fabric.gossip import (
    Gossip,
    GossipKind,
    Telling,
    decode,
    encode_leaving,
    encode_loss,
    encode_message,
    neighbours,
    next_hop,
    read_message,
    successors,
)
from syncline.fabric.peer import Peer


class OverlayFabric(Protocol):
    """What an overlay needs of its fabric."""

    def living(self) -> Iterable[Peer]:
        """Return the peers to whom this rank is connected."""

    def is_lost(self, peer: int) -> bool:
        """Whether a rank is lost, or has left."""

    def meet(self, peer: Peer, then: Callable[[], None]) -> None:
        """Do something once a peer is connected."""

    def lose(self, peer: Peer, error: PeerLostError) -> None:
        """Report a peer as lost."""

    def on_farewell(self, peer: Peer) -> None:
        """Hear that a rank leaves."""

    def on_control_message(self, peer: Peer, payload: bytes) -> None:
        """Take a control message."""


class Overlay:
    """The overlay as one rank sees it; ``peers`` are all others, and ``patience_s`` how long it may have a hole."""

    def __init__(self, rank: int, peers: Mapping[int, Peer], fabric: OverlayFabric, *, patience_s: float) -> None:
        self._rank, self._world_size = rank, len(peers) + 1
        self._patience_s = patience_s
        self._peers = peers
        self._fabric = fabric
        self._gossip = Gossip(rank)
        self._num_lost = 0
        self._is_torn = self._is_cut_off = self._has_left = False
        self._torn_s: float | None = None
        self.neighbours = neighbours(rank, self._world_size)
        """To whom this rank is connected from the start."""
        for peer in peers.values():
            peer.overlay = self
            peer.is_neighbour = peer.rank in self.neighbours

    def __repr__(self) -> str:
        return f"<Overlay of rank {self._rank} of {self._world_size}: {self._gossip}>"

    def watchers(self, rank: int) -> Collection[int]:
        """Return who finds a rank lost that is lost, if it is no peer to whom this one is connected."""
        peer = self._peers.get(rank)
        return () if peer is None or peer.is_ready else neighbours(rank, self._world_size)

    def spread_message(self, targets: Collection[int], payload: bytes) -> None:
        """Tell some ranks a control message."""
        self._spread(encode_message(targets, self._world_size, payload))

    def spread_loss(self, rank: int, reason: str) -> None:
        """Tell all that ``rank``, or this one, is lost."""
        self._spread(encode_loss(rank, cut_reason(reason)))

    def spread_leaving(self) -> None:
        """Tell all that this rank leaves, and nothing more: peers that read its END may close at once."""
        self._spread(encode_leaving(self._rank))
        self._has_left = True

    def pass_on(self, target: int, payload: bytes) -> None:
        """Send a control message through others, which get it lost if one of them is."""
        self._route(self._rank << 32 | target, payload)

    def on_ready(self, peer: Peer) -> None:
        """Let a new peer hear what was told before; of others only if it passes that on."""
        for telling in self._gossip.kept() if peer.is_neighbour else self._gossip.own():
            peer.send_frame(FrameType.GOSSIP, tag=telling.tag, payload=telling.body)

    def on_gone(self, peer: Peer, *, has_left: bool) -> None:
        """Look for others in place of a peer that is gone; without any neighbour, nobody else is in reach."""
        self._is_torn |= peer.is_neighbour
        self._num_lost += peer.is_neighbour and not has_left
        if has_left or self._is_cut_off or any(other.is_neighbour for other in self._fabric.living()):
            return
        self._is_cut_off = True
        for other in self._peers.values():
            if not other.is_ready:
                text = f"{other.name} is out of reach: {peer.name} was the last from whom this rank heard of others"
                self._fabric.lose(other, PeerLostError(text, rank=other.rank, host=other.host))

    def mend(self, now_s: float) -> None:
        """Take others as neighbours in place of those that are gone, at once if half of them are lost.

        One that is gone is often the first of all: then there is nothing to mend a little later.
        """
        if not self._is_torn:
            return
        if self._torn_s is None:
            self._torn_s = now_s
        if now_s - self._torn_s < self._patience_s and 2 * self._num_lost < len(self.neighbours):
            return
        self._is_torn, self._torn_s = False, None
        for rank in successors(self._rank, self._world_size, self._fabric.is_lost):
            peer = self._peers[rank]
            if not peer.is_neighbour:
                peer.is_neighbour = True
                self._fabric.meet(peer, partial(self._join, peer))

    # --- what peers tell ---

    def on_gossip(self, peer: Peer, tag: int, body: bytes) -> None:
        """Pass on what is heard for the first time, and heed it."""
        telling = Telling(tag, body)
        if telling.origin >= self._world_size:
            raise FrameError(f"gossip of rank {telling.origin} of {self._world_size}")
        origin = self._peers.get(telling.origin)  # none of what this rank has told
        if origin is None or origin.is_gone or not self._gossip.hears(telling):
            return
        for other in self._links():
            if other.is_neighbour and other not in (peer, origin):
                other.send_frame(FrameType.GOSSIP, tag=tag, payload=body)
        try:
            kind, number, rest = decode(body)
        except ValueError as error:
            raise FrameError(f"what it passes on is no gossip: {error}") from error
        self._heed(origin, kind, number, rest)

    def on_routed(self, tag: int, payload: bytes) -> None:
        """Take a message that was passed on, or pass it on."""
        source, target = tag >> 32, tag & 0xFFFFFFFF
        if source not in self._peers or target >= self._world_size:
            raise FrameError(f"a message from rank {source} to rank {target} of {self._world_size}")
        if target != self._rank:
            self._route(tag, payload)
        elif not self._peers[source].is_gone:
            self._fabric.on_control_message(self._peers[source], payload)

    def on_joined(self, peer: Peer) -> None:
        """Pass gossip on to the peer from now on, with what was told before."""
        if not peer.is_neighbour:
            peer.is_neighbour = True
            self.on_ready(peer)

    # --- inside ---

    def _heed(self, origin: Peer, kind: GossipKind, number: int, rest: bytes) -> None:
        if kind is GossipKind.LOST:
            origin.on_news(number, escape_text(rest))
        elif kind is GossipKind.LEFT:
            if not origin.is_ready:  # else it says so itself, after all else
                self._fabric.on_farewell(origin)
        elif (message := read_message(number, rest, self._rank)) is not None:
            self._fabric.on_control_message(origin, message)

    def _links(self) -> Iterable[Peer]:
        return () if self._has_left else self._fabric.living()

    def _spread(self, body: bytes) -> None:
        """Tell everybody to whom this rank is connected, who pass it on."""
        telling = self._gossip.tell(body)
        for peer in self._links():
            peer.send_frame(FrameType.GOSSIP, tag=telling.tag, payload=telling.body)

    def _route(self, tag: int, payload: bytes) -> None:
        target = tag & 0xFFFFFFFF
        links = (peer.rank for peer in self._links() if peer.is_neighbour or peer.rank == target)
        hop = next_hop(target, self._rank, self._world_size, links)
        if hop is not None:
            self._peers[hop].send_frame(FrameType.ROUTED, tag=tag, payload=payload)

    def _join(self, peer: Peer) -> None:
        peer.send_frame(FrameType.JOINED)
        self.on_ready(peer)
