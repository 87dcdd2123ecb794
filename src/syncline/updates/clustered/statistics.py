"""What a rank knows of the clusters, and what it counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusteredStatistics:
    """A frozen record of one rank's part in a clustered update; bytes are those that this rank sent."""

    clusters: tuple[tuple[int, ...], ...]
    """The ranks of each cluster."""
    servers: tuple[int | None, ...]
    """The temporary server of each cluster in this term; None if the cluster is dead."""
    term: int
    period: int
    samples_of_clusters: tuple[float, ...] | None
    """Samples of each cluster in the newest outer round, its weight in the mean: 0 for one that had no part."""
    sent_bytes_inside: int
    sent_bytes_between: int
    num_replaced_servers: int
    """Temporary servers of this rank's cluster that died in their term."""
    num_refused_messages: int
    dead: tuple[int, ...]
    state: str
    """What this rank does as a member."""
    contributions: tuple[tuple[float, ...], ...] | None = None
    """Row c, column k: what cluster k contributed to c; None unless ``literal``, which needs a table."""
    features: Mapping[str, float | str] = field(default_factory=dict, hash=False)
    """What this rank's machine measured, as the mean over its past periods."""
    history: tuple[Mapping[str, float | str], ...] = field(default=(), hash=False)
    """What it measured in each of them, oldest first; the newest 16 are kept."""

    @property
    def weights(self) -> tuple[float, ...] | None:
        """The share of each cluster in the newest outer round, by samples; None before the first."""
        samples = self.samples_of_clusters
        if samples is None or sum(samples) <= 0:
            return None
        return tuple(amount / sum(samples) for amount in samples)

    def __str__(self) -> str:
        """One line for people."""
        servers = ", ".join("none" if server is None else str(server) for server in self.servers)
        dead = f"  dead {', '.join(map(str, self.dead))}" if self.dead else ""
        return (
            f"term {self.term}  servers {servers} of {len(self.clusters)} clusters  "
            f"sent {self.sent_bytes_inside / _MIB:.1f} MiB inside, {self.sent_bytes_between / _MIB:.1f} between{dead}"
        )
