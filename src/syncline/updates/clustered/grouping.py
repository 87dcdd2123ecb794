"""Who is in which cluster: from what the topology says and what every machine measured, decided by rank 0 for all.

Rank 0 decides, since k-means may end otherwise on a machine that rounds otherwise. What the network is like the
topology says: that of a file, or the one that the job measured when it started. Later each rank notes what its machine
does in a period (:class:`Pace`), and one server may propose other clusters (:func:`regroup`).
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from syncline.arguments import Count, Whole
from syncline.errors import ConfigurationError
from syncline.machines.clustering import Inventory, keep_numbers, reconsider
from syncline.machines.features import BATCH, NUM_PERIODS, Feature, Features
from syncline.machines.measurement import read_moment
from syncline.machines.nvml import Gpu, find_gpu
from syncline.topology import Host
from syncline.updates.clustered.messages import Clusters, Measurement
from syncline.updates.control import ControlStream

_log = logging.getLogger(__name__)

ClusterChoice = Annotated[
    Literal["auto"] | Count | Sequence[Sequence[Whole]], '"auto", how many, or the ranks of each cluster'
]


def measure_hosts(
    control: ControlStream, wanted: Inventory, *, read: Callable[[], Mapping[str, Feature]] | None
) -> Inventory:
    """Return ``wanted`` with what all hosts measure, the same on every rank; every rank calls it.

    ``read`` returns the features of the machine that it is called on; without it nothing is measured.
    """
    topology = wanted.topology
    if read is None:
        return wanted
    is_first_of_host = topology.host_of(control.rank).ranks[0].rank == control.rank
    gathered = control.all_gather(dict(read()) if is_first_of_host else {}, "features of the machines")
    measured = {host.name: gathered[host.ranks[0].rank] for host in topology.hosts}
    return replace(wanted, measured=measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a training with clusters begins with, alike on all ranks but for the last."""

    inventory: Inventory
    clusters: Clusters
    keeps_state: bool = True
    """Whether the members of this rank's cluster have the same optimizer state: else it begins anew."""

    @classmethod
    def agree(
        cls,
        control: ControlStream,
        wanted: Inventory,
        clusters: ClusterChoice,
        *,
        read: Callable[[], Mapping[str, Feature]] | None,
    ) -> Start:
        """Return ``wanted`` with what hosts measure, and the clusters that follow; every rank calls it."""
        inventory = measure_hosts(control, wanted, read=read)
        return cls(inventory=inventory, clusters=agree_on_clusters(control, inventory, clusters))

    def after(self, kinds_of_state: Sequence[int], rank: int) -> Start:
        """Return it for a rank of a job that has grown; members before it, the first ranks, had states of these kinds.

        Ranks of one cluster have equal states; where those that are in one now had different ones, all begin anew.
        """
        own = next(ranks for ranks in self.clusters if rank in ranks)
        return replace(self, keeps_state=len({kind for place, kind in enumerate(kinds_of_state) if place in own}) <= 1)


def agree_on_clusters(control: ControlStream, inventory: Inventory, clusters: ClusterChoice) -> Clusters:
    """Return the ranks of each cluster, the same on every rank; every rank calls it, and raises what rank 0 does."""
    if not isinstance(clusters, str | int):
        return check_clusters(clusters, inventory.topology.num_ranks)
    decided: tuple[Clusters, str | None] = ((), None)
    if control.rank == 0:
        try:
            decided = group(inventory, clusters=clusters), None
        except ConfigurationError as error:
            decided = (), str(error)
    found, error_text = control.all_gather(decided, "clusters")[0]
    if error_text is not None:
        raise ConfigurationError(error_text)
    return tuple(tuple(ranks) for ranks in found)


def group(inventory: Inventory, *, clusters: Literal["auto"] | int = "auto") -> Clusters:
    """Return the ranks of each cluster of like hosts."""
    table, clustering = inventory.divide(num_clusters=None if isinstance(clusters, str) else clusters)
    shown = "; ".join(", ".join(table.hosts[host] for host in hosts) for hosts in clustering.clusters)
    by = ", ".join(table.features) or "nothing that is known"
    _log.info("clusters of hosts: %s (%s; by %s)", shown, clustering.reason, by)
    if len(clustering.clusters) == 1 < len(table.hosts) and clusters == "auto":
        _log.warning(
            "Clustered(): all %d hosts are one cluster (%s; by %s), so every batch's gradients cross all links; say "
            "clusters= or features=, or take Sharded()",
            *(len(table.hosts), clustering.reason, by),
        )
    return ranks_of(inventory.topology.hosts, clustering.clusters)


def ranks_of(hosts: Sequence[Host], clusters: Sequence[Sequence[int]]) -> Clusters:
    """Return the ranks of clusters that are given by their hosts' places in ``hosts``."""
    return tuple(tuple(sorted(rank.rank for place in places for rank in hosts[place].ranks)) for places in clusters)


def check_clusters(clusters: Sequence[Sequence[int]], world_size: int) -> Clusters:
    """Return clusters that the user wrote down; raise unless each rank is in exactly one."""
    given = sorted(rank for ranks in clusters for rank in ranks)
    if given != list(range(world_size)) or not all(clusters):
        shown = [list(ranks) for ranks in clusters]
        raise ConfigurationError(f"clusters must name each of the ranks 0 to {world_size - 1} once, not {shown}")
    return tuple(sorted((tuple(sorted(ranks)) for ranks in clusters), key=lambda ranks: ranks or (math.inf,)))


# What a rank notes of its machine in each period: clocks and free memory, and its own seconds for a batch.


class Pace:
    """The history of one rank's machine.

    A batch's own time is from one mean to the next that this rank asks for, without what it waited for others between;
    it is not taken in the first period, when much is done for the first time.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, gpu: int | None = None, reads: bool = True
    ) -> None:
        """Without ``reads`` the machine is not looked at, and nothing is recorded."""
        self._clock = clock
        self.history: deque[Features] = deque(maxlen=NUM_PERIODS)
        """What was measured in each of the newest periods."""
        self._reads = reads
        self._gpu = Gpu(find_gpu(gpu) if reads else None)
        self._began_s: float | None = None
        self._waited_s = 0.0
        self._is_warm = False
        self._batches_s: list[float] = []

    def began(self) -> None:
        """Note that nothing is waited for any more."""
        self._began_s, self._waited_s = self._clock(), 0.0

    def waited(self, seconds: float) -> None:
        """Note that others were waited for."""
        self._waited_s += seconds

    def computed(self, *, is_batch: bool) -> None:
        """Note that a batch was computed; or only that one is over, in which this rank had nothing to do."""
        if is_batch and self._began_s is not None:
            self._batches_s.append(self._clock() - self._began_s - self._waited_s)
        self._began_s = None

    def end_period(self) -> None:
        """Record what the period was like."""
        has_pace = bool(self._batches_s) and self._is_warm
        own = {BATCH: sum(self._batches_s) / len(self._batches_s)} if has_pace else {}
        if self._reads:
            self.history.append(read_moment(self._gpu) | own)
        self._batches_s.clear()
        self._is_warm = True

    def close(self) -> None:
        """Release the GPU's library; what was noted is kept."""
        self._gpu.close()


# Clusters made anew: who tells what of its machine, and what the one who proposes makes of it.
#
# The protocol hands measurements to the servers and makes one server's proposal part of what is agreed at a term's end
# (:mod:`.server`); so ranks need not hear the same measurements, nor round alike, to go on with the same clusters.


def regroup(
    inventory: Inventory,
    clusters: Clusters,
    measurements: Mapping[int, Measurement],
    *,
    living: Collection[int],
    num_clusters: int | None,
) -> Clusters:
    """Return the clusters that the ranks' measurements make, if they are clearly better than ``clusters``; or none.

    Hosts of which no rank is among the ``living`` are not compared; their ranks stay in the cluster of that number.
    """
    told = {rank: dict(measurement) for rank, measurement in measurements.items() if rank in living}
    if not told:
        return ()
    by_host = {
        host.name: [told[rank.rank] for rank in host.ranks if rank.rank in told] for host in inventory.topology.hosts
    }
    newer = {name: of_ranks[0] for name, of_ranks in by_host.items() if of_ranks}
    cluster_of = {rank: number for number, ranks in enumerate(clusters) for rank in ranks}
    hosts = [host for host in inventory.topology.hosts if any(rank.rank in living for rank in host.ranks)]
    labels = [cluster_of[host.ranks[0].rank] for host in hosts]
    try:
        table = inventory.table(newer, hosts=[host.name for host in hosts])
        found = reconsider(table.vectors, labels, num_clusters=num_clusters)
    except ConfigurationError as error:  # what divided the machines at the start may not divide them now
        _log.warning("clusters stay as they are: %s", error)
        return ()
    if found is None:
        return ()
    proposed = _with_the_dead(keep_numbers(ranks_of(hosts, found.clusters), clusters), cluster_of)
    _log.info("new clusters: ranks %s in place of %s (%s)", proposed, clusters, found.reason)
    return proposed


def _with_the_dead(clusters: Clusters, cluster_of: Mapping[int, int]) -> Clusters:
    """Return ``clusters`` with the ranks that are in none: the protocol knows each rank's cluster, dead or not."""
    placed = {rank for ranks in clusters for rank in ranks}
    ranks_of_cluster = [list(ranks) for ranks in clusters]
    for rank, number in cluster_of.items():
        if rank not in placed:
            ranks_of_cluster[number if number < len(clusters) else 0].append(rank)
    return tuple(tuple(sorted(ranks)) for ranks in ranks_of_cluster)
