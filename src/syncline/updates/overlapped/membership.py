"""Who is left of a fleet, whether they may go on, and who serves which bucket then: decisions without I/O.

Ranks do not vote on who is lost. Each finds losses by itself and tells the others, and one rule settles what two ranks
say that have lost each other, though both live: *the one of the higher number is lost*. So a rank believes another that
tells of a loss if its number is lower than that of the lost one, and else waits for what it sees itself; and all come
to the same fleet, whichever report comes first.

With the default quorum a fleet goes on as long as it cannot go on elsewhere too: with more than half of the workers
that have not left by themselves, or with exactly half of them and the lowest among these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from syncline.errors import UpdateError
from syncline.updates.overlapped.losses import QuorumLostError, minority, quorum_lost
from syncline.updates.overlapped.placement import successor
from syncline.updates.overlapped.terms import Terms


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A bucket goes to another server, or to the same one anew; ``epoch`` is the number of those that it had."""

    position: int
    server: int
    epoch: int


def is_believed(reporter: int, lost: int) -> bool:
    """Whether a rank that has lost neither believes ``reporter`` that ``lost`` is lost."""
    return reporter < lost


class Membership:
    """What one rank knows of the fleet; all ranks come to know the same."""

    def __init__(self, terms: Terms, first_servers: Sequence[int]) -> None:
        self.lost: dict[int, str] = {}
        self.left: set[int] = set()
        self.on_tree = terms.ends_on_tree
        """Whether periods end with a collective of all ranks, which has no part for one that is lost."""
        self._terms = terms
        self._first_servers = tuple(first_servers)
        self.servers = list(first_servers)
        """Of each bucket, now."""

    def lose(self, rank: int, reason: str, *, has_left: bool) -> None:
        """Take note that ``rank`` is lost, or has left by itself."""
        self.lost[rank] = reason
        if has_left:
            self.left.add(rank)

    def shortage(self, describe: Callable[[int], str]) -> QuorumLostError | None:
        """Return why those who are left cannot go on, if they cannot."""
        terms = self._terms
        missing = [rank for rank in terms.workers if rank in self.lost]
        if not terms.shrinks:
            is_short = len(terms.workers) - len(missing) < terms.quorum
            return quorum_lost(missing, terms, describe) if is_short else None
        base = [rank for rank in terms.workers if rank not in self.left]
        living = [rank for rank in base if rank not in self.lost]
        has_lowest = base[:1] == living[:1]
        if 2 * len(living) + has_lowest > len(base) or not base:
            return None
        return minority(living, base, describe)

    def moves(self) -> list[Move]:
        """Return which buckets go to another server; all of them, once periods do not end on the tree any more.

        Raises :class:`UpdateError` if no server is left.
        """
        has_left_tree = self.on_tree and self._terms.shrinks
        if has_left_tree:
            self.on_tree = False
        moves = []
        for position, (first, now) in enumerate(zip(self._first_servers, self.servers, strict=True)):
            if now in self.lost or has_left_tree:
                moves.append(self._move(position, first))
        return moves

    def _move(self, position: int, first: int) -> Move:
        servers = self._terms.servers
        server = successor(first, servers, self.lost)
        if server is None:
            raise UpdateError(f"All servers are lost: {sorted(self.lost)}; start again from a checkpoint")
        self.servers[position] = server
        distance = (servers.index(server) - servers.index(first)) % len(servers)
        # A fleet that has left the tree begins again on all servers, also on those that live.
        begun_again = self._terms.ends_on_tree
        return Move(position=position, server=server, epoch=distance + begun_again)
