"""Sizes that fit the links: how much to grant, and in what pieces to send.

Whatever is under way on a link delays an urgent message by the time that the link needs for it. So where the topology
gives rates, a window lasts about 10 ms on the link that it is for, and a chunk about 5 ms on its route.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from syncline.fabric.grants import GrantScheduler
from syncline.fabric.options import FabricOptions
from syncline.topology.topology import Topology

DEFAULT_WINDOW_BYTES = 4 << 20
WINDOW_S = 0.010
CHUNK_S = 0.005
MIN_CHUNK_BYTES = 32 << 10


def build_scheduler(options: FabricOptions, *, rank: int, world_size: int, topology: Topology | None) -> GrantScheduler:
    """Size the grant window by what drains to this rank, and each sender's share by its route."""
    window_bytes = options.grant_window_bytes or _window(_own_rate(topology, rank), options.chunk_bytes)
    return GrantScheduler(
        window_bytes=window_bytes,
        quantum_bytes=max(options.chunk_bytes, window_bytes // 4),
        sender_bytes={
            peer: min(window_bytes, _window(rate, options.chunk_bytes))
            for peer, rate in _route_rates(topology, world_size, target=rank).items()
        },
    )


def fit_options(
    options: FabricOptions, *, rank: int, world_size: int, topology: Topology | None
) -> Mapping[int, FabricOptions]:
    """Return the options for each peer: what is sent to it goes in chunks that its route carries soon."""
    fitted = {}
    for peer, rate in _route_rates(topology, world_size, source=rank).items():
        most_bytes = DEFAULT_WINDOW_BYTES if math.isinf(rate) else max(MIN_CHUNK_BYTES, int(rate * CHUNK_S))
        fitted[peer] = replace(
            options,
            chunk_bytes=max(options.eager_bytes, min(options.chunk_bytes, most_bytes)),
            unsent_bytes=max(options.eager_bytes, min(options.unsent_bytes, most_bytes)),
        )
    return fitted


def _own_rate(topology: Topology | None, rank: int) -> float:
    """Return what arrives at ``rank`` when all ranks of its host receive."""
    if topology is None:
        return math.inf
    host = topology.host_of(rank)
    own, shared = (node.link.down_bytes_per_s if node.link else math.inf for node in (topology.path(rank)[0], host))
    return min(own, shared / len(host.ranks))


def _route_rates(
    topology: Topology | None, world_size: int, *, source: int | None = None, target: int | None = None
) -> dict[int, float]:
    """Return the rate of the slowest link from ``source`` to each rank, or from each rank to ``target``."""
    rates = dict.fromkeys(range(world_size), math.inf)
    if topology is None:
        return rates
    for peer in rates:
        route = topology.route(source if source is not None else peer, target if target is not None else peer)
        for directed in route:
            link = topology.node(directed.child).link
            if link is not None:
                rates[peer] = min(rates[peer], link.bytes_per_s(directed.direction))
    return rates


def _window(bytes_per_s: float, chunk_bytes: int) -> int:
    if math.isinf(bytes_per_s):
        return max(2 * chunk_bytes, DEFAULT_WINDOW_BYTES)
    return max(2 * chunk_bytes, int(bytes_per_s * WINDOW_S))
