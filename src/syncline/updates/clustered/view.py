"""What a rank knows of the others: who is dead, and so who serves. It only grows, and travels with every message."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from syncline.members import Membership, successor
from syncline.updates.clustered.messages import Clusters, Participants

# The election of temporary servers: random, and yet agreed by every rank without a message.
#
# Every rank orders a cluster's ranks by a hash of (job, term, rank): a random order that is the same everywhere, on any
# machine and in any version of Python. The server is the first of that order that is not known to be dead. The dead
# only ever grow in number and every message carries them, so ranks that know different dead soon draw the same server;
# that is highest-random-weight hashing (Thaler and Ravishankar, 1998).


@lru_cache(maxsize=1024)
def draw_order(job: str, term: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``ranks`` in the order in which they are to serve in ``term``.

    Each message that a rank hears asks for it, of a cluster that may have hundreds of ranks.
    """
    return tuple(sorted(ranks, key=lambda rank: (_ticket(job, term, rank), rank)))


def draw_server(job: str, term: int, ranks: Sequence[int], dead: Collection[int]) -> int | None:
    """Return the temporary server of a cluster in ``term``; None if all its ranks are dead."""
    return successor(draw_order(job, term, tuple(ranks)), dead)


def _ticket(job: str, term: int, rank: int) -> bytes:
    return blake2b(f"{term}/{rank}/{job}".encode(), digest_size=16).digest()


class View:
    """The clusters of each term, the dead, and the servers that follow from both.

    Where clusters can be made anew, those of a term are known once the term before is over.
    """

    def __init__(self, *, job: str, rank: int, clusters: Sequence[Sequence[int]], reclusters: bool = False) -> None:
        self.rank = rank
        self.membership = Membership(tuple(sorted(rank for ranks in clusters for rank in ranks)))
        self.job = job
        self.last_known_term: float = 0 if reclusters else math.inf
        self._divisions = [Division.of(0, clusters)]

    @property
    def dead(self) -> AbstractSet[int]:
        """The ranks that are taken for dead."""
        return self.membership.lost

    def divide(self, term: int, clusters: Sequence[Sequence[int]]) -> None:
        """Note the clusters of ``term``, the first that is not known; none: as before."""
        assert term == self.last_known_term + 1
        self.last_known_term = term
        if clusters:
            assert set(self.membership.members) == {rank for ranks in clusters for rank in ranks}
            self._divisions = [*self._divisions[-1:], Division.of(term, clusters)]

    def clusters(self, term: int) -> Clusters:
        """Return the ranks of each cluster in a term; of old ones, the last that matters."""
        return self._division(term).clusters

    def own_cluster(self, term: int) -> int:
        """Return the cluster of this rank in a term."""
        return self.cluster_of(self.rank, term)

    def cluster_of(self, rank: int, term: int) -> int:
        """Return a rank's cluster in a term."""
        return self._division(term).cluster_of[rank]

    def is_member(self, rank: int) -> bool:
        """Whether ``rank`` is one of the job's."""
        return rank in self._divisions[0].cluster_of

    def live_members(self, term: int) -> tuple[int, ...]:
        """Return those of this rank's cluster in a term."""
        dead = self.dead
        return tuple(rank for rank in self.clusters(term)[self.own_cluster(term)] if rank not in dead)

    def server(self, cluster: int, term: int) -> int | None:
        """Return the temporary server of a cluster in a term; None if all its ranks are dead."""
        return draw_server(self.job, term, self.clusters(term)[cluster], self.dead)

    def own_server(self, term: int) -> int:
        """Return the temporary server of this rank's cluster in a term."""
        server = self.server(self.own_cluster(term), term)
        assert server is not None, "this rank itself is alive"
        return server

    def participants(self, term: int) -> Participants:
        """Return the servers of all live clusters in a term."""
        drawn = ((cluster, self.server(cluster, term)) for cluster in range(len(self.clusters(term))))
        return tuple((cluster, server) for cluster, server in drawn if server is not None)

    def _division(self, term: int) -> Division:
        """Return the newest that is not newer; terms before the one before that do not matter any more."""
        return next((division for division in reversed(self._divisions) if division.term <= term), self._divisions[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The clusters from a term on."""

    term: int
    clusters: Clusters
    cluster_of: Mapping[int, int]

    @classmethod
    def of(cls, term: int, clusters: Sequence[Sequence[int]]) -> Division:
        """Return the division into these clusters."""
        of_rank = {rank: number for number, ranks in enumerate(clusters) for rank in ranks}
        return cls(term=term, clusters=tuple(tuple(sorted(ranks)) for ranks in clusters), cluster_of=of_rank)
