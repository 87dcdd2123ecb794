"""One rank's part in the overlay by which many ranks hear of each other: what it spreads, passes on and heeds.

Who its neighbours are, and what gossip is, stands in :mod:`syncline.fabric.gossip`; what a loss means, in
:mod:`syncline.fabric.tcp`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Set
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
    encode_link,
    encode_loss,
    encode_message,
    encode_unreached,
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

    def believe(self, accuser: int, lost: int, reason: str) -> None:
        """Take a rank for lost as another says so."""

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
        self._dead: set[int] = set()
        self._more_links: dict[int, set[int]] = {}
        """Between ranks that are neighbours since others are gone."""
        self._broken: dict[int, set[int]] = {}
        """Who has been found lost, and by whom."""
        self._unreachable_s: dict[int, float] = {}
        """Since when no way leads to a rank."""
        self._is_changed = self._is_torn = self._is_cut_off = self._has_left = False
        self._torn_s: float | None = None
        self.neighbours = neighbours(rank, self._world_size)
        """To whom this rank is connected from the start."""
        for peer in peers.values():
            peer.overlay = self
            peer.is_neighbour = peer.rank in self.neighbours

    def __repr__(self) -> str:
        return f"<Overlay of rank {self._rank} of {self._world_size}: {self._gossip}>"

    def spread_message(self, targets: Collection[int], payload: bytes) -> None:
        """Tell some ranks a control message."""
        self._spread(encode_message(targets, self._world_size, payload))

    def spread_loss(self, rank: int, reason: str) -> None:
        """Tell all that ``rank``, or this one, is lost."""
        self._note_loss(self._rank, rank)
        self._spread(encode_loss(rank, cut_reason(reason)))

    def spread_leaving(self) -> None:
        """Tell all that this rank leaves, and nothing more: peers that read its END may close at once."""
        self._spread(encode_leaving(self._rank))
        self._has_left = True

    def pass_on(self, target: int, payload: bytes) -> None:
        """Send a control message through others, which get it lost if one of them is."""
        self._route(self._rank << 32 | target, payload)

    def on_ready(self, peer: Peer) -> None:
        """Let a new peer, or neighbour, hear what was told before; of others only if it passes that on."""
        for telling in self._gossip.kept if peer.is_neighbour else self._gossip.own:
            peer.send_frame(FrameType.GOSSIP, tag=telling.tag, payload=telling.body)

    def on_gone(self, peer: Peer, *, has_left: bool) -> None:
        """Note that a peer is gone; without any neighbour, nobody else is in reach."""
        self._is_torn |= peer.is_neighbour
        if has_left:
            return
        self._is_changed = True
        self._dead.add(peer.rank)
        self._num_lost += peer.is_neighbour
        if not self._is_cut_off and not any(other.is_neighbour for other in self._fabric.living()):
            self._is_cut_off = True
            self._lose(list(filter(self._is_unseen, self._peers)))

    def look(self, now_s: float) -> None:
        """Find out who is out of reach, and take others as neighbours in place of those that are gone."""
        if self._is_changed:
            self._is_changed = False
            self._unreachable_s = {rank: self._unreachable_s.get(rank, now_s) for rank in self._unreachable()}
        late = [rank for rank, since_s in self._unreachable_s.items() if now_s - since_s >= self._patience_s]
        self._lose([rank for rank in late if self._is_unseen(rank)])
        self._mend(now_s)

    def _mend(self, now_s: float) -> None:
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
                if peer.is_ready:
                    self.on_ready(peer)
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

    # --- inside ---

    def _heed(self, origin: Peer, kind: GossipKind, number: int, rest: bytes) -> None:
        if kind is GossipKind.LOST:
            reason = escape_text(rest)
            self._note_loss(origin.rank, number)
            origin.on_news(number, reason)
            self._look_at(number, reason)
        elif kind is GossipKind.UNREACHED:
            if read_message(number, rest, self._rank) is not None:  # it does hear of it, by another way
                origin.on_news(self._rank, "is out of reach")
        elif kind is GossipKind.LINKED:
            self._note_link(origin.rank, number)
            if number == self._rank and not origin.is_neighbour:
                origin.is_neighbour = True
                self.on_ready(origin)
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
        self._note_link(self._rank, peer.rank)
        self._spread(encode_link(peer.rank))

    def _note_loss(self, accuser: int, lost: int) -> None:
        self._broken.setdefault(lost, set()).add(accuser)
        self._is_changed = True

    def _note_link(self, one: int, other: int) -> None:
        for rank, end in ((one, other), (other, one)):
            self._more_links.setdefault(rank, set()).add(end)
        self._is_changed = True

    def _links_of(self, rank: int) -> Set[int]:
        return neighbours(rank, self._world_size) | self._more_links.get(rank, set())

    def _look_at(self, rank: int, reason: str) -> None:
        """Believe that a rank is lost if all who watch it say so: those above it alone would not be believed."""
        peer = self._peers.get(rank)
        if peer is None or peer.is_ready or peer.is_gone:
            return
        watchers = {watcher for watcher in self._links_of(rank) if not self._fabric.is_lost(watcher)}
        if watchers and watchers <= self._broken[rank]:
            self._fabric.believe(min(watchers), rank, reason)

    def _unreachable(self) -> set[int]:
        """Return to whom no way leads over links that nobody has found broken; who has left may have passed it on."""
        reached, new = {self._rank}, [self._rank]
        while new:
            rank = new.pop()
            for other in self._links_of(rank) - reached - self._dead:
                if other not in self._broken.get(rank, ()) and rank not in self._broken.get(other, ()):
                    reached.add(other)
                    new.append(other)
        return set(filter(self._is_unseen, self._peers.keys() - reached))

    def _is_unseen(self, rank: int) -> bool:
        return not (self._peers[rank].is_ready or self._peers[rank].is_gone)

    def _lose(self, ranks: Collection[int]) -> None:
        if ranks:
            self._spread(encode_unreached(ranks, self._world_size))
        for rank in ranks:
            peer = self._peers[rank]
            text = f"{peer.name} is out of reach: whoever could tell of it is lost, or has lost it"
            self._fabric.lose(peer, PeerLostError(text, rank=rank, host=peer.host))
