"""Which rank holds the server shard of which bucket, and who relays to it. The same on every rank, without I/O.

Cost model: a server takes in one bucket from each worker and gives one back to each, so its time is its bytes over what
its link carries. A rank's link carries the least, over the links on its path, of the link's slower direction divided by
the ranks below it. Buckets are placed by decreasing size where they would be done first: O(buckets x servers x depth).
Of equals, the one in the part of the tree that serves least so far: a link between two parts is crossed by as many
bytes wherever the servers are, but with servers on both sides pushes cross it in both directions at once, then replies.
Relays take load off servers of other sites, and add as much in their own: that is shared out by bytes alone, as within
a site all links are taken to be fast.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from syncline.errors import ConfigurationError, name_ranks
from syncline.members import Quorum, QuorumLostError, successor
from syncline.topology import Topology
from syncline.topology.tree import num_ranks_below

DEDICATED = "dedicated:"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLayout:
    """Who works, who serves, and how many make a global gradient; equal on every rank."""

    world_size: int
    workers: tuple[int, ...]
    servers: tuple[int, ...]
    quorum: int
    period: int
    """Iterations of a period."""
    ends_on_tree: bool = False
    """Whether a period ends with a collective (see :mod:`.server_client`), not through the servers."""
    shrinks: bool = False
    """Whether the quorum is all workers that live; then periods end through the servers once a rank is lost."""

    @property
    def survival(self) -> Quorum:
        """How many workers must live for the others to go on."""
        return Quorum() if self.shrinks else Quorum(part=0.0, least=self.quorum)


def server_ranks(servers: str, world_size: int) -> tuple[int, ...]:
    """Return the ranks that hold shards: all, or the last k for ``"dedicated:k"``."""
    if servers == "shared":
        return tuple(range(world_size))
    count = servers.removeprefix(DEDICATED)
    if not servers.startswith(DEDICATED) or not count.isdecimal() or not 0 < int(count) < world_size:
        raise ConfigurationError(
            f'servers must be "shared" or "dedicated:k" with 0 < k < {world_size}, the number of ranks, not {servers!r}'
        )
    return tuple(range(world_size - int(count), world_size))


def capacity_bytes_per_s(topology: Topology, rank: int) -> float:
    """Return what the links carry for ``rank`` when every rank uses them alike."""
    rate = math.inf
    for node in topology.path(rank):
        if node.link is not None:
            slower = min(node.link.up_bytes_per_s, node.link.down_bytes_per_s)
            rate = min(rate, slower / num_ranks_below(node))
    return rate


def place_shards(topology: Topology, servers: Sequence[int], bucket_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return the server of each bucket; every rank comes to the same answer."""
    rates = {rank: capacity_bytes_per_s(topology, rank) for rank in servers}
    if any(math.isinf(rate) for rate in rates.values()):
        # Where some links do not limit, those ranks carry alike, and the others nothing that could be compared.
        rates = {rank: 1.0 if math.isinf(rate) else 0.5 for rank, rate in rates.items()}
    parts = {rank: [node.name for node in reversed(topology.path(rank))] for rank in servers}
    num_servers = Counter(part for rank in servers for part in parts[rank])
    load: Counter[str] = Counter()

    def cost(rank: int, num_bytes: int) -> tuple[object, ...]:
        done_s = (load[parts[rank][-1]] + num_bytes) / rates[rank]
        return (done_s, [load[part] / num_servers[part] for part in parts[rank]], rank)

    placed = [0] * len(bucket_bytes)
    for bucket in sorted(range(len(bucket_bytes)), key=lambda index: (-bucket_bytes[index], index)):
        best = min(servers, key=lambda rank: cost(rank, bucket_bytes[bucket]))
        load.update(dict.fromkeys(parts[best], bucket_bytes[bucket]))
        placed[bucket] = best
    return tuple(placed)


def place_relays(
    layout: ServerLayout, sites: Sequence[Sequence[int]], servers: Sequence[int], bucket_bytes: Sequence[int]
) -> tuple[Mapping[int, int], ...]:
    """Return of each bucket the relay of each rank that has one: all of a site, but not the one that has its server.

    There is none where a global gradient can do without some worker that lives, or servers do not train: which of a
    site's late ones the others will not wait for, only the server knows. Those of a site host about as many bytes.
    """
    summing = [site for site in sites if len(site) > 1] if layout.ends_on_tree and layout.shrinks else []
    hosted: Counter[int] = Counter()
    for server, num_bytes in zip(servers, bucket_bytes, strict=True):
        hosted[server] += num_bytes
    relays = []
    for server, num_bytes in zip(servers, bucket_bytes, strict=True):
        relay_of: dict[int, int] = {}
        for site in summing:
            if server not in site:
                relay = min(site, key=lambda rank: (hosted[rank], rank))
                hosted[relay] += num_bytes
                relay_of.update(dict.fromkeys(site, relay))
        relays.append(relay_of)
    return tuple(relays)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A bucket goes to another server, or to the same one anew; ``epoch`` is the number of those that it had."""

    position: int
    server: int
    epoch: int


class Succession:
    """The servers of all buckets: the first, and after them the next rank in a circle that lives."""

    def __init__(self, layout: ServerLayout, first_servers: Sequence[int]) -> None:
        self.on_tree = layout.ends_on_tree
        """Whether periods end with a collective of all ranks, which has no part for one that is lost."""
        self.servers = list(first_servers)
        """Of each bucket, now."""
        self._layout = layout
        self._first_servers = tuple(first_servers)

    def moves(self, lost: Collection[int]) -> list[Move]:
        """Return which buckets go to another server; all of them, once periods do not end on the tree any more.

        Raises :class:`QuorumLostError` if no server is left.
        """
        has_left_tree = self.on_tree and self._layout.shrinks
        if has_left_tree:
            self.on_tree = False
        return [
            self._move(position, first, lost)
            for position, (first, now) in enumerate(zip(self._first_servers, self.servers, strict=True))
            if now in lost or has_left_tree
        ]

    def _move(self, position: int, first: int, lost: Collection[int]) -> Move:
        servers = self._layout.servers
        place = servers.index(first)
        server = successor((*servers[place:], *servers[:place]), lost)
        if server is None:
            text = f"All servers are lost to this rank: {name_ranks(servers)}; start again from a checkpoint"
            raise QuorumLostError(text, missing=tuple(servers))
        self.servers[position] = server
        distance = (servers.index(server) - place) % len(servers)
        # A fleet that has left the tree begins again on all servers, also on those that live.
        return Move(position=position, server=server, epoch=distance + self._layout.ends_on_tree)
