"""Which hosts with ``gateway: auto`` get a gateway: whichever way the best all-reduce is predicted to be faster."""

from __future__ import annotations

from dataclasses import replace

from syncline.arguments import checked
from syncline.schedule.collective import Collective
from syncline.schedule.cost import predict
from syncline.schedule.planners import choose
from syncline.topology import Gateway, Host, Switch, Topology

BUCKET_BYTES = 4 << 20
"""A training bucket of the usual size."""


@checked
def with_gateways_chosen(topology: Topology, num_bytes: int = BUCKET_BYTES) -> Topology:
    """Return the topology with ``every`` or ``one`` in place of ``auto``: one answer for all hosts that leave it open.

    Both ways are planned and predicted for an all-reduce of ``num_bytes``, and every rank speaks unless one for each
    host is faster. All ranks of a job come to the same answer. A topology without ``auto`` is returned as it is.

    >>> hosts = "{host: 'h[0-2]', uplink: 1 Gbit/s, ranks: 3, gateway: auto}"
    >>> topology = Topology.parse(f"{{switch: s, children: [{hosts}]}}")
    >>> [with_gateways_chosen(topology, num_bytes).hosts[0].gateway for num_bytes in (64 << 10, 64 << 20)]
    ['one', 'every']
    """
    if all(host.gateway != "auto" for host in topology.hosts):
        return topology
    every, one = (_with_auto_as(topology, gateway) for gateway in ("every", "one"))
    return one if _time_s(one, num_bytes) < _time_s(every, num_bytes) else every


def _time_s(topology: Topology, num_bytes: int) -> float:
    return predict(choose(topology, Collective.ALL_REDUCE, num_bytes), topology, num_bytes).time_s


def _with_auto_as(topology: Topology, gateway: Gateway) -> Topology:
    def decide(node: Switch | Host) -> Switch | Host:
        if isinstance(node, Host):
            chosen = gateway if node.gateway == "auto" else node.gateway
            return replace(node, ranks=() if node.sockets else node.ranks, gateway=chosen)
        return replace(node, children=tuple(decide(child) for child in node.children))

    return replace(topology, root=decide(topology.root))
