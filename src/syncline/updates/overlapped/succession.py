"""Which server has which bucket, also when servers die: decisions without I/O, the same on every rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from syncline.errors import UpdateError
from syncline.members import successor
from syncline.updates.overlapped.terms import Terms


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A bucket goes to another server, or to the same one anew; ``epoch`` is the number of those that it had."""

    position: int
    server: int
    epoch: int


class Succession:
    """The servers of all buckets: the first, and after them the next rank in a circle that lives."""

    def __init__(self, terms: Terms, first_servers: Sequence[int]) -> None:
        self.on_tree = terms.ends_on_tree
        """Whether periods end with a collective of all ranks, which has no part for one that is lost."""
        self.servers = list(first_servers)
        """Of each bucket, now."""
        self._terms = terms
        self._first_servers = tuple(first_servers)

    def moves(self, lost: Collection[int]) -> list[Move]:
        """Return which buckets go to another server; all of them, once periods do not end on the tree any more.

        Raises :class:`UpdateError` if no server is left.
        """
        has_left_tree = self.on_tree and self._terms.shrinks
        if has_left_tree:
            self.on_tree = False
        return [
            self._move(position, first, lost)
            for position, (first, now) in enumerate(zip(self._first_servers, self.servers, strict=True))
            if now in lost or has_left_tree
        ]

    def _move(self, position: int, first: int, lost: Collection[int]) -> Move:
        servers = self._terms.servers
        place = servers.index(first)
        server = successor((*servers[place:], *servers[:place]), lost)
        if server is None:
            raise UpdateError(f"All servers are lost: {sorted(lost)}; start again from a checkpoint")
        self.servers[position] = server
        distance = (servers.index(server) - place) % len(servers)
        # A fleet that has left the tree begins again on all servers, also on those that live.
        return Move(position=position, server=server, epoch=distance + self._terms.ends_on_tree)
