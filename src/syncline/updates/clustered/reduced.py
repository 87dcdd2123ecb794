"""The network as the servers see it: the topology with nobody but them in it, for the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from syncline.topology import Host, Switch, Topology


def reduced_topology(topology: Topology, ranks: Sequence[int]) -> Topology:
    """Return the tree with the given ranks alone; the new rank k is ``ranks[k]``. Switches left empty are left out."""
    number = {rank: new for new, rank in enumerate(ranks)}
    root = _reduce(topology.root, number)
    assert root is not None, "at least one rank is kept"
    return Topology(name=f"{topology.name}, {len(ranks)} servers", root=root)


def _reduce(node: Switch | Host, number: dict[int, int]) -> Switch | Host | None:
    if isinstance(node, Host):
        kept = tuple(replace(rank, rank=number[rank.rank]) for rank in node.ranks if rank.rank in number)
        return replace(node, ranks=kept) if kept else None
    children = tuple(child for child in (_reduce(below, number) for below in node.children) if child is not None)
    return Switch(name=node.name, link=node.link, children=children) if children else None
