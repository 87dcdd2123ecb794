"""A place in the tree for a machine that comes, or comes back, while the job runs.

A job keeps the largest tree that it has known; each of its ranks has a *place* there, which is a rank of that tree.
What is lost leaves its place free. A newcomer gets, in this order:

- the lowest free place of the host that is called as its machine is;
- where that host has no free place, a new one beside the host's last, with the same link;
- where one machine stands for all hosts (all ranks run on it, and the tree does not know it), the lowest free place;
- else a host of its own under the root, with the slowest uplink that is known there: each direction the slowest, and
  the longest latency. Where a host is the root, both come under a new switch, without rates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import count

from syncline.errors import TopologyError
from syncline.topology.host_matching import plain_name, same_host
from syncline.topology.topology import Topology
from syncline.topology.tree import Host, Link, Node, Rank, Switch


def with_places(
    known: Topology, taken: Sequence[int], newcomers: Sequence[str], *, machines: Sequence[str]
) -> tuple[Topology, tuple[int, ...]]:
    """Return ``known``, larger where it must be, and a place in it for each of ``newcomers``, which are hosts' names.

    ``taken`` are the places of the job's ranks, and ``machines`` what their machines are called. Raises
    :class:`TopologyError` where a name may mean several hosts.

    >>> racks = syncline.Topology.load("two-racks-5-3")
    >>> larger, places = with_places(racks, [0, 1, 2], ["h4", "elsewhere"], machines=["h0", "h1", "h2"])
    >>> places, larger.host_of(places[1]).name
    ((4, 8), 'elsewhere')
    """
    used, places = set(taken), []
    is_one_machine = len({*machines, *newcomers}) == 1
    for name in newcomers:
        hosts = same_host(name, known.hosts)
        if len(hosts) > 1:
            raise TopologyError(
                f"A newcomer's host {name!r} may be {' or '.join(repr(host.name) for host in hosts)} of the topology; "
                "tell it which (SYNCLINE_HOST, or init(host=))"
            )
        free = _free(hosts or (known.hosts if is_one_machine else ()), used)
        place = min(free, default=known.num_ranks)
        if not free:
            known = _with_rank(known, hosts[0]) if hosts else _with_host(known, name)
        used.add(place)
        places.append(place)
    return known, tuple(places)


def _free(hosts: Iterable[Host], used: Collection[int]) -> list[int]:
    return [rank.rank for host in hosts for rank in host.ranks if rank.rank not in used]


def _with_rank(known: Topology, host: Host) -> Topology:
    last = host.ranks[-1]
    parent = known.parent_of(last.name)
    assert parent is not None, "a rank is below its host"
    larger = _with_child(known.root, parent.name, replace(last, rank=known.num_ranks))
    return _topology(known, larger)


def _with_host(known: Topology, name: str) -> Topology:
    names = {node.name for node in known.walk()}
    plain = plain_name(name)
    own = plain if plain and plain not in names else _free_name("h", names)
    root, rank = known.root, Rank(rank=known.num_ranks)
    if isinstance(root, Host):
        old = replace(root, link=Link.unlimited())
        hosts = (old, Host(name=own, link=Link.unlimited(), ranks=(rank,)))
        return _topology(known, Switch(name=_free_name("switch-", {*names, own}), link=None, children=hosts))
    host = Host(name=own, link=_slowest([child.link for child in root.children if child.link]), ranks=(rank,))
    return _topology(known, replace(root, children=(*root.children, host)))


def _slowest(links: Sequence[Link]) -> Link:
    return Link(
        up_bytes_per_s=min(link.up_bytes_per_s for link in links),
        down_bytes_per_s=min(link.down_bytes_per_s for link in links),
        latency_s=max(link.latency_s for link in links),
    )


def _free_name(stem: str, names: Collection[str]) -> str:
    return next(name for number in count() if (name := f"{stem}{number}") not in names)


def _with_child(node: Node, name: str, child: Rank) -> Node:
    """Return the tree below ``node`` with one more rank, the last of those below the node of that name."""
    if isinstance(node, Rank):
        return node
    children = tuple(_with_child(below, name, child) for below in node.children)
    if node.name == name:
        children = (*children, child)
    if isinstance(node, Host):
        return node.with_children(children)  # type: ignore[arg-type]
    return replace(node, children=children)  # type: ignore[arg-type]


def _topology(known: Topology, root: Node) -> Topology:
    assert isinstance(root, Switch | Host), "the root stays what it was, or is a new switch"
    return Topology(name=known.name, root=root, source=known.source, lines=known.lines, priorities=known.priorities)
