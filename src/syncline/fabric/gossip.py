"""How many ranks hear of each other without a connection between any two: neighbours, gossip, and messages passed on.

Each rank is connected from the start to its *neighbours*: those 1, 2, 4, 8, ... ranks before and after it, in a circle.
What it tells all, or some to whom it is not connected, it tells everybody to whom it is; who hears that for the first
time passes it on to its neighbours. So each telling crosses each link between neighbours once or twice, takes a few
hops, and arrives as long as some way is left. Each has its number, and passes each link in the order of its origin, so
everybody hears what one rank tells once, and in its order. Who is connected later hears first what was told lately.

A rank whose neighbour is lost, or has left, takes the next one in the circle in its place: in the end the links lead to
all who live, and who cannot be reached is found out.

Pure: who is connected, and what arrives, is for :mod:`syncline.fabric.tcp`.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Collection, Iterable
from enum import IntEnum
from typing import NamedTuple

MOST_KEPT, MOST_OWN_KEPT = 1024, 64
"""Tellings of all ranks, and of this one, that who is connected later still hears."""
_HEAD = struct.Struct("<BI")


class GossipKind(IntEnum):
    """What a telling is about; the number that follows is of another kind for each."""

    MESSAGE = 0
    """A message of the layer above; the number of bytes of the set of ranks that it is for (none: all), the set."""
    LOST = 1
    """The rank that the teller has found lost, and why."""
    LEFT = 2
    """The teller, which leaves."""
    LINKED = 3
    """A rank that is the teller's neighbour from now on."""
    UNREACHED = 4
    """Ranks to which no way leads any more, as far as the teller knows; the number of bytes of their set, the set."""


class Telling(NamedTuple):
    """What one rank tells, as it travels: ``tag`` has who it is in its upper half, and its number in the lower."""

    tag: int
    body: bytes

    @property
    def origin(self) -> int:
        """Who tells it."""
        return self.tag >> 32


def distances(world_size: int) -> list[int]:
    """Return how far the neighbours of each rank are from it, in the circle of all.

    >>> distances(20)
    [1, 19, 2, 18, 4, 16, 8, 12]
    """
    steps = (1 << power for power in range((world_size - 1).bit_length()))
    return list(dict.fromkeys(way for step in steps if 2 * step <= world_size for way in (step, world_size - step)))


def neighbours(rank: int, world_size: int) -> frozenset[int]:
    """Return the ranks to which ``rank`` is connected from the start, if not to all.

    >>> sorted(neighbours(0, 20))
    [1, 2, 4, 8, 12, 16, 18, 19]
    """
    return frozenset((rank + distance) % world_size for distance in distances(world_size))


def successors(rank: int, world_size: int, is_gone: Callable[[int], bool]) -> frozenset[int]:
    """Return the neighbours of ``rank``, in place of each that is gone the next behind it that is not.

    >>> sorted(successors(0, 20, {1, 18, 17}.__contains__))
    [2, 4, 8, 12, 16, 19]
    """
    found = set()
    for distance in distances(world_size):
        way = range(distance, world_size) if 2 * distance <= world_size else range(distance, 0, -1)
        peers = ((rank + step) % world_size for step in way)
        found.update(next(([peer] for peer in peers if not is_gone(peer)), []))
    return frozenset(found)


def next_hop(target: int, rank: int, world_size: int, links: Iterable[int]) -> int | None:
    """Return through which of ``links`` a message for ``target`` goes on: one that is nearer to it; None if none is.

    >>> next_hop(9, 0, 20, [1, 4, 8, 19]), next_hop(9, 8, 20, [4, 7, 0])
    (8, None)
    """

    def distance(peer: int) -> int:
        return min((target - peer) % world_size, (peer - target) % world_size)

    nearest = min(links, key=distance, default=rank)
    return nearest if distance(nearest) < distance(rank) else None


class Gossip:
    """What one rank has told and heard.

    >>> first, second = Gossip(0), Gossip(1)
    >>> telling = first.tell(encode_leaving(0))
    >>> second.hears(telling), second.hears(telling)
    (True, False)
    >>> [kept.origin for kept in second.kept]
    [0]
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._last = {rank: 0}
        self.kept: deque[Telling] = deque(maxlen=MOST_KEPT)
        """What was told lately, for a new neighbour."""
        self.own: deque[Telling] = deque(maxlen=MOST_OWN_KEPT)
        """What this rank has told lately, for a new peer that is no neighbour."""

    def __repr__(self) -> str:
        return f"<Gossip of rank {self._rank}: {self._last[self._rank]} told, {len(self._last) - 1} heard>"

    def tell(self, body: bytes) -> Telling:
        """Return what this rank tells, with its number."""
        self._last[self._rank] += 1
        telling = Telling(self._rank << 32 | self._last[self._rank], body)
        self.own.append(telling)
        self.kept.append(telling)
        return telling

    def hears(self, telling: Telling) -> bool:
        """Whether this was not heard before; what is heard goes on to the neighbours."""
        number = telling.tag & 0xFFFFFFFF
        if number <= self._last.get(telling.origin, 0):
            return False
        self._last[telling.origin] = number
        self.kept.append(telling)
        return True


def encode_message(targets: Collection[int], world_size: int, payload: bytes) -> bytes:
    """Return a telling of a message for some ranks, or for all others."""
    if len(targets) == world_size - 1:
        return _HEAD.pack(GossipKind.MESSAGE, 0) + payload
    return _with_set(GossipKind.MESSAGE, targets, world_size, payload)


def encode_loss(rank: int, reason: bytes) -> bytes:
    """Return a telling that ``rank`` is lost."""
    return _HEAD.pack(GossipKind.LOST, rank) + reason


def encode_leaving(rank: int) -> bytes:
    """Return a telling that ``rank``, the teller, leaves."""
    return _HEAD.pack(GossipKind.LEFT, rank)


def encode_link(rank: int) -> bytes:
    """Return a telling that ``rank`` is a neighbour of the teller from now on."""
    return _HEAD.pack(GossipKind.LINKED, rank)


def encode_unreached(ranks: Collection[int], world_size: int) -> bytes:
    """Return a telling that the teller gives up ``ranks``, which it does not reach."""
    return _with_set(GossipKind.UNREACHED, ranks, world_size)


def _with_set(kind: GossipKind, ranks: Collection[int], world_size: int, payload: bytes = b"") -> bytes:
    num_bytes = (world_size + 7) // 8
    return _HEAD.pack(kind, num_bytes) + sum(1 << rank for rank in ranks).to_bytes(num_bytes, "little") + payload


def decode(body: bytes) -> tuple[GossipKind, int, bytes]:
    """Return what a telling is about, its number, and what follows; ValueError if it is none."""
    if len(body) < _HEAD.size:
        raise ValueError(f"gossip of {len(body)} bytes")
    kind, number = _HEAD.unpack_from(body)
    return GossipKind(kind), number, body[_HEAD.size :]


def read_message(num_chosen: int, rest: bytes, rank: int) -> bytes | None:
    """Return the message of a telling, None if it is not for ``rank``."""
    chosen, payload = rest[:num_chosen], rest[num_chosen:]
    return payload if not chosen or int.from_bytes(chosen, "little") >> rank & 1 else None
