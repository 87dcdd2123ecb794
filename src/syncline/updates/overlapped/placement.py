"""Which rank holds the server shard of which bucket, at first.

Cost model: a server takes in one bucket from each worker and gives one back to each, so its time is its bytes over what
its link carries. A rank's link carries the least, over the links on its path, of the link's slower direction divided by
the ranks below it. Buckets are placed by decreasing size where they would be done first: O(buckets x servers x depth).
Of equals, the one in the part of the tree that serves least so far: a link between two parts is crossed by as many
bytes wherever the servers are, but with servers on both sides pushes cross it in both directions at once, then replies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from syncline.errors import ConfigurationError
from syncline.topology import Host, Node, Rank, Topology

DEDICATED = "dedicated:"


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
            rate = min(rate, slower / _num_ranks_below(node))
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


def _num_ranks_below(node: Node) -> int:
    if isinstance(node, Rank):
        return 1
    if isinstance(node, Host):
        return len(node.ranks)
    return sum(_num_ranks_below(child) for child in node.children)
