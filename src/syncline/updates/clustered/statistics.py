"""What a rank knows of the clusters, and what it counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusteredStatistics:
    """A frozen record of one rank's part in a clustered update; bytes are those that this rank sent."""

    clusters: tuple[tuple[int, ...], ...]
    """The ranks of each cluster."""
    servers: tuple[int | None, ...]
    """The temporary server of each cluster in this term; None if the cluster is dead."""
    term: int
    period: int
    contributions: tuple[tuple[float, ...], ...] | None
    """Row c, column k: what cluster k contributed to c; None with ``contribution="uniform"``, which needs no table."""
    samples_of_clusters: tuple[float, ...] | None
    """Samples of each cluster in the newest exchange, its weight in the mean: 0 for one that had no part."""
    sent_bytes_inside: int
    sent_bytes_between: int
    num_replaced_servers: int
    """Temporary servers of this rank's cluster that died in their term."""
    num_refused_messages: int
    dead: tuple[int, ...]
    state: str
    """What this rank does as a member."""
    features: Mapping[str, float | str] = field(default_factory=dict, hash=False)
    """What this rank's machine measured, as the mean over its past periods."""
