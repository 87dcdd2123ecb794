"""The topology: a checked tree of switches, hosts, sockets and ranks, and the questions that planners ask of it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from syncline.arguments import check_fields, checked
from syncline.errors import TopologyError
from syncline.priorities.settings import Priorities
from syncline.topology.host_matching import UNKNOWN_NETWORK, flat_root, match_ranks
from syncline.topology.tree import DirectedLink, Host, Link, Node, Rank, Switch, restricted, walk
from syncline.units import counted

MAX_NAMED = 16
"""Nodes that an error names."""


class _Index(NamedTuple):
    """What can be asked of a topology often, computed once."""

    nodes: Mapping[str, Node]
    parents: Mapping[str, Node]
    hosts: tuple[Host, ...]
    host_of_rank: tuple[Host, ...]
    paths: tuple[tuple[Node, ...], ...]
    gateways: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The tree of a job's network.

    ``source`` is the file that it came from, and serves errors alone; ``priorities`` is what that says of connection
    classes, if it does. Neither counts when topologies are compared.

    >>> topology = syncline.Topology.load("two-racks-5-3")
    >>> topology.num_ranks, topology.host_of(7).name
    (8, 'h7')
    """

    name: str
    root: Switch | Host
    source: str | None = field(default=None, compare=False)
    priorities: Priorities | None = field(default=None, compare=False)
    _index: _Index = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self, TopologyError)
        object.__setattr__(self, "_index", _build_index(self.root, self._label()))

    @classmethod
    @checked
    def flat(cls, num_hosts: int, *, rate: float = math.inf, latency_s: float = 0.0) -> Topology:
        """Build one switch with ``num_hosts`` hosts h0, h1 ... of one rank each; ``rate`` in bytes per second.

        >>> syncline.Topology.flat(4, rate=125e6).num_ranks  # 1 Gbit/s
        4
        """
        if num_hosts < 1:
            raise TopologyError(f"a flat topology needs at least 1 host, not num_hosts={num_hosts}")
        link = Link.symmetric(rate, latency_s=latency_s)
        hosts = tuple(Host(name=f"h{k}", link=link, ranks=(Rank(rank=k),)) for k in range(num_hosts))
        return cls(name=f"flat-{num_hosts}", root=Switch(name="switch", link=None, children=hosts))

    @classmethod
    @checked
    def flat_on(cls, hosts: Sequence[str]) -> Topology:
        """Build one switch for hosts of whose network nothing is known; ``hosts[k]`` is the name of rank k's.

        >>> syncline.Topology.flat_on(["a.example", "b.example", "a.example"]).ranks_of("a")
        (0, 2)
        """
        if not hosts:
            raise TopologyError(f"hosts must name the host of at least 1 rank, not {hosts!r}")
        return cls(name=f"flat-{len(hosts)}", root=flat_root(hosts))

    @classmethod
    @checked
    def load(cls, path: str | Path) -> Topology:
        """Read a topology file, or a shipped topology by its name (``"two-racks-5-3"``).

        Raises :class:`TopologyError` for a file that cannot be read, with the names there are, and as :meth:`parse`.

        >>> [host.name for host in syncline.Topology.load("demo-1-3").hosts]
        ['h0', 'h1', 'h2', 'h3']
        """
        from syncline.topology.document import find_topology_text

        text, source = find_topology_text(path)
        return cls.parse(text, source=source)

    @classmethod
    @checked
    def parse(cls, text: str, *, source: str | None = None) -> Topology:
        """Read a topology from YAML; every error, a :class:`TopologyError`, names ``source`` and the line.

        >>> text = "{topology: pair, switch: s, children: [{host: 'h[0-1]', uplink: 1 Gbit/s}]}"
        >>> syncline.Topology.parse(text).num_ranks
        2
        """
        from syncline.topology.document import parse_document

        return cls(**parse_document(text, source=source))

    @classmethod
    @checked
    def imported(
        cls,
        text: str,
        origin: str,
        *,
        rates: Sequence[float] = (),
        ranks_per_host: int | None = None,
        source: str | None = None,
    ) -> Topology:
        """Read a tree that another tool has written; every error, a :class:`TopologyError`, names the line.

        ``origin`` is its format: ``"slurm"`` (``topology.conf`` or ``.yaml``), ``"slurm-env"``, ``"topograph"``,
        ``"k8s-nodes"``, ``"infragraph"`` or ``"hostfile"``. ``rates`` (bytes per second) are those of the hosts' links,
        of the links above their switches, and so on; the last holds for all above. Without, they are those of the file,
        else unlimited. ``ranks_per_host``: of every host, whatever the file tells; without, what that tells, else 1.

        >>> syncline.Topology.imported("SwitchName=s Nodes=n[1-4]", "slurm", rates=[125e6]).num_ranks
        4
        """
        from syncline.topology.importing import import_parts

        return cls(**import_parts(text, origin, rates=rates, ranks_per_host=ranks_per_host, source=source))

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self._index.paths)

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts in file order."""
        return self._index.hosts

    @property
    def gateways(self) -> Mapping[int, int]:
        """For each rank that does not speak to other hosts itself, the rank of its host that speaks for it.

        Those are the hosts' first ranks, where ``gateway`` is one or helper; empty where every rank speaks. A host
        with ``gateway: auto`` counts as every until :func:`syncline.schedule.with_gateways_chosen` has decided.

        >>> text = "{host: a, ranks: 3, gateway: one}"
        >>> dict(syncline.Topology.parse(text).gateways)
        {1: 0, 2: 0}
        """
        return MappingProxyType(self._index.gateways)

    @property
    def speakers(self) -> tuple[int, ...]:
        """The ranks that speak to other hosts themselves, ascending: all but those behind :attr:`gateways`.

        >>> syncline.Topology.parse("{host: a, ranks: 3, gateway: one}").speakers
        (0,)
        """
        return tuple(rank for rank in range(self.num_ranks) if rank not in self._index.gateways)

    @property
    def helpers(self) -> tuple[int, ...]:
        """The ranks without training data, ascending: the first of each host with ``gateway: helper``."""
        return tuple(sorted(host.ranks[0].rank for host in self.hosts if host.gateway == "helper"))

    @property
    def digest(self) -> str:
        """A short stable hash of the tree, equal exactly where the trees are; the topology's name does not count."""
        return hashlib.sha256(repr(_canonical(self.root)).encode()).hexdigest()[:16]

    def host_of(self, rank: int) -> Host:
        """Return the host that ``rank`` runs on; :class:`TopologyError` if there is no such rank."""
        self._check_rank(rank)
        return self._index.host_of_rank[rank]

    @checked
    def ranks_of(self, host_name: str) -> tuple[int, ...]:
        """Return the ranks of a host, in file order; :class:`TopologyError`, with the known hosts, if there is none."""
        for host in self.hosts:
            if host.name == host_name:
                return tuple(rank.rank for rank in host.ranks)
        known = _first_of(host.name for host in self.hosts)
        raise TopologyError(f"{self._label()} has no host {host_name!r}; its hosts are {known}")

    @checked
    def node(self, name: str) -> Node:
        """Return the switch, host, socket (``"a0/s1"``) or rank (``"rank 3"``) called so, or :class:`TopologyError`."""
        if name not in self._index.nodes:
            known = _first_of(node.name for node in self.walk() if isinstance(node, Switch | Host))
            raise TopologyError(f"{self._label()} has no node {name!r}; its switches and hosts are {known}")
        return self._index.nodes[name]

    @checked
    def parent_of(self, name: str) -> Node | None:
        """Return the parent of the node of that name, None for the root."""
        self.node(name)
        return self._index.parents.get(name)

    def path(self, rank: int) -> tuple[Node, ...]:
        """Return the nodes from ``rank`` up to just below the root, leaf first."""
        self._check_rank(rank)
        return self._index.paths[rank]

    @checked
    def bytes_per_s(self, link: DirectedLink) -> float:
        """Return the rate of one direction of a link; no limit above the root, where there is none.

        >>> from syncline.topology import DirectedLink
        >>> Topology.flat(2, rate=125e6).bytes_per_s(DirectedLink("h0", "up"))
        125000000.0
        """
        found = self.node(link.child).link
        return math.inf if found is None else found.bytes_per_s(link.direction)

    @checked
    def round_trip_s(self, one: int, other: int) -> float:
        """Return the latency of the way from one rank to another and back, in seconds.

        Raises :class:`TopologyError` for a rank that is not there.

        >>> Topology.flat(2, latency_s=0.01).round_trip_s(0, 1)
        0.04
        """
        links = (self.node(each.child).link for each in self.route(one, other))
        return 2 * sum(link.latency_s for link in links if link is not None)

    def links(self) -> tuple[tuple[str, Link], ...]:
        """Return every link with the name of the child that it joins to its parent, depth first."""
        return tuple((node.name, node.link) for node in self.walk() if node.link is not None)

    @property
    def has_rates(self) -> bool:
        """Whether some link is known to be limited; without, hosts are named and nothing is known of their network."""
        rates = (rate for _, link in self.links() for rate in (link.up_bytes_per_s, link.down_bytes_per_s))
        return not all(map(math.isinf, rates))

    def route(self, source: int, destination: int) -> tuple[DirectedLink, ...]:
        """Return the directed links that a message from one rank to another crosses, in order; none to itself.

        >>> [str(link) for link in syncline.Topology.load("two-racks-5-3").route(0, 7)]
        ['rank 0 up', 'h0 up', 'rack-a up', 'rack-b down', 'h7 down', 'rank 7 down']
        """
        self._check_rank(source)
        self._check_rank(destination)
        upward, downward = self._index.paths[source], self._index.paths[destination]
        num_up, num_down = len(upward), len(downward)
        while num_up and num_down and upward[num_up - 1] is downward[num_down - 1]:
            num_up -= 1
            num_down -= 1
        down = (DirectedLink(node.name, "down") for node in reversed(downward[:num_down]))
        return (*(DirectedLink(node.name, "up") for node in upward[:num_up]), *down)

    @property
    def is_unknown(self) -> bool:
        """Whether nothing is known of the network between its hosts, as :meth:`flat_on` says.

        The name of the root tells, so that it is known wherever the tree goes.

        >>> syncline.Topology.flat_on(["a", "b"]).is_unknown, syncline.Topology.flat(2).is_unknown
        (True, False)
        """
        return self.root.name.startswith(UNKNOWN_NETWORK) and len(self.hosts) > 1 and not self.has_rates

    def walk(self) -> Iterator[Node]:
        """Yield every node, depth first, in file order."""
        return walk(self.root)

    @checked
    def render(self, *, as_mermaid: bool = False, as_svg: bool = False) -> str:
        """Draw the tree as text, a node on each line with the rate of the link above, or as a flowchart or picture."""
        from syncline.topology.rendering import render_flowchart, render_picture, render_topology

        if as_svg:
            return render_picture(self.name, self.root)
        return render_flowchart(self.root) if as_mermaid else render_topology(self.name, self.root)

    def to_yaml(self) -> str:
        """Write the topology so that :meth:`parse` gives an equal one."""
        from syncline.topology.rendering import write_document

        return write_document(self.name, self.root, self.priorities)

    @checked
    def permuted(self, order: Sequence[int]) -> Topology:
        """Return the same tree with other rank numbers: the new rank k takes the place of the rank ``order[k]``.

        >>> topology = syncline.Topology.load("two-racks-5-3").permuted([7, 0, 1, 2, 3, 4, 5, 6])
        >>> topology.host_of(0).name
        'h7'
        """
        if sorted(order) != list(range(self.num_ranks)):
            raise TopologyError(
                f"{self._label()}: an order names each of the ranks 0 to {self.num_ranks - 1} once, not {list(order)!r}"
            )
        return self.restricted(order)

    @checked
    def matched(self, hosts: Sequence[str]) -> Topology:
        """Return the tree with its ranks numbered as a job numbers them: ``hosts[k]`` is the host of the job's rank k.

        Names are compared whole, or up to the first dot. Where all are alike and none is the topology's, one machine
        stands for all hosts, and nothing changes. :class:`TopologyError` shows both lists if hosts, or the numbers of
        ranks on them, differ.

        >>> pair = syncline.Topology.parse("{switch: s, children: [{host: 'h[0-1]', uplink: 1 Gbit/s}]}")
        >>> pair.matched(["h1.example", "h0.example"]).host_of(0).name
        'h1'
        """
        self.check_world_size(len(hosts))
        order = match_ranks(self.hosts, hosts, label=self._label())
        return self if order == list(range(self.num_ranks)) else self.permuted(order)

    @checked
    def restricted(self, ranks: Sequence[int]) -> Topology:
        """Return the tree of some ranks alone; the new rank k is ``ranks[k]``. What has no rank left is left out.

        >>> syncline.Topology.load("two-racks-5-3").restricted([0, 7]).num_ranks
        2
        """
        for rank in ranks:
            self._check_rank(rank)
        if not ranks or len(set(ranks)) != len(ranks):
            raise TopologyError(f"{self._label()}: a part of it names each of its ranks once, not {list(ranks)!r}")
        root = restricted(self.root, {old: new for new, old in enumerate(ranks)})
        assert isinstance(root, Switch | Host), "the root is above every rank"
        return replace(self, root=root)

    @checked
    def check_world_size(self, world_size: int) -> None:
        """Raise :class:`TopologyError` unless the job has exactly as many ranks as the topology."""
        if world_size == self.num_ranks:
            return
        where = self._label()
        if 0 <= world_size < self.num_ranks:
            where += f" (from host {self.host_of(world_size).name}, rank {world_size}, on)"
        raise TopologyError(
            f"{where}: the topology has {counted(self.num_ranks, 'rank')} but the job has {world_size}; start "
            f"{self.num_ranks}, or give a topology of {world_size}"
        )

    def _label(self) -> str:
        return f"Topology {(self.source or self.name)!r}"

    def _check_rank(self, rank: int) -> None:
        if not isinstance(rank, Integral) or not 0 <= rank < self.num_ranks:
            raise TopologyError(f"{self._label()} has no rank {rank!r}; its ranks are 0 to {self.num_ranks - 1}")


def _build_index(root: Switch | Host, label: str) -> _Index:
    if root.link is not None:
        raise TopologyError(f"{label}: the root {root.name!r} has a link, but nothing is above it; remove the link")
    nodes: dict[str, Node] = {}
    parents: dict[str, Node] = {}
    paths: dict[int, tuple[Node, ...]] = {}
    hosts: list[Host] = []

    def visit(node: Node, above: tuple[Node, ...]) -> None:
        if node.name in nodes:
            raise TopologyError(f"{label}: {node.name!r} names two nodes; give each host, switch and rank its own name")
        nodes[node.name] = node
        if isinstance(node, Host):
            hosts.append(node)
        if isinstance(node, Rank):
            paths[node.rank] = above
        for child in node.children:
            if child.link is None:
                raise TopologyError(f"{label}: {child.name!r} has no link to {node.name!r}; only the root has none")
            parents[child.name] = node
            visit(child, (child, *above))

    visit(root, ())
    if sorted(paths) != list(range(len(paths))):
        raise TopologyError(f"{label}: ranks must be numbered 0 to {len(paths) - 1} without a gap, not {sorted(paths)}")
    host_of_rank = {rank.rank: host for host in hosts for rank in host.ranks}
    return _Index(
        nodes=nodes,
        parents=parents,
        hosts=tuple(hosts),
        host_of_rank=tuple(host_of_rank[rank] for rank in range(len(paths))),
        paths=tuple(paths[rank] for rank in range(len(paths))),
        gateways=dict(sorted(_behind_gateways(hosts))),
    )


def _behind_gateways(hosts: Sequence[Host]) -> Iterator[tuple[int, int]]:
    for host in hosts:
        if host.gateway in ("one", "helper"):
            yield from ((rank.rank, host.ranks[0].rank) for rank in host.ranks[1:])


def _canonical(node: Node) -> tuple[object, ...]:
    link = node.link and (
        float(node.link.up_bytes_per_s),
        float(node.link.down_bytes_per_s),
        float(node.link.latency_s),
        *([float(node.link.loss_share)] if node.link.loss_share else ()),  # so that other trees keep their digests
    )
    features = sorted(node.features.items()) if isinstance(node, Host) else []
    told = (node.memory_bytes, node.gateway) if isinstance(node, Host) else (None, "every")
    more = () if told == (None, "every") else told  # so that other trees keep their digests
    return (type(node).__name__, node.name, link, features, tuple(_canonical(child) for child in node.children), *more)


def _first_of(names: Iterable[str]) -> str:
    """Spell the names that an error has room for."""
    first = list(islice(names, MAX_NAMED + 1))
    return ", ".join(first[:MAX_NAMED]) + (", ..." if len(first) > MAX_NAMED else "")
