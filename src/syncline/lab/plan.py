"""What a lab is made of: namespaces, bridges, veth pairs and addresses, and the commands that build them, in order.

All is computed from a topology, and nothing is run here. Each host is a network namespace. All switches are bridges in
one more namespace, so that the machine's own namespace sees nothing of the lab. Each link is a veth pair, or, if it has
a latency or loses packets, a pair of interfaces between which a process (:mod:`.latency`) passes packets on; what
leaves its lower end goes up, what leaves its upper end goes down.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from syncline.errors import LabError
from syncline.lab.latency import DEVICE
from syncline.lab.programs import Batch
from syncline.lab.queues import QueueSettings, limit_commands
from syncline.topology import Host, Link, Node, Rank, Socket, Switch, Topology

NAMESPACE_PREFIX = "syncline-"
HOST_INTERFACE = "eth0"
_SWITCHES = "_switches"  # no host can have this name: names begin with a letter or a digit
_CANDIDATE_NETWORKS = (
    *(f"10.{second}.0.0/16" for second in range(99, 256)),
    *(f"172.{second}.0.0/16" for second in range(16, 32)),
    *(f"198.{second}.0.0/16" for second in (18, 19)),  # set aside for benchmarks by RFC 2544
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabHost:
    """A host: its namespace, and the interface and address under which the others reach it."""

    name: str
    namespace: str
    interface: str
    address: str
    ethernet_address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LabLink:
    """A link: a pair of interfaces. The lower end is in the child's namespace, the upper one in the switches'."""

    child: str
    link: Link
    is_tapped: bool
    """Whether a process passes its packets on, as it has a latency or loses some, and as this machine can."""
    lower_namespace: str
    lower_interface: str
    lower_bridge: str | None
    upper_interface: str
    upper_bridge: str

    @property
    def first_lower_interface(self) -> str:
        """What the lower end is called until it is where it belongs, if the link is tapped."""
        return f"l{self.upper_interface}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LabPlan:
    """Everything that a lab consists of."""

    lab_id: str
    topology: Topology
    network: ipaddress.IPv4Network
    switch_namespace: str
    hosts: tuple[LabHost, ...]
    bridges: Mapping[str, str]
    """By switch, the interface of its bridge in the switches' namespace."""
    links: tuple[LabLink, ...]

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All namespaces of the lab."""
        return (self.switch_namespace, *(host.namespace for host in self.hosts))

    @property
    def tapped_interfaces(self) -> tuple[tuple[str, str, float, float], ...]:
        """Both ends of each tapped link, as they are first called, its latency in seconds, and what share it loses."""
        tapped = (each for each in self.links if each.is_tapped)
        return tuple(
            (each.first_lower_interface, each.upper_interface, each.link.latency_s, each.link.loss_share)
            for each in tapped
        )

    def host(self, name: str) -> LabHost:
        """Return the host of that name."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise LabError(f"lab {self.lab_id} has no host {name!r}; its hosts are {', '.join(h.name for h in self.hosts)}")

    def environment(self, host: LabHost, *, topology_file: str) -> dict[str, str]:
        """Return the variables that tell a command on ``host`` where it is and where rank 0 is."""
        master = self.host(self.topology.host_of(0).name)
        return {
            "SYNCLINE_LAB": self.lab_id,
            "SYNCLINE_TOPOLOGY": topology_file,
            "SYNCLINE_HOST": host.name,
            "SYNCLINE_INTERFACE": host.interface,
            "GLOO_SOCKET_IFNAME": host.interface,
            "MASTER_ADDR": master.address,
            "MASTER_PORT": "29500",
        }

    def notes(self) -> tuple[str, ...]:
        """Return what of the topology this lab cannot emulate, in sentences for the user."""
        left_out = [each for each in self.links if needs_taps(each.link) and not each.is_tapped]
        late = [each.child for each in left_out if each.link.latency_s]
        lossy = [each.child for each in left_out if each.link.loss_share]
        nodes = (node for node in self.topology.walk() if isinstance(node, Rank | Socket))
        local = [node.name for node in nodes if node.link != Link.unlimited()]
        notes = []
        for names, what in ((late, "latency"), (lossy, "loss")):
            if names:
                notes.append(f"The {what} of {_list_names(names)} is left out: {DEVICE} cannot be opened here.")
        if local:
            notes.append(f"Ranks of one host talk over its loopback: the rates of {_list_names(local)} are left out.")
        return tuple(notes)


def plan_lab(topology: Topology, *, lab_id: str, network: ipaddress.IPv4Network, has_taps: bool = True) -> LabPlan:
    """Give every node its namespace, interfaces and address."""
    if len(topology.hosts) > network.num_addresses - 2:
        raise LabError(
            f"{len(topology.hosts)} hosts do not fit in {network}; a lab has at most {network.num_addresses - 2}"
        )
    hosts = tuple(_plan_host(host, lab_id, network, index) for index, host in enumerate(topology.hosts))
    switches = [node for node in topology.walk() if isinstance(node, Switch)]
    bridges = {switch.name: f"b{index}" for index, switch in enumerate(switches)}
    namespace = _namespace(lab_id, _SWITCHES)
    nodes = [node for node in topology.walk() if isinstance(node, Switch | Host) and node.link is not None]
    links = (_plan_link(node, index, topology, bridges, namespace, lab_id) for index, node in enumerate(nodes))
    links = (link if has_taps else replace(link, is_tapped=False) for link in links)
    return LabPlan(
        lab_id=lab_id,
        topology=topology,
        network=network,
        switch_namespace=namespace,
        hosts=hosts,
        bridges=bridges,
        links=tuple(links),
    )


def choose_network(used: Iterable[ipaddress.IPv4Network]) -> ipaddress.IPv4Network:
    """Return a private network that overlaps none of ``used`` (the destinations of the machine's routes).

    Nothing leads out of a lab, so an overlap would do no harm; but an address should never mean two machines to a
    person who reads a log.
    """
    taken = [network for network in used if network.prefixlen > 0]
    for candidate in map(ipaddress.IPv4Network, _CANDIDATE_NETWORKS):
        if not any(candidate.overlaps(network) for network in taken):
            return candidate
    raise LabError("every private network that the lab knows is routed on this machine; remove a route of 10.99.0.0/16")


def _plan_host(host: Host, lab_id: str, network: ipaddress.IPv4Network, index: int) -> LabHost:
    is_alone = host.link is None
    address = network[index + 1]
    return LabHost(
        name=host.name,
        namespace=_namespace(lab_id, host.name),
        interface="lo" if is_alone else HOST_INTERFACE,
        address="127.0.0.1" if is_alone else str(address),
        ethernet_address="02:00:" + ":".join(f"{byte:02x}" for byte in address.packed),
    )


def _plan_link(
    node: Node, index: int, topology: Topology, bridges: dict[str, str], switch_namespace: str, lab_id: str
) -> LabLink:
    parent = topology.parent_of(node.name)
    assert parent is not None
    assert node.link is not None
    is_host = isinstance(node, Host)
    return LabLink(
        child=node.name,
        link=node.link,
        is_tapped=needs_taps(node.link),
        lower_namespace=_namespace(lab_id, node.name) if is_host else switch_namespace,
        lower_interface=HOST_INTERFACE if is_host else f"u{index}",
        lower_bridge=None if is_host else bridges[node.name],
        upper_interface=f"d{index}",
        upper_bridge=bridges[parent.name],
    )


def needs_taps(link: Link) -> bool:
    """Return whether a link does what pairs of interfaces do not."""
    return link.latency_s > 0 or link.loss_share > 0


def lab_id_of(namespace: str) -> str:
    """Return the id of the lab that a namespace belongs to."""
    return namespace.removeprefix(NAMESPACE_PREFIX).partition(".")[0]


def _namespace(lab_id: str, name: str) -> str:
    return f"{NAMESPACE_PREFIX}{lab_id}.{name}"


def _list_names(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


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
    for bridge in plan.bridges.values():
        yield f"link add name {bridge} type bridge stp_state 0 mcast_snooping 0"
        yield f"link set dev {bridge} addrgenmode none"
        yield f"link set dev {bridge} up"
    for link in plan.links:
        lower = f"{link.lower_interface} netns {link.lower_namespace}"
        if link.is_tapped:
            yield f"link set dev {link.first_lower_interface} name {lower}"
        else:
            yield f"link add name {link.upper_interface} type veth peer name {lower}"
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
