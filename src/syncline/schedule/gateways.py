"""Gateways: hosts of which one rank alone exchanges with other hosts, for all ranks of its host.

`docs/mechanisms.md`, Sharded update. The tree planners honour them: a host's ranks send all that they have towards the
gateway, which owns whatever the host owns. Inside a socket that the gateway is not in, ranks first combine what they
have, so that the socket's link carries it once.

Gateways bind what moves training's buckets: all-reduces, and the reduce-scatters and all-gathers in which a planner
may choose who owns what. Where each rank has a part of its own by definition (``target="rank_order"``), and in a
broadcast, every rank speaks.
"""

from __future__ import annotations

from collections.abc import Mapping

from syncline.schedule.collective import Collective
from syncline.schedule.ownership import Target
from syncline.topology import Host, Topology


def is_bound_to_gateways(topology: Topology, collective: Collective, target: Target) -> bool:
    """Whether a schedule must keep ranks behind a gateway from speaking to other hosts.

    >>> is_bound_to_gateways(Topology.parse("{host: a, ranks: 2, gateway: one}"), Collective.ALL_REDUCE, "balanced")
    True
    """
    return bool(topology.gateways) and collective is not Collective.BROADCAST and target == "balanced"


def gateway_fractions(topology: Topology) -> Mapping[str, list[int]]:
    """Return the weights with which gateways own all that their hosts own; none for other parents.

    >>> gateway_fractions(Topology.parse("{host: a, ranks: 3, gateway: one}"))
    {'a': [1, 0, 0]}
    """
    fractions = {}
    for gateway in dict.fromkeys(topology.gateways.values()):
        path = topology.path(gateway)
        for child, parent in zip(path, [*path[1:], topology.root], strict=True):
            fractions[parent.name] = [int(other is child) for other in parent.children]
            if isinstance(parent, Host):
                break
    return fractions


def speaking(topology: Topology) -> Topology:
    """Return the tree of those ranks that speak for themselves, whose switches have the same children as before.

    >>> speaking(Topology.parse("{host: a, ranks: 3, gateway: one}")).num_ranks
    1
    """
    return topology.restricted(topology.speakers) if topology.gateways else topology
