"""What a rank knows of the others: who is dead, and so who serves. It only grows, and travels with every message."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.updates.clustered.election import draw_server
from syncline.updates.clustered.messages import Participants


class View:
    """The clusters, the dead, and the servers that follow from both."""

    def __init__(self, *, job: str, rank: int, clusters: Sequence[Sequence[int]]) -> None:
        self.rank = rank
        self.clusters = tuple(tuple(sorted(ranks)) for ranks in clusters)
        self.dead: set[int] = set()
        self.job = job
        self._cluster_of = {member: number for number, ranks in enumerate(self.clusters) for member in ranks}

    @property
    def cluster(self) -> int:
        """The cluster of this rank."""
        return self._cluster_of[self.rank]

    @property
    def world_size(self) -> int:
        """Number of ranks that the job began with."""
        return len(self._cluster_of)

    def cluster_of(self, rank: int) -> int:
        """Return a rank's cluster."""
        return self._cluster_of[rank]

    def is_member(self, rank: int) -> bool:
        """Whether ``rank`` is one of the job's."""
        return rank in self._cluster_of

    def live(self) -> tuple[int, ...]:
        """Return all ranks that are not known to be dead."""
        return tuple(rank for rank in sorted(self._cluster_of) if rank not in self.dead)

    def live_members(self) -> tuple[int, ...]:
        """Return those of this rank's cluster."""
        return tuple(rank for rank in self.clusters[self.cluster] if rank not in self.dead)

    def server(self, cluster: int, term: int) -> int | None:
        """Return the temporary server of a cluster in a term; None if all its ranks are dead."""
        return draw_server(self.job, term, self.clusters[cluster], self.dead)

    def participants(self, term: int) -> Participants:
        """Return the servers of all live clusters in a term."""
        drawn = ((cluster, self.server(cluster, term)) for cluster in range(len(self.clusters)))
        return tuple((cluster, server) for cluster, server in drawn if server is not None)
