"""Orders of ranks: as the topology has them, or dealt out to its subtrees in turns."""

from __future__ import annotations

from itertools import chain, zip_longest

from syncline.bench.task import Order
from syncline.topology import Node, Rank, Topology


def in_order(topology: Topology, order: Order) -> Topology:
    """Return the tree with its ranks numbered as ``order`` says."""
    return topology if order == "topology" else topology.permuted(interleaved(topology.root))


def interleaved(node: Node) -> list[int]:
    """Deal the ranks below ``node`` from its children in turns: 0, 5, 1, 6, 2, 7, 3, 4 for racks of 5 and 3."""
    if isinstance(node, Rank):
        return [node.rank]
    turns = zip_longest(*(interleaved(child) for child in node.children))
    return [rank for rank in chain.from_iterable(turns) if rank is not None]
