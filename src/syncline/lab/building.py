"""The commands that build a planned lab, in order. Nothing is run here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from syncline.lab.plan import LabHost, LabLink, LabPlan
from syncline.lab.programs import Batch
from syncline.lab.queues import QueueSettings, limit_commands


def building_batches(plan: LabPlan, settings: QueueSettings, congestion: str | None = None) -> Iterator[Batch]:
    """Yield the batches that build ``plan``; ``congestion`` is for connections that choose none themselves."""
    yield Batch(program="ip", namespace=None, lines=tuple(f"netns add {name}" for name in plan.namespaces))
    yield Batch(program="ip", namespace=plan.switch_namespace, lines=tuple(_switch_lines(plan)))
    for host in plan.hosts:
        yield Batch(program="ip", namespace=host.namespace, lines=tuple(_host_lines(host, plan, congestion)))
    limits: defaultdict[str, list[str]] = defaultdict(list)
    for link in plan.links:
        limits[link.lower_namespace] += _limit_up(link, settings)
        limits[plan.switch_namespace] += _limit_down(link, settings)
    for namespace, lines in limits.items():
        yield Batch(program="tc", namespace=namespace, lines=tuple(lines))


def _switch_lines(plan: LabPlan) -> Iterator[str]:
    """Yield the commands for bridges and pairs. Without IPv6 addresses and snooping, no link carries stray packets."""
    yield "link set dev lo up"
    for bridge in plan.bridges:
        yield f"link add name {bridge.interface} type bridge stp_state 0 mcast_snooping 0"
        yield f"link set dev {bridge.interface} addrgenmode none"
        yield f"link set dev {bridge.interface} up"
    for link in plan.links:
        peer = f"{link.lower_interface} netns {link.lower_namespace}"
        yield f"link add name {link.upper_interface} type veth peer name {peer}"
        yield from _port_lines(link.upper_interface, link.upper_bridge)
        if link.lower_bridge is not None:
            yield from _port_lines(link.lower_interface, link.lower_bridge)


def _port_lines(interface: str, bridge: str) -> Iterator[str]:
    yield f"link set dev {interface} addrgenmode none"
    yield f"link set dev {interface} master {bridge}"
    yield f"link set dev {interface} up"


def _host_lines(host: LabHost, plan: LabPlan, congestion: str | None) -> Iterator[str]:
    """Yield the commands for a host. It knows all others' Ethernet addresses, so that none is asked for under load.

    The congestion control is the route's: the namespace's setting takes only what the whole machine lets anybody use.
    """
    yield "link set dev lo up"
    if host.interface == "lo":
        return
    yield f"link set dev {host.interface} addrgenmode none"
    yield f"link set dev {host.interface} address {host.ethernet_address}"
    yield f"address add {host.address}/{plan.network.prefixlen} dev {host.interface}"
    yield f"link set dev {host.interface} up"
    if congestion is not None:
        yield f"route replace {plan.network} dev {host.interface} scope link src {host.address} congctl {congestion}"
    for other in plan.hosts:
        if other is not host:
            yield f"neigh add {other.address} lladdr {other.ethernet_address} dev {host.interface} nud permanent"


def _limit_up(link: LabLink, settings: QueueSettings) -> Iterator[str]:
    is_host = link.lower_bridge is None
    yield from limit_commands(link.lower_interface, link.link.up_bytes_per_s, settings, is_host=is_host)


def _limit_down(link: LabLink, settings: QueueSettings) -> Iterator[str]:
    yield from limit_commands(link.upper_interface, link.link.down_bytes_per_s, settings, is_host=False)
