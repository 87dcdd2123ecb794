"""Sizes that fit the links: how much to grant, and in what pieces to send.

Whatever is under way on a link delays an urgent message by the time that the link needs for it. So where the topology
gives rates, a window lasts about 10 ms on the link that it is for, and a chunk about 5 ms on its route. Where several
connection classes are open, someone wants order more than the last percent of the rate: then about 5 ms and 2 ms.

A link between switches is drawn over by all ranks on its far side. What they have under way on it together lasts about
SHARED_WINDOW_S: half of that stands in the queue while the other half are grants on their way back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TypedDict

from syncline.fabric.grants import GrantScheduler
from syncline.fabric.link_share import LinkShare
from syncline.fabric.options import FabricOptions
from syncline.topology import DirectedLink, Node, Rank, Switch, Topology
from syncline.topology.tree import walk

DEFAULT_WINDOW_BYTES = 4 << 20
WINDOW_S, CHUNK_S = 0.010, 0.005
CLASSES_WINDOW_S, CLASSES_CHUNK_S = 0.005, 0.002
SHARED_WINDOW_S = 0.015
TARGET_S = 0.020
MIN_CHUNK_BYTES = 32 << 10
CONGESTION_WITH_RATES = "cubic"
"""Where grants keep queues from overflowing, a control that heeds losses alone never holds back. BBR paces, and every
ten seconds it stops a connection for 0.2 s to look at the empty route."""


def build_scheduler(options: FabricOptions, *, rank: int, world_size: int, topology: Topology | None) -> GrantScheduler:
    """Size the grant window by what drains to this rank, and each sender's share by its route."""
    return GrantScheduler(**_sizes(options, rank, world_size, topology), shares=_shares(topology, rank))


def resize_scheduler(
    scheduler: GrantScheduler, options: FabricOptions, *, rank: int, world_size: int, topology: Topology | None
) -> None:
    """Let the scheduler grant as :func:`build_scheduler` would have it with these options."""
    scheduler.resize(**_sizes(options, rank, world_size, topology))


class _Sizes(TypedDict):
    window_bytes: int
    quantum_bytes: int
    sender_bytes: Mapping[int, int]


def _sizes(options: FabricOptions, rank: int, world_size: int, topology: Topology | None) -> _Sizes:
    own_rate = _own_rate(topology, rank)
    window_bytes = options.grant_window_bytes or _window(own_rate, options)
    return {
        "window_bytes": window_bytes,
        "quantum_bytes": max(_chunk(own_rate, options), window_bytes // 4),
        "sender_bytes": {
            peer: min(window_bytes, _window(rate, options))
            for peer, rate in _route_rates(topology, world_size, target=rank).items()
        },
    }


def fit_options(
    options: FabricOptions, *, rank: int, world_size: int, topology: Topology | None
) -> Mapping[int, FabricOptions]:
    """Return the options for each peer: what is sent to it goes in chunks that its route carries soon, unpaced."""
    fitted = {}
    for peer, rate in _route_rates(topology, world_size, source=rank).items():
        most_bytes = _soon_bytes(rate, options)
        fitted[peer] = replace(
            options,
            chunk_bytes=max(options.eager_bytes, min(options.chunk_bytes, most_bytes)),
            unsent_bytes=max(options.eager_bytes, min(options.unsent_bytes, most_bytes)),
            congestion=options.congestion or (None if math.isinf(rate) else CONGESTION_WITH_RATES),
        )
    return fitted


def _shares(topology: Topology | None, rank: int) -> dict[int, tuple[LinkShare, ...]]:
    """Return for each peer the links between switches on its route to ``rank``, with what this rank may use of them."""
    if topology is None:
        return {}
    inner = {node.name: _num_ranks_below(node) for node in topology.walk() if isinstance(node, Switch) and node.link}
    known: dict[DirectedLink, LinkShare | None] = {}

    def share_of(directed: DirectedLink) -> LinkShare | None:
        link = topology.node(directed.child).link
        if directed.child not in inner or link is None or math.isinf(link.bytes_per_s(directed.direction)):
            return None
        below = inner[directed.child]
        num_receivers = below if directed.direction == "down" else topology.num_ranks - below
        window_bytes = int(link.bytes_per_s(directed.direction) * SHARED_WINDOW_S)
        part_bytes = max(MIN_CHUNK_BYTES, window_bytes // num_receivers)
        return LinkShare(part_bytes, most_bytes=window_bytes, target_s=TARGET_S)

    shares = {}
    for peer in range(topology.num_ranks):
        route = topology.route(peer, rank)
        known.update((directed, share_of(directed)) for directed in route if directed not in known)
        shares[peer] = tuple(share for directed in route if (share := known[directed]) is not None)
    return shares


def _num_ranks_below(node: Node) -> int:
    return sum(isinstance(below, Rank) for below in walk(node))


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


def _window(bytes_per_s: float, options: FabricOptions) -> int:
    if math.isinf(bytes_per_s):
        return max(2 * options.chunk_bytes, DEFAULT_WINDOW_BYTES)
    window_s = WINDOW_S if options.num_classes == 1 else CLASSES_WINDOW_S
    return max(2 * _chunk(bytes_per_s, options), int(bytes_per_s * window_s))


def _chunk(bytes_per_s: float, options: FabricOptions) -> int:
    return min(options.chunk_bytes, _soon_bytes(bytes_per_s, options))


def _soon_bytes(bytes_per_s: float, options: FabricOptions) -> int:
    """Return what a link carries soon enough for whatever waits behind it."""
    chunk_s = CHUNK_S if options.num_classes == 1 else CLASSES_CHUNK_S
    return DEFAULT_WINDOW_BYTES if math.isinf(bytes_per_s) else max(MIN_CHUNK_BYTES, int(bytes_per_s * chunk_s))
