"""The nodes of a topology's tree, switches, hosts and ranks, and the link that joins each to its parent.

Nodes are plain data, checked one by one as they are built; :class:`~syncline.topology.Topology` checks the tree.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from syncline.errors import TopologyError
from syncline.priorities.terms import Priorities

Direction = Literal["up", "down"]
"""Up: from the child to its parent. Down: from the parent to the child."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """An edge of the tree: its rate in each direction (bytes per second), and its latency in one (seconds).

    A rate of ``math.inf`` says that the link never limits. Raises :class:`TopologyError` for a rate of 0 or less, and a
    latency that is negative or infinite.

    >>> Link(up_bytes_per_s=12.5e6, down_bytes_per_s=25e6, latency_s=1e-3).bytes_per_s("down")
    25000000.0
    """

    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        for direction, rate in (("up", self.up_bytes_per_s), ("down", self.down_bytes_per_s)):
            if not rate > 0:
                raise TopologyError(f"link rate {direction} must be above zero, not {rate!r} bytes per second")
        if not 0 <= self.latency_s < math.inf:
            raise TopologyError(f"link latency must be zero or more seconds and finite, not {self.latency_s!r}")

    @classmethod
    def symmetric(cls, bytes_per_s: float, *, latency_s: float = 0.0) -> Link:
        """Build a link with the same rate in both directions, in bytes per second."""
        return cls(up_bytes_per_s=bytes_per_s, down_bytes_per_s=bytes_per_s, latency_s=latency_s)

    @classmethod
    def unlimited(cls) -> Link:
        """Build a link that never limits."""
        return cls.symmetric(math.inf)

    def bytes_per_s(self, direction: Direction) -> float:
        """Return the rate in one direction."""
        return self.up_bytes_per_s if direction == "up" else self.down_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A leaf: one training process, joined to its host by ``link``.

    >>> Rank(rank=3).name
    'rank 3'
    """

    rank: int
    link: Link = field(default_factory=Link.unlimited)

    @property
    def name(self) -> str:
        """``"rank 3"``; the blank keeps it apart from every host and switch."""
        return f"rank {self.rank}"

    @property
    def children(self) -> tuple[Node, ...]:
        """No children."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine with its ranks. ``link`` is None at the root alone; ``features`` say what kind of machine it is.

    >>> host = Host(name="a0", link=Link.unlimited(), ranks=(Rank(rank=0), Rank(rank=1)))
    >>> [rank.name for rank in host.children]
    ['rank 0', 'rank 1']
    """

    name: str
    link: Link | None
    ranks: tuple[Rank, ...]
    features: Mapping[str, float | str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_name(self.name, "host")
        if not self.ranks:
            raise TopologyError(f"host {self.name!r} has no rank; give it at least one, or leave it out")

    @property
    def children(self) -> tuple[Node, ...]:
        """The ranks, in file order."""
        return self.ranks


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
        check_name(self.name, "switch")
        if not self.children:
            raise TopologyError(f"switch {self.name!r} is empty; give it children, or leave it out")


Node = Switch | Host | Rank


@dataclass(frozen=True, slots=True)
class DirectedLink:
    """One direction of the link that joins the node named ``child`` to its parent.

    >>> str(DirectedLink("rack-a", "up"))
    'rack-a up'
    """

    child: str
    direction: Direction

    def __str__(self) -> str:
        return f"{self.child} {self.direction}"


def check_name(name: str, kind: str) -> None:
    """Raise unless ``name`` can name a host or a switch."""
    if not _NAME.fullmatch(name):
        raise TopologyError(
            f"{kind} name {name!r} cannot be used; write 1 to 63 of A-Z a-z 0-9 . _ - and begin with a letter or digit"
        )


class TopologyParts(TypedDict):
    """What a file says of a topology: the arguments of :class:`~syncline.topology.Topology`."""

    name: str
    root: Switch | Host
    source: str | None
    priorities: Priorities | None
    lines: Mapping[str, int]


def walk(node: Node) -> Iterator[Node]:
    """Yield ``node`` and all nodes below it, depth first, in file order."""
    yield node
    for child in node.children:
        yield from walk(child)
