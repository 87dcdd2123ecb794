"""The nodes of a topology's tree, switches, hosts, sockets and ranks, and the link that joins each to its parent.

Nodes are plain data, checked one by one as they are built; :class:`~syncline.topology.Topology` checks the tree.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, NamedTuple, TypedDict

from syncline.arguments import Bounds, Whole, check_fields, checked
from syncline.errors import TopologyError
from syncline.priorities.settings import Priorities

Direction = Literal["up", "down"]
WAYS: tuple[Direction, Direction] = ("up", "down")
"""Up: from the child to its parent. Down: from the parent to the child."""

Gateway = Literal["every", "one", "auto", "helper"]
"""Which ranks of a host speak to other hosts in collectives: each; the first alone; whichever of the two is predicted
to be faster; or the first alone, which then has no training data of its own."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)

MAX_RANKS = 100_000
"""Of a topology; a job has :data:`syncline.schedule.draft.MAX_PLANNED_RANKS` at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """An edge of the tree: its rate in each direction (bytes per second), and its latency in one (seconds).

    A rate of ``math.inf`` says that the link never limits. ``loss_share`` is the part of the packets, in each
    direction, that an emulated link loses at random, whatever its load; nothing but the lab heeds it. Raises
    :class:`TopologyError` for a rate of 0 or less, a latency that is negative or infinite, and a loss of all.

    >>> Link(up_bytes_per_s=12.5e6, down_bytes_per_s=25e6, latency_s=1e-3).bytes_per_s("down")
    25000000.0
    """

    up_bytes_per_s: Annotated[float, Bounds(above=0)]
    down_bytes_per_s: Annotated[float, Bounds(above=0)]
    latency_s: Annotated[float, Bounds(0, below=math.inf)] = 0.0
    loss_share: Annotated[float, Bounds(0, below=1)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, TopologyError)

    @classmethod
    def symmetric(cls, bytes_per_s: float, *, latency_s: float = 0.0) -> Link:
        """Build a link with the same rate in both directions, in bytes per second."""
        return cls(up_bytes_per_s=bytes_per_s, down_bytes_per_s=bytes_per_s, latency_s=latency_s)

    @classmethod
    def unlimited(cls) -> Link:
        """Build a link that never limits."""
        return cls.symmetric(math.inf)

    @checked
    def bytes_per_s(self, direction: Direction) -> float:
        """Return the rate in one direction."""
        return self.up_bytes_per_s if direction == "up" else self.down_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A leaf: one training process, joined to its host by ``link``.

    >>> Rank(rank=3).name
    'rank 3'
    """

    rank: Whole
    link: Link = field(default_factory=Link.unlimited)

    def __post_init__(self) -> None:
        check_fields(self, TopologyError)

    @property
    def name(self) -> str:
        """``"rank 3"``; the blank keeps it apart from every host and switch."""
        return f"rank {self.rank}"

    @property
    def children(self) -> tuple[Node, ...]:
        """No children."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Socket:
    """A level inside a host, such as a processor's socket or a PCIe switch: ranks below it are nearer to one another.

    ``name`` is that of what is above it, a slash, and its own. Raises :class:`TopologyError` for one that is empty.

    >>> Socket(name="a0/s1", link=Link.symmetric(20e9), children=(Rank(rank=0), Rank(rank=1))).own_name
    's1'
    """

    name: str
    link: Link
    children: tuple[Socket | Rank, ...]

    def __post_init__(self) -> None:
        check_fields(self, TopologyError)
        check_name(self.own_name, "socket")
        if not self.children:
            raise TopologyError(f"socket {self.name!r} has no rank; give it at least one, or leave it out")
        _check_sockets(self.name, self.children)

    @property
    def own_name(self) -> str:
        """What stands behind the last slash of the name."""
        return self.name.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine with its ranks. ``link`` is None at the root alone; ``features`` say what kind of machine it is.

    A host has either ``ranks``, or ``sockets`` that have them; then ``ranks`` follows, in file order.
    ``memory_bytes``: its memory, None where nobody said. ``gateway``: who speaks to other hosts, a :data:`Gateway`.
    Raises :class:`TopologyError` for a host without ranks, and for a helper with no rank beside it.

    >>> host = Host(name="a0", link=Link.unlimited(), ranks=(Rank(rank=0), Rank(rank=1)))
    >>> [rank.name for rank in host.children]
    ['rank 0', 'rank 1']
    >>> sockets = tuple(Socket(name=f"a0/s{k}", link=Link.unlimited(), children=(Rank(rank=k),)) for k in range(2))
    >>> [rank.name for rank in Host(name="a0", link=None, sockets=sockets).ranks]
    ['rank 0', 'rank 1']
    """

    name: str
    link: Link | None
    ranks: tuple[Rank, ...] = ()
    sockets: tuple[Socket, ...] = ()
    features: Mapping[str, float | str] = field(default_factory=dict, hash=False)
    memory_bytes: Whole | None = None
    gateway: Gateway = "every"

    def __post_init__(self) -> None:
        check_fields(self, TopologyError)
        check_name(self.name, "host")
        if self.sockets:
            self._take_ranks_of_sockets()
        if not self.ranks:
            raise TopologyError(f"host {self.name!r} has no rank; give it at least one, or leave it out")
        if self.gateway == "helper" and len(self.ranks) == 1:
            raise TopologyError(
                f"host {self.name!r} has a helper and no rank that trains; give it 2 ranks or more, the helper counted"
            )

    @property
    def children(self) -> tuple[Socket | Rank, ...]:
        """The sockets, or else the ranks, in file order."""
        return self.sockets or self.ranks

    @checked
    def with_children(self, children: tuple[Socket | Rank, ...]) -> Host:
        """Return this host with other sockets, or other ranks; a helper that is alone then helps nobody."""
        sockets = tuple(child for child in children if isinstance(child, Socket))
        ranks = tuple(child for child in children if isinstance(child, Rank))
        num_ranks = len(ranks) or sum(isinstance(node, Rank) for socket in sockets for node in walk(socket))
        gateway = "every" if self.gateway == "helper" and num_ranks == 1 else self.gateway
        return replace(self, sockets=sockets, ranks=ranks, gateway=gateway)

    def _take_ranks_of_sockets(self) -> None:
        _check_sockets(self.name, self.sockets)
        ranks = tuple(node for socket in self.sockets for node in walk(socket) if isinstance(node, Rank))
        if self.ranks not in ((), ranks):
            raise TopologyError(f"host {self.name!r} has both ranks and sockets; put every rank below a socket")
        object.__setattr__(self, "ranks", ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """An inner node: it forwards and never computes. ``link`` is None at the root alone, which has no parent.

    >>> hosts = tuple(Host(name=f"h{k}", link=Link.symmetric(125e6), ranks=(Rank(rank=k),)) for k in range(2))
    >>> syncline.Topology(name="pair", root=Switch(name="s", link=None, children=hosts)).num_ranks
    2
    """

    name: str
    link: Link | None
    children: tuple[Switch | Host, ...]

    def __post_init__(self) -> None:
        check_fields(self, TopologyError)
        check_name(self.name, "switch")
        if not self.children:
            raise TopologyError(f"switch {self.name!r} is empty; give it children, or leave it out")


Node = Switch | Host | Socket | Rank


class DirectedLink(NamedTuple):
    """One direction of the link that joins the node named ``child`` to its parent.

    >>> str(DirectedLink("rack-a", "up"))
    'rack-a up'
    """

    child: str
    direction: Direction

    def __str__(self) -> str:
        return f"{self.child} {self.direction}"


def check_num_ranks(number: int) -> None:
    """Raise if a topology would have more ranks than :data:`MAX_RANKS`; to be asked before they are made."""
    if number > MAX_RANKS:
        raise TopologyError(f"a topology has at most {MAX_RANKS} ranks, this has more; describe the job's hosts alone")


def check_name(name: str, kind: str) -> None:
    """Raise unless ``name`` can name a host or a switch, or stand behind a socket's last slash."""
    if not _NAME.fullmatch(name):
        raise TopologyError(
            f"{kind} name {name!r} cannot be used; write 1 to 63 of A-Z a-z 0-9 . _ - and begin with a letter or digit"
        )


def _check_sockets(above: str, children: tuple[Socket | Rank, ...]) -> None:
    for child in children:
        if isinstance(child, Socket) and child.name != f"{above}/{child.own_name}":
            raise TopologyError(f"socket {child.name!r} is below {above!r}; call it '{above}/{child.own_name}'")


class TopologyParts(TypedDict):
    """What a file says of a topology: the arguments of :class:`~syncline.topology.Topology`."""

    name: str
    root: Switch | Host
    source: str | None
    priorities: Priorities | None


def walk(node: Node) -> Iterator[Node]:
    """Yield ``node`` and all nodes below it, depth first, in file order."""
    yield node
    for child in node.children:
        yield from walk(child)


def ranks_below(node: Node) -> tuple[int, ...]:
    """Return the ranks below ``node``, itself included, depth first, so that ranks that are close stand close."""
    return tuple(below.rank for below in walk(node) if isinstance(below, Rank))


def longest_way_s(node: Node) -> float:
    """Return the latency between the two ranks below that are furthest from each other."""
    return _reach(node)[1]


def _reach(node: Node) -> tuple[float, float]:
    """Return the latency from here to the furthest rank below, and between any two of these."""
    if isinstance(node, Rank):
        return 0.0, 0.0
    found = [(child.link.latency_s if child.link else 0.0, *_reach(child)) for child in node.children]
    far = sorted((own + depth for own, depth, _ in found), reverse=True)
    return far[0], max(sum(far[:2]) if len(far) > 1 else 0.0, *(widest for _, _, widest in found))


def num_ranks_below(node: Node) -> int:
    """Return how many ranks are below ``node``, itself included."""
    return len(ranks_below(node))


def with_children(node: Switch | Host | Socket, children: tuple[Node, ...]) -> Node:
    """Return ``node`` with others below it."""
    if isinstance(node, Host):
        return node.with_children(children)  # type: ignore[arg-type]
    return replace(node, children=children)  # type: ignore[arg-type]


def changed(root: Switch | Host, change: Callable[[Switch | Host | Socket], Node]) -> Switch | Host:
    """Return the tree with what ``change`` makes of each switch, host and socket, from the root down."""

    def build(node: Node) -> Node:
        if isinstance(node, Rank):
            return node
        node = change(node)
        return with_children(node, tuple(map(build, node.children)))  # type: ignore[arg-type]

    return build(root)  # type: ignore[return-value]


def relinked(root: Switch | Host, links: Mapping[str, Link]) -> Switch | Host:
    """Return the tree with other links above the switches, hosts and sockets of these names."""
    return changed(root, lambda node: replace(node, link=links[node.name]) if node.name in links else node)


def restricted(node: Node, number: Mapping[int, int]) -> Node | None:
    """Return a node with the ranks that have a new number alone; None if it has none."""
    if isinstance(node, Rank):
        return replace(node, rank=number[node.rank]) if node.rank in number else None
    children = tuple(child for old in node.children if (child := restricted(old, number)) is not None)
    if not children:
        return None
    if isinstance(node, Host) and node.gateway == "helper" and node.ranks[0].rank not in number:
        node = replace(node, gateway="one")  # who is first now has data
    return with_children(node, children)
